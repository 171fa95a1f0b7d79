from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup.invertible import (
    AdditiveCoupling,
    AffineCoupling,
    Chain,
    Flip,
    MixtureCoupling,
    Split,
)
from tests.invertible_zoo import kept_bytes

# What a network returns for each value that the coupling changes.
COPIES = {AdditiveCoupling: 1, AffineCoupling: 2, MixtureCoupling: 26}
kinds = pytest.mark.parametrize("kind", COPIES)


class Says(nn.Module):
    """A network that says one number everywhere, in `num_channels` channels, and counts calls."""

    def __init__(self, value: float, num_channels: int) -> None:
        super().__init__()
        self.value, self.num_channels = value, num_channels
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x.new_full((x.shape[0], self.num_channels, *x.shape[2:]), self.value)


@pytest.mark.parametrize("logit", [0.0, 1e4, -1e4])
def test_extreme_logits_give_a_finite_loss_gradient_and_inverse(logit):
    layer = AffineCoupling(Says(logit, 4))
    x = torch.randn(3, 4, 2, 2, requires_grad=True)
    y, log_det = layer(x)
    (y.pow(2).sum() - log_det.sum()).backward()
    assert y.isfinite().all()
    assert log_det.abs().max() <= 2 * 2 * 4 + 1e-4  # bound, channels, pixels
    assert x.grad.isfinite().all()
    back, _ = layer.inverse(y)
    torch.testing.assert_close(back, x, rtol=1e-3, atol=1e-2)


def test_network_of_zeros_makes_the_identity():
    x = torch.randn(3, 4)
    for layer in (AdditiveCoupling(Says(0.0, 2)), AffineCoupling(Says(0.0, 4))):
        y, log_det = layer(x)
        assert torch.equal(y, x)
        assert log_det.tolist() == [0.0] * 3


def test_bound_is_the_largest_log_scale():
    _, log_det = AffineCoupling(Says(1e6, 2), bound=0.5)(torch.randn(1, 2))
    torch.testing.assert_close(log_det, torch.tensor([0.5]))


@kinds
@pytest.mark.parametrize("condition", ["first", "second"])
def test_the_conditioning_half_passes_unchanged(kind, condition):
    given, changed = (3, 2) if condition == "first" else (2, 3)  # an odd channel goes first
    layer = kind(nn.Linear(given, COPIES[kind] * changed), condition=condition)
    x = torch.randn(4, 5)
    y, _ = layer(x)
    same, other = (slice(3), slice(3, 5)) if condition == "first" else (slice(3, 5), slice(3))
    assert torch.equal(y[:, same], x[:, same])
    assert not torch.equal(y[:, other], x[:, other])


def test_block_of_revnets():
    f, g = nn.Linear(2, 2), nn.Linear(2, 2)
    x = torch.randn(3, 4)
    x1, x2 = x.chunk(2, dim=1)
    y1 = x1 + f(x2)
    y2 = x2 + g(y1)
    y, _ = AdditiveCoupling(f, g, condition="second")(x)
    assert torch.equal(y, torch.cat([y1, y2], dim=1))


def test_each_network_runs_once_in_each_direction():
    f, g = Says(1.0, 2), Says(2.0, 2)
    layer = AdditiveCoupling(f, g)
    y, _ = layer(torch.randn(3, 4))
    assert (f.calls, g.calls) == (1, 1)
    layer.inverse(y)
    assert (f.calls, g.calls) == (2, 2)
    network = Says(1.0, 4)
    affine = AffineCoupling(network)
    affine.inverse(affine(torch.randn(3, 4))[0])
    assert network.calls == 2


def test_networks_are_asked_through_evaluate():
    asked = []

    class Spy(AdditiveCoupling):
        def evaluate(self, network, *inputs, then=None):
            asked.append(network)
            return super().evaluate(network, *inputs, then=then)

    f, g = Says(1.0, 2), Says(2.0, 2)
    layer = Spy(f, g)
    y, _ = layer(torch.randn(3, 4))
    layer.inverse(y)
    assert asked == [f, g, g, f]


