"""Layers of a bounded slope: the bound, by the dense matrix; gradients through it; no state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

from recoup.invertible import LipschitzConv2d, LipschitzLinear, LipSwish
from recoup.invertible.lipschitz import one_weight_a_call


def dense_norm(layer, *shape):
    """The norm of a layer, from its matrix: its outputs for every unit vector."""
    unit = torch.eye(math.prod(shape), dtype=torch.float64).view(-1, *shape)
    with torch.no_grad():
        matrix = (layer(unit) - layer(torch.zeros_like(unit))).flatten(1)
    return torch.linalg.svdvals(matrix)[0].item()


KINDS = {
    "linear": (lambda: LipschitzLinear(7, 5, coefficient=0.8), (7,)),
    "1x1": (lambda: LipschitzConv2d(3, 4, 1, coefficient=0.8), (3, 4, 4)),
    "2x2": (lambda: LipschitzConv2d(3, 4, 2, coefficient=0.8), (3, 9, 9)),
    "3x5": (lambda: LipschitzConv2d(2, 3, (3, 5), padding=(1, 2), coefficient=0.8), (2, 9, 9)),
}


@pytest.fixture(params=KINDS)
def kind(request):
    torch.manual_seed(0)
    build, shape = KINDS[request.param]
    return build().double(), shape


def test_norm_is_at_most_the_coefficient_and_not_much_less(kind):
    layer, shape = kind
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.1)
    # A small image leaves less of an unbounded one.
    assert 0.8 * (0.99 if len(shape) == 1 else 0.6) <= dense_norm(layer, *shape)
    assert dense_norm(layer, *shape) <= 0.8 * (1 + 1e-9)
    layer.weight.data.mul_(-100)  # a change that leaves no version behind, and no state
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert dense_norm(layer, *shape) <= 0.8 * (1 + 1e-9)


def test_bound_of_a_convolution_is_close_for_kernels_at_the_extremes():
    layer = LipschitzConv2d(2, 2, 3, padding=1, coefficient=0.9, dtype=torch.float64)
    with torch.no_grad():
        for start in (nn.init.ones_, nn.init.dirac_, nn.init.orthogonal_):
            start(layer.weight).mul_(-50)
            assert 0.8 < dense_norm(layer, 2, 16, 16) <= 0.9


def test_between_two_frequencies_of_the_grid_the_norm_is_no_higher():
    layer = LipschitzConv2d(1, 1, (1, 3), coefficient=0.9, dtype=torch.float64)
    with torch.no_grad():  # of largest norm in the middle of two frequencies
        layer.weight.copy_(torch.tensor([1.0, 7.02, -0.9]).view(1, 1, 1, 3))

    def largest(num_frequencies):
        frequencies = 2 * math.pi / num_frequencies * torch.arange(num_frequencies)
        waves = torch.exp(1j * frequencies[:, None] * torch.arange(3)).to(torch.complex128)
        return (waves @ layer.normalized_weight().detach().flatten().to(waves.dtype)).abs().max()

    assert largest(4096) > 1.001 * largest(16)
    assert largest(4096) <= 0.9


def test_weights_below_the_coefficient_and_of_zeros_stay_as_they_are(kind):
    layer, shape = kind
    with torch.no_grad():
        layer.weight.mul_(1e-3)
    assert torch.equal(layer.normalized_weight(), layer.weight)
    with torch.no_grad():
        layer.weight.zero_()
    layer(torch.ones(2, *shape, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.sampled(4)
def test_gradients_go_through_the_norm(kind):
    layer, shape = kind
    with torch.no_grad():
        layer.weight.normal_()
    x = torch.randn(1, *shape, dtype=torch.float64)

    def call(weight):
        return functional_call(layer, {"weight": weight}, (x,)).square().sum()

    assert torch.autograd.gradcheck(call, layer.weight)
    assert torch.autograd.gradgradcheck(call, layer.weight, fast_mode=True)
    # the output does not depend on the size of the weight, so its gradient is at a right angle
    (gradient,) = torch.autograd.grad(call(layer.weight), layer.weight)
    assert (gradient * layer.weight).sum().abs() < 1e-9 * gradient.norm() * layer.weight.norm()


def test_one_weight_a_call_computes_each_norm_once_for_gradients_and_once_without():
    layer = LipschitzLinear(3, 3)
    with one_weight_a_call():
        weight = layer.normalized_weight()
        assert layer.normalized_weight() is weight
        with torch.no_grad():
            assert not layer.normalized_weight().requires_grad
        with one_weight_a_call():
            assert layer.normalized_weight() is not weight
        assert layer.normalized_weight() is weight
    assert layer.normalized_weight() is not weight


def test_half_precision_weights_and_autocast():
    x, layer = torch.randn(2, 3), LipschitzLinear(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weight = layer.normalized_weight()
    assert torch.equal(weight, layer.normalized_weight())
    assert layer.bfloat16()(x.bfloat16()).dtype is torch.bfloat16


def test_lipswish_rises_by_at_most_one():
    activation = LipSwish().double()
    x = torch.linspace(-30, 30, 20001, dtype=torch.float64, requires_grad=True)
    for beta in (-5.0, 0.5, 5.0):
        nn.init.constant_(activation.raw_beta, beta)
        slope = torch.autograd.grad(activation(x).sum(), x)[0]
        assert slope.abs().max() <= 1
    assert slope.abs().max() > 0.99
    assert LipSwish()(torch.ones(1)).item() == pytest.approx(1 / (1 + math.exp(-1)) / 1.1)
