"""What couplings change and leave alone, how they ask their networks, and exact ones on a grid."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    Chain,
    Flip,
    MixtureCoupling,
    Permute,
    Squeeze,
)
from tests.invertible_zoo import Says, kept_bytes
from tests.oracle import assert_same_step, run_step

# What a network returns for each value that the coupling changes.
COPIES = {AdditiveCoupling: 1, AffineCoupling: 2, MixtureCoupling: 26}
kinds = pytest.mark.parametrize("kind", COPIES)
conditions = pytest.mark.parametrize("condition", ["first", "second"])


@pytest.mark.parametrize("logit", [0.0, -1e4])
def test_extreme_logits_give_a_finite_loss_gradient_and_inverse(logit):
    layer = AffineCoupling(Says(logit, num_channels=4))
    x = torch.randn(3, 4, 2, 2, requires_grad=True)
    y, log_det = layer(x)
    (y.pow(2).sum() - log_det.sum()).backward()
    assert y.isfinite().all()
    # The bound is the largest log-scale of 2 channels and 4 pixels.
    sign = (logit > 0) - (logit < 0)
    torch.testing.assert_close(log_det, torch.full((3,), sign * layer.bound * 2 * 4))
    assert x.grad.isfinite().all()
    back, _ = layer.inverse(y)
    torch.testing.assert_close(back, x, rtol=1e-3, atol=1e-2)


@kinds
@conditions
def test_the_conditioning_half_passes_unchanged(kind, condition):
    given, changed = (3, 2) if condition == "first" else (2, 3)  # an odd channel goes first
    layer = kind(nn.Linear(given, COPIES[kind] * changed), condition=condition)
    x = torch.randn(4, 5)
    y, _ = layer(x)
    same, other = (slice(3), slice(3, 5)) if condition == "first" else (slice(3, 5), slice(3))
    assert torch.equal(y[:, same], x[:, same])
    assert not torch.equal(y[:, other], x[:, other])


@kinds
@conditions
def test_the_squares_of_one_colour_pass_unchanged(kind, condition):
    seen, network = [], nn.Conv2d(2, 2 * COPIES[kind], 3, padding=1)
    network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer = kind(network, condition=condition, split="checkerboard")
    x = torch.randn(3, 2, 4, 6)
    y, _ = layer(x)
    first = (torch.arange(4)[:, None] + torch.arange(6)) % 2 == 0  # the upper left corner's colour
    same = first if condition == "first" else ~first
    assert torch.equal(y[:, :, same], x[:, :, same])
    assert (y[:, :, ~same] != x[:, :, ~same]).all()
    assert torch.equal(seen[0], x * same)
    if kind is AdditiveCoupling:  # what the network says at the other places does not count
        shift = layer.network(x * same)
        torch.testing.assert_close(y[:, :, ~same], (x + shift)[:, :, ~same])


def test_block_of_revnets():
    f, g, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.randn(3, 4)
    x1, x2 = x.chunk(2, dim=1)
    y1 = x1 + f(x2)
    y, _ = AdditiveCoupling(f, g, condition="second")(x)
    assert torch.equal(y, torch.cat([y1, x2 + g(y1)], dim=1))


def test_networks_are_asked_through_evaluate_once_in_each_direction():
    asked = []

    class Spy(AdditiveCoupling):
        def evaluate(self, network, *inputs, then=None):
            asked.append(network)
            return super().evaluate(network, *inputs, then=then)

    f, g = Says(1.0, num_channels=2), Says(2.0, num_channels=2)
    layer = Spy(f, g)
    y, _ = layer(torch.randn(3, 4))
    assert asked == [f, g]
    layer.inverse(y)
    assert asked == [f, g, g, f]
    assert (f.num_calls, g.num_calls) == (2, 2)


def test_what_the_docstrings_say_is_kept():
    x, k = torch.randn(2, 4, 8, 8, requires_grad=True), 16
    unit = x.untyped_storage().nbytes()
    assert kept_bytes(AdditiveCoupling(Says(1.0, num_channels=2)), x) == 0
    assert kept_bytes(AffineCoupling(nn.Conv2d(2, 4, 1, bias=False)), x) <= 2 * unit + 64
    mixture = nn.Conv2d(2, (3 * k + 2) * 2, 1, bias=False)
    kept = kept_bytes(MixtureCoupling(mixture, num_components=k), x)
    assert 12 * k * unit / 2 < kept < 16 * k * unit / 2


def exact(depth, scale=1.0):
    torch.manual_seed(0)
    networks = [
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2 * depth)
    ]
    for parameter in nn.ModuleList(networks).parameters():
        parameter.data *= scale
    pairs = zip(networks[::2], networks[1::2], strict=True)
    return Chain(*(AdditiveCoupling(*pair, exact=True, fraction_bits=12) for pair in pairs))


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
        (lambda: exact(200, 3.0), (4, 16)),
        pytest.param(lambda: exact(1000, 3.0), (4, 16), marks=pytest.mark.exhaustive),
        (moved, (2, 2, 8, 8)),
        (on_a_board, (2, 1, 6, 6)),
    ],
    ids=["many stiff ones", "a thousand", "moved", "on a checkerboard"],
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
def test_constant_memory_gives_the_very_gradients_of_linear():
    """In a stiff net, where in floating point they would be wrong by more than their size."""
    chain, x = exact(200, 3.0), on_grid(4, 16).requires_grad_()
    want = run_step(chain, x)
    for drift in ("ignore", "raise"):
        chain.drift = drift
        assert_same_step(run_step(chain, x, memory="constant"), want)


def test_the_gradient_goes_straight_through():
    network, x = nn.Linear(2, 2), torch.randn(3, 4, requires_grad=True)
    plain = AdditiveCoupling(network)
    coarse = AdditiveCoupling(network, exact=True, fraction_bits=4)
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
