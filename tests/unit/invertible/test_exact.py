"""Couplings on a grid: exact to the bit, at any depth, or an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    Chain,
    Flip,
    Permute,
    Squeeze,
    check_invertible,
)
from tests.oracle import assert_same_step, run_step


def dense(scale=1.0, half=8):
    network = nn.Sequential(nn.Linear(half, 16), nn.Tanh(), nn.Linear(16, half))
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(scale)
    return network


def exact(depth, scale=1.0):
    torch.manual_seed(0)
    networks = ((dense(scale), dense(scale)) for _ in range(depth))
    return Chain(*(AdditiveCoupling(*each, exact=True, fraction_bits=12) for each in networks))


def on_grid(*shape):
    return torch.randn(*shape).mul(2**12).round().div(2**12)


def moved():
    """Layers that move values keep exactness."""
    coupling = AdditiveCoupling(nn.Conv2d(4, 4, 3, padding=1), exact=True)
    return Chain(Squeeze(), *[coupling, Flip(), Permute(8)] * 20)


def on_a_board():
    return AdditiveCoupling(nn.Conv2d(1, 1, 3, padding=1), exact=True, split="checkerboard")


@pytest.mark.parametrize(
    ("chain", "shape"),
    [
        (lambda: exact(1000), (4, 16)),
        pytest.param(lambda: exact(1000, 3.0), (4, 16), marks=pytest.mark.exhaustive),
        (moved, (2, 2, 8, 8)),
        (on_a_board, (2, 1, 6, 6)),
    ],
    ids=["a thousand", "a thousand stiff ones", "moved", "on a checkerboard"],
)
def test_the_very_bits_come_back(chain, shape):
    chain, x = chain(), on_grid(*shape)
    with torch.no_grad():
        assert torch.equal(chain.inverse(chain(x)[0])[0], x)
        for block in chain.modules():
            block.exact = False
        assert not torch.equal(chain.inverse(chain(x)[0])[0], x)  # so that this can fail


def test_a_value_off_the_grid_comes_back_rounded():
    chain, x = exact(3), torch.randn(4, 16)
    back = chain.inverse(chain(x)[0])[0]
    assert (back - x).abs().max() <= 2**-13
    assert torch.equal(chain.inverse(chain(back)[0])[0], back)
    # Floating layers leave the grid, but do no worse than rounding.
    chain = Chain(exact(2), ActNorm(16), exact(2))
    x = on_grid(64, 16)
    assert 0 < (chain.inverse(chain(x)[0])[0] - x).abs().max() < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("drift", ["ignore", "raise"])
def test_constant_memory_gives_the_very_gradients_of_linear(drift):
    """In a stiff net, where in floating point they would be wrong by more than their size."""
    chain, x = exact(200, 3.0), on_grid(4, 16).requires_grad_()
    want = run_step(chain, x)
    chain.drift = drift
    assert_same_step(run_step(chain, x, memory="constant"), want)


def test_the_gradient_goes_straight_through():
    network, x = nn.Linear(2, 2), torch.randn(3, 4, requires_grad=True)
    plain, coarse = (
        AdditiveCoupling(network),
        AdditiveCoupling(network, exact=True, fraction_bits=4),
    )
    assert not torch.equal(coarse(x)[0], plain(x)[0])
    given, want = (
        torch.autograd.grad(each(x)[0].sum(), [x, network.weight]) for each in (coarse, plain)
    )
    assert torch.equal(given[0], want[0])
    assert torch.allclose(given[1], want[1], atol=0.5)  # of the rounded input


def test_under_autocast_values_stay_on_the_grid():
    chain, x = exact(20), on_grid(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = chain(x)
        assert y.dtype is torch.float32
        assert torch.equal(chain.inverse(y)[0], x)


def test_check_invertible_passes_on_the_grid():
    report = check_invertible(exact(2), on_grid(3, 16))
    assert report, str(report)
    assert "exact=True, fraction_bits=12" in repr(exact(1))