@pytest.mark.parametrize("kind", [AdditiveCoupling, AffineCoupling])
def test_gradient_of_the_log_det_reaches_the_input(kind):
    # In an affine coupling log_det depends on the input; a base class must not drop that.
    layer = kind(nn.Linear(2, 2 * COPIES[kind]).double())
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    _, log_det = layer(x)
    if kind is AdditiveCoupling:
        assert not log_det.requires_grad
        return
    (gradient,) = torch.autograd.grad(log_det.sum(), x)
    assert (gradient[:, :2] != 0).all()
    assert (gradient[:, 2:] == 0).all()


@kinds
def test_wrong_network_output_says_how_many_channels_are_needed(kind):
    with pytest.raises(ValueError, match=f"Give it {2 * COPIES[kind]} output channels"):
        kind(Says(0.0, 3))(torch.randn(1, 5))


@kinds
def test_one_channel_is_refused_with_the_way_out(kind):
    with pytest.raises(ValueError, match="Squeeze"):
        kind(nn.Identity())(torch.randn(1, 1, 4, 4))


def test_unsuitable_arguments_are_refused():
    with pytest.raises(ValueError, match="`condition` is 'left'"):
        AdditiveCoupling(nn.Identity(), condition="left")
    with pytest.raises(ValueError, match="`bound` is 0"):
        AffineCoupling(nn.Identity(), bound=0)


@kinds
def test_autocast_leaves_the_type_of_the_output(kind):
    layer = kind(nn.Linear(2, 2 * COPIES[kind]))
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, log_det = layer(x)
        back, _ = layer.inverse(y)
    assert y.dtype == log_det.dtype == torch.float32
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


def test_what_the_docstrings_say_is_kept():
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    unit = x.untyped_storage().nbytes()
    assert kept_bytes(AdditiveCoupling(Says(1.0, 2)), x) == 0
    assert kept_bytes(AffineCoupling(nn.Conv2d(2, 4, 1, bias=False)), x) <= 2 * unit + 64


@kinds
@pytest.mark.parametrize("condition", ["first", "second"])
def test_the_squares_of_one_colour_pass_unchanged(kind, condition):
    seen = []

    class Sees(nn.Conv2d):
        def forward(self, x):
            seen.append(x)
            return super().forward(x)

    layer = kind(Sees(2, 2 * COPIES[kind], 3, padding=1), condition=condition, split="checkerboard")
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


def test_a_board_needs_even_sides():
    layer = AffineCoupling(nn.Conv2d(1, 2, 1), split="checkerboard")
    with pytest.raises(ValueError, match=r"a checkerboard needs .* even H and W"):
        layer(torch.randn(1, 1, 3, 4))
    with pytest.raises(ValueError, match="`split` is 'rows'"):
        AdditiveCoupling(nn.Identity(), split="rows")


class WithContext(nn.Module):
    takes_context = True

    def __init__(self, out_features):
        super().__init__()
        self.linear = nn.Linear(2 + 3, out_features)

    def forward(self, x, context):
        return self.linear(torch.cat((x, context), dim=1)).tanh()


@pytest.mark.parametrize("memory", ["sqrt", "constant"])
def test_a_context_reaches_the_networks_and_gets_its_gradient(memory):
    torch.manual_seed(0)
    layers = [
        AffineCoupling(WithContext(4)),
        AdditiveCoupling(WithContext(2), nn.Linear(2, 2), condition="second"),
        Flip(),
    ]
    chain = Chain(*layers, Split(), AffineCoupling(nn.Linear(1, 2)), Split()).double()
    assert chain.takes_context
    assert not Chain(Flip()).takes_context
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    context = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def gradients(mode):
        chain.memory = mode
        latents, log_det = chain(x, context)
        assert len(latents) == 3
        loss = sum(z.square().sum() for z in latents) + log_det.sum()
        return torch.autograd.grad(loss, [x, context, *chain.parameters()])

    for found, expected in zip(gradients(memory), gradients("linear"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    latents, log_det = chain(x, context)
    back, minus = chain.inverse(latents, context)
    torch.testing.assert_close(back, x)
    torch.testing.assert_close(minus, -log_det)
    other, _ = chain(x, context + 1)
    assert not torch.equal(other[0], latents[0])
