"""`adapt` for transforms of torch.distributions, and what is refused.

Flows of other libraries are in tests/programs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import distributions as dist
from torch import nn

import recoup
from recoup.invertible import ActNorm, Chain, adapt, check_invertible
from tests.oracle import assert_same_tensors


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


def test_those_that_saturate_are_recomputed():
    found = [adapt(layer).inverts_in_backward for layer in layers()]
    assert found == [True, True, False, True]
    assert "recomputed: its inverse is not known to be cheap and exact" in repr(adapt(layers()[2]))
    with pytest.warns(UserWarning, match="1 of 5 modules"):
        Chain(*map(adapt, layers()), memory="constant")


def test_parameters_of_a_transform_are_trained():
    loc = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    found = []
    for memory in ("linear", "constant"):
        transform = dist.AffineTransform(loc, 2.0, event_dim=1)
        chain = Chain(ActNorm(2), adapt(transform), adapt(transform), memory=memory).double()
        y, log_det = chain(torch.ones(3, 2, dtype=torch.float64))
        (y.sin().sum() + log_det.sum()).backward()
        found.append({"loc": loc.grad, "scale": chain[0].log_scale.grad})
        loc.grad = None
    assert_same_tensors(found[1], found[0], rtol=1e-12)


def test_an_invertible_module_is_returned_as_it_is():
    layer = ActNorm(3)
    assert adapt(layer) is layer


@pytest.mark.parametrize("value", [42, None, nn.Linear(2, 2), nn.Linear, "zuko"])
def test_what_is_no_layer_is_refused(value):
    with pytest.raises(ValueError, match=r"`transform` is .*, but must be a layer of zuko"):
        adapt(value)


def test_what_has_no_inverse_is_refused():
    for transform in (dist.AbsTransform(), dist.SoftmaxTransform()):
        with pytest.raises(ValueError, match=r"`transform` is .*not bijective"):
            adapt(transform)
    with pytest.raises(ValueError, match="`transform` keeps its last value"):
        adapt(dist.ExpTransform(cache_size=1))


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2)), Chain(ActNorm(2))])
def test_a_model_without_a_foreign_flow_is_refused(model):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"`model` is a .*, in which there is no flow of zuko"):
        recoup.train_in(model)
    assert_same_tensors(model.state_dict(), before)
    with pytest.raises(ValueError, match=r"`model` is 42, but must be an nn\.Module"):
        recoup.train_in(42)
