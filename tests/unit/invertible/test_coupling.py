"""Couplings: what they change, how they ask their networks, mixtures, and exact ones on a grid."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

from recoup import invertible as inv
from recoup.errors import NotInvertibleError
from recoup.flows import DenseNetwork
from recoup.invertible import mixture as module
from tests.alive import held_after
from tests.invertible_zoo import Says, stiff
from tests.oracle import assert_same_step, run_step
from tests.unit.flows.models import filled

# What a network returns for each value that the coupling changes.
COPIES = {inv.AdditiveCoupling: 1, inv.AffineCoupling: 2, inv.MixtureCoupling: 26}


@pytest.mark.parametrize("logit", [0.0, -1e4])
def test_extreme_logits_give_a_finite_loss_gradient_and_inverse(logit):
    layer = inv.AffineCoupling(Says(logit, num_channels=4))
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


@pytest.mark.parametrize("split", ["channels", "checkerboard"])
@pytest.mark.parametrize("condition", ["first", "second"])
@pytest.mark.parametrize("kind", COPIES)
def test_what_the_network_sees_passes_unchanged(kind, condition, split):
    seen, size = [], {"channels": 5, "checkerboard": 2}[split]
    first = torch.arange(5)[:, None, None].expand(5, 4, 6) < 3  # an odd channel goes first
    if split == "checkerboard":  # the upper left corner's colour
        first = ((torch.arange(4)[:, None] + torch.arange(6)) % 2 == 0).expand(2, 4, 6)
    same, x = first if condition == "first" else ~first, torch.randn(3, size, 4, 6)
    num_seen = int(same.any(1).any(1).sum())
    network = nn.Conv2d(num_seen, COPIES[kind] * (size - num_seen or size), 3, padding=1)
    network.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer = kind(network, condition=condition, split=split)
    y, _ = layer(x)
    assert torch.equal(y[:, same], x[:, same])
    assert (y[:, ~same] != x[:, ~same]).all()
    if split == "checkerboard":
        assert torch.equal(seen[0], x * same)
    if kind is inv.AdditiveCoupling and split == "checkerboard":
        # What the network says at the other places does not count.
        torch.testing.assert_close(y[:, ~same], (x + network(x * same))[:, ~same])


def test_block_of_revnets():
    f, g, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.randn(3, 4)
    x1, x2 = x.chunk(2, dim=1)
    y1 = x1 + f(x2)
    y, _ = inv.AdditiveCoupling(f, g, condition="second")(x)
    assert torch.equal(y, torch.cat([y1, x2 + g(y1)], dim=1))


def test_what_the_docstrings_say_is_kept():
    x, k = torch.randn(2, 4, 8, 8, requires_grad=True), 16
    unit, conv = x.untyped_storage().nbytes(), partial(nn.Conv2d, 2, kernel_size=1, bias=False)
    kept = lambda layer: held_after(lambda: [y.grad_fn for y in layer(x)]).num_bytes  # noqa: E731
    assert kept(inv.AdditiveCoupling(Says(1.0, num_channels=2))) == 0
    assert kept(inv.AffineCoupling(conv(4))) <= unit + 64
    mixture = inv.MixtureCoupling(conv((3 * k + 2) * 2), num_components=k)
    assert 12 * k * unit / 2 < kept(mixture) < 16 * k * unit / 2


def exact(depth, scale=1.0):
    return inv.Chain(*stiff(depth, scale, exact=True, fraction_bits=12))


def on_grid(*shape):
    return torch.randn(*shape).mul(2**12).round().div(2**12)


def of_conv(size, **options):
    return inv.AdditiveCoupling(nn.Conv2d(size, size, 3, padding=1), exact=True, **options)


@pytest.mark.parametrize(("make", "shape"), [
    (lambda: exact(100, 3.0), (4, 16)),  # many stiff ones
    (lambda: inv.Chain(inv.Squeeze(), *[of_conv(4), inv.Permute(8)] * 20), (2, 2, 8, 8)),
    (lambda: of_conv(1, split="checkerboard"), (2, 1, 6, 6)),
])  # fmt: skip
def test_the_very_bits_come_back(make, shape):
    chain, x = make(), on_grid(*shape)
    with torch.no_grad():
        assert torch.equal(chain.inverse(chain(x)[0])[0], x)
        for block in chain.modules():
            block.exact = False
        assert not torch.equal(chain.inverse(chain(x)[0])[0], x)  # so that this can fail


def test_the_gradient_goes_straight_through():
    network, x = nn.Linear(2, 2), torch.randn(3, 4, requires_grad=True)
    plain = inv.AdditiveCoupling(network)
    coarse = inv.AdditiveCoupling(network, exact=True, fraction_bits=4)
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


def vectors(k=4):
    layer = inv.MixtureCoupling(DenseNetwork(3, (3 * k + 2) * 2, width=6), num_components=k)
    return filled(layer, 1.0), torch.randn(3, 5, dtype=torch.float64)


def test_the_inverse_has_the_derivatives_of_the_inverse_function():
    layer, x = vectors()
    y = filled(layer, 0.5)(x)[0].detach().requires_grad_()
    # gradcheck changes parameters in place
    call = lambda y, *parameters: layer.inverse(y)  # noqa: E731
    assert torch.autograd.gradcheck(call, [y, *layer.parameters()], fast_mode=True)
    call = lambda y: layer.inverse(y)[0]  # noqa: E731
    assert torch.autograd.gradgradcheck(call, [y], fast_mode=True, atol=1e-4)


def test_it_is_the_coupling_of_the_paper_and_a_share_of_the_identity():
    logits, means, raw = [0.3, -1.0, 0.5], [2.0, -1.0, 0.5], [0.2, -0.9, 0.0]
    shift, raw_scale = -0.7, 0.4
    says = Says(*logits, *means, *raw, shift, raw_scale)
    x = torch.linspace(-4, 4, 21, dtype=torch.float64).view(-1, 1)
    y, log_det = inv.MixtureCoupling(says, num_components=3)(torch.cat([x, x], dim=1))
    logits, means, raw = torch.tensor([logits, means, raw], dtype=torch.float64)
    scales = (3 * torch.tanh(raw / 3)).exp()
    means = means + torch.tensor([-1.0, 0.0, 1.0])
    log_scale = 3 * torch.tanh(torch.tensor(raw_scale, dtype=torch.float64) / 3)
    x.requires_grad_()
    below = (torch.softmax(logits, -1) * torch.sigmoid((x.unsqueeze(-1) - means) / scales)).sum(-1)
    expected = (0.99 * torch.logit(below) + 0.01 * x) * log_scale.exp() + shift
    torch.testing.assert_close(y[:, 1:], expected, rtol=1e-7, atol=1e-7)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(log_det, slope.log().squeeze(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_values_have_a_finite_log_det_gradient_and_inverse(dtype):
    layer = vectors()[0].to(dtype)
    x = torch.randn(64, 5, dtype=dtype)
    x[:, 3:] *= 1e5  # what is changed; the network sees ordinary values
    x.requires_grad_()
    y, log_det = layer(x)
    (y.sum() + log_det.sum()).backward()
    assert log_det.isfinite().all()
    assert x.grad.isfinite().all()
    back, undone = layer.inverse(y)
    # 0.01 is the least slope: what rounding does to y is at most a hundred times that in x
    tolerance = 4e3 * torch.finfo(dtype).eps
    torch.testing.assert_close(back, x, rtol=tolerance, atol=tolerance)
    assert (log_det + undone).abs().max() < 1e4 * tolerance
    y.data[:2, 4] = torch.tensor([torch.nan, torch.inf])
    again, _ = layer.inverse(y)
    assert again[:2, 4].isnan().all()
    torch.testing.assert_close(again[2:], back[2:])


def test_in_a_wide_gap_the_inverse_is_not_lost():
    # Two sharp components 40 apart: between them the distribution function is flat to every digit.
    layer = inv.MixtureCoupling(Says(0.0, 0.0, -19.0, 19.0, -9.0, -9.0, 0.0, 0.0), num_components=2)
    x = torch.zeros(41, 2)
    x[:, 1] = torch.linspace(-20, 20, 41)
    y, log_det = layer(x)
    assert log_det.min() == pytest.approx(torch.tensor(0.01).log().item(), rel=1e-3)
    torch.testing.assert_close(layer.inverse(y)[0], x, rtol=1e-4, atol=1e-4)


def test_the_search_takes_few_steps_and_says_so_if_it_does_not_converge(monkeypatch):
    layer, _ = vectors(k=8)
    y, _ = layer(torch.randn(500, 5, dtype=torch.float64))
    of, name = module._Bend, "value_and_slope"
    spy = patch.object(of, name, autospec=True, side_effect=getattr(of, name))
    with torch.no_grad(), spy as search:
        layer.inverse(y)
    assert 2 <= search.call_count <= 40
    monkeypatch.setattr(module, "_MOST_STEPS", 1)
    with pytest.raises(NotInvertibleError, match="did not converge in 1 steps"):
        layer.inverse(y)


def test_constant_memory_gives_the_very_gradients_of_linear():
    chain, x = exact(30, 3.0), on_grid(4, 16).requires_grad_()  # which floats would get all wrong
    want = run_step(chain, x)
    for drift in ("ignore", "raise"):
        chain.drift = drift
        assert_same_step(run_step(chain, x, memory="constant"), want)
