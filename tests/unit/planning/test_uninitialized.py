"""Models whose parameters their first forward makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup


@pytest.mark.parametrize("layer", [lambda: nn.LazyLinear(8), nn.LazyBatchNorm1d])
def test_uninitialized_parameters_are_an_error_with_the_way_out(layer):
    """N10: of a plan, and of a chain with bytes."""

    def blocks():
        return [nn.Sequential(layer(), nn.Linear(8, 8)) for _ in range(3)]

    model, x = nn.Sequential(*blocks()), torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"not initialized.*torch\.no_grad\(\)"):
        recoup.plan(model, x, budget="1 MiB")
    chain = recoup.Sequential(*blocks(), memory="1 MiB")
    with pytest.raises(ValueError, match=r"not initialized.*torch\.no_grad\(\)"):
        chain(x)
    for each in (model, chain):
        with torch.no_grad():
            each(x)
    recoup.plan(model, x, budget="1 MiB")
    chain(x).sum().backward()
