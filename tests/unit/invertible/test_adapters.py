"""`adapt` for transforms of torch.distributions; flows of other libraries are in tests/programs."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as dist

from recoup.invertible import ActNorm, Chain, adapt, check_invertible


def layers():
    torch.manual_seed(0)
    loc, scale = (torch.randn(4, dtype=torch.float64) for _ in range(2))
    affine = dist.AffineTransform(loc, scale.exp())
    return [
        dist.IndependentTransform(affine, 1),
        dist.ComposeTransform([dist.ExpTransform(), dist.ExpTransform().inv]),
        dist.SigmoidTransform(),
        dist.AffineTransform(-0.5, 3.0).inv,
    ]


def test_transforms_of_torch_keep_the_contract():
    x = torch.randn(3, 4, dtype=torch.float64)
    for layer in (*map(adapt, layers()), Chain(*map(adapt, layers()))):
        assert check_invertible(layer, x)


def test_those_that_saturate_are_recomputed_and_an_invertible_module_is_returned_as_it_is():
    found = [adapt(layer).inverts_in_backward for layer in layers()]
    assert found == [True, True, False, True]
    assert "recomputed: its inverse is not known to be cheap and exact" in repr(adapt(layers()[2]))
    with pytest.warns(UserWarning, match="1 of 5 modules"):
        Chain(*map(adapt, layers()), memory="constant")
    layer = ActNorm(3)
    assert adapt(layer) is layer
