"""Couplings on a grid: exact to the bit, at any depth, or an error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from recoup.errors import GridError
from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    Chain,
    Flip,
    Permute,
    Squeeze,
    check_invertible,
)
from tests.oracle import assert_same_tensors


def dense(scale=1.0, half=8):
    network = nn.Sequential(nn.Linear(half, 16), nn.Tanh(), nn.Linear(16, half))
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(scale)
    return network


def exact(depth, scale=1.0, fraction_bits=12, **options):
    torch.manual_seed(0)
    return Chain(
        *(
            AdditiveCoupling(dense(scale), dense(scale), exact=True, fraction_bits=fraction_bits)
            for _ in range(depth)
        ),
        **options,
    )


def on_grid(*shape, fraction_bits=12):
    return torch.randn(*shape).mul(2**fraction_bits).round().div(2**fraction_bits)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_very_bits_come_back_from_a_thousand_blocks(scale):
    chain = exact(1000, scale)
    x = on_grid(4, 16)
    with torch.no_grad():
        y, _ = chain(x)
        assert torch.equal(chain.inverse(y)[0], x)
        for block in chain:
            block.exact = False
        y, _ = chain(x)
        assert not torch.equal(chain.inverse(y)[0], x)  # so that this can fail


def test_a_value_off_the_grid_comes_back_rounded():
    chain = exact(3)
    x = torch.randn(4, 16)
    back = chain.inverse(chain(x)[0])[0]
    assert (back - x).abs().max() <= 2**-13
    assert torch.equal(chain.inverse(chain(back)[0])[0], back)


def gradients(chain, x):
    x = x.detach().requires_grad_()
    y, _ = chain(x)
    found = torch.autograd.grad(y.square().mean(), [x, *chain.parameters()])
    return dict(zip(["input", *dict(chain.named_parameters())], found, strict=True))


@pytest.mark.slow
def test_constant_memory_gives_the_very_gradients_of_linear():
    """In a stiff net, where in floating point they would be wrong by more than their size."""
    chain = exact(200, 3.0)
    x = on_grid(4, 16)
    expected = gradients(chain, x)
    for drift in ("ignore", "raise"):
        again = copy.deepcopy(chain)
        again.drift = drift
        again.memory = "constant"
        assert_same_tensors(gradients(again, x), expected)
    assert again.drift.largest_error == 0.0


def test_the_gradient_goes_straight_through():
    network = nn.Linear(2, 2)
    coarse = AdditiveCoupling(network, exact=True, fraction_bits=4)
    x = torch.randn(3, 4, requires_grad=True)
    y = coarse(x)[0]
    assert not torch.equal(y, AdditiveCoupling(network)(x)[0])
    given = torch.autograd.grad(y.sum(), [x, network.weight])
    plain = torch.autograd.grad(AdditiveCoupling(network)(x)[0].sum(), [x, network.weight])
    assert torch.equal(given[0], plain[0])
    assert torch.allclose(given[1], plain[1], atol=0.5)  # of the rounded input


def test_layers_that_move_values_keep_exactness():
    torch.manual_seed(0)
    network = nn.Conv2d(4, 4, 3, padding=1)
    chain = Chain(
        Squeeze(),
        *(
            layer
            for _ in range(20)
            for layer in (AdditiveCoupling(network, exact=True), Flip(), Permute(8))
        ),
    )
    x = on_grid(2, 2, 8, 8)
    assert torch.equal(chain.inverse(chain(x)[0])[0], x)


def test_on_a_checkerboard():
    coupling = AdditiveCoupling(nn.Conv2d(1, 1, 3, padding=1), exact=True, split="checkerboard")
    x = on_grid(2, 1, 6, 6)
    assert torch.equal(coupling.inverse(coupling(x)[0])[0], x)


@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_past_the_bound_is_an_error(direction):
    coupling = exact(1, fraction_bits=16)[0]
    x = on_grid(2, 16)
    x[0, 15] = 300.0  # the bound is 256
    with pytest.raises(GridError, match=r"300.*below 256 only.*`fraction_bits=15`") as caught:
        getattr(coupling, direction)(x)
    assert "AdditiveCoupling" in str(caught.value)
    coupling.fraction_bits = 15
    getattr(coupling, direction)(x)


def test_values_that_are_not_finite_are_an_error():
    x = on_grid(2, 16)
    x[0, 0] = float("nan")
    with pytest.raises(GridError, match="not finite"):
        exact(1)(x)


def test_bad_arguments():
    with pytest.raises(ValueError, match="`fraction_bits` is 21"):
        AdditiveCoupling(nn.Identity(), exact=True, fraction_bits=21)
    with pytest.raises(ValueError, match=r"torch.bfloat16, but with `exact`"):
        exact(1).bfloat16()(torch.randn(2, 16).bfloat16())
    with pytest.raises(ValueError, match=r"torch.int64"):
        exact(1)(torch.ones(2, 16, dtype=torch.int64))


def test_under_autocast_values_stay_on_the_grid():
    chain = exact(20)
    x = on_grid(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = chain(x)
        assert y.dtype is torch.float32
        assert torch.equal(chain.inverse(y)[0], x)


def test_what_floating_layers_do_to_it():
    """They leave the grid, and the round trip is no longer exact, but no worse than rounding."""
    chain = Chain(exact(2), ActNorm(16), exact(2))
    x = on_grid(64, 16)
    back = chain.inverse(chain(x)[0])[0]
    assert 0 < (back - x).abs().max() < 1e-2


def test_check_invertible_passes_on_the_grid():
    report = check_invertible(exact(2), on_grid(3, 16))
    assert [str(finding) for finding in report.findings if not finding.passed] == []
    assert "exact=True, fraction_bits=12" in repr(exact(1))
