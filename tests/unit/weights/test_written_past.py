"""Writes to a computed weight that no operator shows: backward has what forward saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup

WAYS = {
    "parts without a graph": lambda weight: weight.chunk(2)[0].zero_(),
    "a plain alias": lambda weight: weight.as_subclass(torch.Tensor).zero_(),
}


@pytest.mark.parametrize("apply", [recoup.weight_noise, recoup.weight_dropout, recoup.weight_norm])
@pytest.mark.parametrize("way", WAYS)
def test_backward_has_what_forward_saved(way, apply):
    layer, x = apply(nn.Linear(6, 6)), torch.randn(3, 6, requires_grad=True)
    with recoup.weights.step(layer):
        weight = layer.weight
        want = weight.detach().clone().sum(0).expand(3, 6)
        loss = F.linear(x, weight).sum()
        with torch.no_grad():
            WAYS[way](weight)
    assert weight.as_subclass(torch.Tensor)[:3].eq(0).all()  # it was written to
    (got,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(got, want.as_subclass(torch.Tensor))
