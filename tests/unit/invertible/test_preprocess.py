"""Layers that make data fit for a flow: `Normalize`, `Logit`, and noise on grey levels."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from recoup import schedules
from recoup.flows import ConvNetwork, Flow
from recoup.invertible import (
    ActNorm,
    AffineCoupling,
    Chain,
    Dequantize,
    Flip,
    Logit,
    Squeeze,
    VariationalDequantize,
)


def test_logit_keeps_the_ends_finite():
    x = torch.tensor([[0.0, 1.0]], requires_grad=True)
    y, log_det = Logit()(x)
    (y.sum() + log_det.sum()).backward()
    assert all(each.isfinite().all() for each in (y, log_det, x.grad))
    x, log_det = Logit(0.05).inverse(torch.tensor([[-200.0, 200.0]]))
    assert x.isfinite().all()
    torch.testing.assert_close(log_det, torch.tensor([-400.0 - 2 * math.log(0.9)]))


def learned(levels=17):
    torch.manual_seed(1)
    network = partial(ConvNetwork, 1, 2, width=4, num_context=1)
    couplings = [
        AffineCoupling(network(), condition=side, split="checkerboard")
        for side in ("second", "first")
    ]
    made = VariationalDequantize(levels, Chain(ActNorm(1), *couplings))
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made.eval()


kinds = pytest.mark.parametrize("make", [Dequantize, learned])


@kinds
@pytest.mark.parametrize(
    ("levels", "dtype"),
    [(2, torch.uint8), (17, torch.int64), (255, torch.float32), (256, torch.float64)],
)
def test_every_level_is_found_again(make, dtype, levels):
    layer = make(levels).to(dtype if dtype.is_floating_point else torch.float32)
    x = torch.arange(levels).repeat(400).view(50, 1, 4, -1).to(dtype)
    y, log_det = layer(x)
    assert y.dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert y.min() >= 0
    assert y.max() < 1
    back, inverse_log_det = layer.inverse(y)
    assert torch.equal(back, x.to(back.dtype))
    if make is Dequantize:
        expected = torch.full((50,), -8 * levels * math.log(levels))
        torch.testing.assert_close(log_det, expected.to(log_det))
    if make is Dequantize or dtype is torch.float64:
        torch.testing.assert_close(inverse_log_det, -log_det, rtol=1e-7, atol=1e-6)


def shift(value):
    """A chain's end that is far off, as that of a trained one may be."""
    made = ActNorm(1)
    made.bias.data.fill_(value)
    return Chain(made).eval()


@pytest.mark.parametrize("levels", [3, 255, 256, 1000])
def test_the_ends_of_the_noise_do_not_round_to_another_level(monkeypatch, levels):
    x = torch.arange(float(levels)).view(1, 1, 1, -1)
    layer = Dequantize(levels)
    monkeypatch.setattr("recoup.invertible.preprocess.draw_seed", lambda: 0)
    for end in (0, -1):  # the lowest and the highest draw
        draw = lambda high, size, *, end=end, **_: torch.full(size, end % high)  # noqa: E731
        monkeypatch.setattr(torch, "randint", draw)
        assert torch.equal(layer.inverse(layer(x)[0])[0], x)
    for end in (-1e4, -20.0, 20.0, 1e4):
        layer = VariationalDequantize(levels, shift(end))
        y, log_det = layer(x)
        assert torch.equal(layer.inverse(y)[0], x)
        assert log_det.isfinite().all()


@kinds
def test_noise_follows_one_seed_and_moves_the_stream_by_one(make):
    layer, x = make(17), torch.zeros(2, 1, 4, 4)
    torch.manual_seed(5)
    first = layer(x)[0]
    state = torch.random.get_rng_state()
    assert not torch.equal(layer(x)[0], first)
    torch.manual_seed(5)
    assert torch.equal(layer(x)[0], first)
    torch.manual_seed(5)
    Dequantize(17)(torch.zeros(200, 3, 8, 8))  # whatever the size
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_noise_is_cut_off_and_learned_noise_is_not_moved_to_a_cell():
    noise = Dequantize(17)(torch.full((1, 50_000), 3))[0].double() * 17 - 3
    assert noise.var().item() == pytest.approx(1 / 12, abs=2e-3)
    assert noise.min() < 1e-3
    assert noise.max() > 1 - 1e-3
    # At 256 levels in float32: the mean over the noise is that of the distribution it states.
    made = VariationalDequantize(256, Chain(Flip()))  # u = sigmoid of a standard normal
    noise = (made(torch.full((4, 1, 200, 200), 255))[0].double() * 256 - 255).flatten()
    expected = torch.sigmoid(torch.randn(400_000, dtype=torch.float64))
    assert noise.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert noise.var().item() == pytest.approx(expected.var().item(), rel=0.02)
    assert noise.unique().numel() > 30_000  # a grid of 4096 cells would have fewer


@pytest.mark.parametrize("margin", [None, 0.1])  # that of float64 is too small to be seen
def test_log_det_is_the_entropy_of_the_noise_by_a_jacobian(monkeypatch, margin):
    made, x = learned(5).double(), torch.randint(5, (1, 1, 2, 2)).double()
    if margin is not None:
        monkeypatch.setattr(made, "_margin", lambda dtype: margin)
    drawn = torch.randn(x.shape, dtype=torch.float64)
    given = [drawn]
    monkeypatch.setattr(torch, "randn", lambda *args, **kwargs: given[0])

    def noise(values):
        given[0] = values
        return made(x)[0] * 5 - x

    jacobian = torch.autograd.functional.jacobian(noise, drawn).view(4, 4)
    given[0] = drawn
    log_density = Normal(0.0, 1.0).log_prob(drawn).sum() - torch.linalg.slogdet(jacobian)[1]
    expected = -log_density - 4 * math.log(5)
    torch.testing.assert_close(made(x)[1][0], expected, rtol=0, atol=1e-9)


def test_noise_outside_of_what_it_makes_is_impossible():
    made = learned(4)
    y, _ = made(torch.ones(2, 1, 2, 2))
    y[1, 0, 0, 0] = 0.25  # the very edge of its level
    _, log_det = made.inverse(y)
    assert log_det[0].isfinite()
    assert log_det[1] == -math.inf


def test_the_first_batch_of_each_kind_is_looked_at():
    """In training, in evaluation, and of each type; NaN shows in the loss."""
    layer, x = Dequantize(256), torch.rand(3, 5)
    with pytest.raises(ValueError, match=r"for continuous data leave `levels` out"):
        layer(x)
    layer((x * 255).round())
    layer(x)  # later batches cost nothing
    with pytest.raises(ValueError, match="`x` has values from"):
        layer(x.double())
    with pytest.raises(ValueError, match="`x` has values from"):
        layer.eval()(x)
    assert Dequantize(256)(torch.full((1, 2), math.nan))[0].isnan().all()


def test_the_chain_of_learned_noise_follows_its_flow_and_is_not_asked_in_sampling():
    chain = Chain(ActNorm(1), Squeeze(), AffineCoupling(nn.Conv2d(2, 4, 1)), Flip())
    flow = Flow(chain, shape=(1, 4, 4), dequantize=learned(5)).double().eval()
    flow.memory = "sqrt"
    assert flow.dequantize.chain.memory == flow.chain.memory == "sqrt"
    schedule = schedules.sqrt(len(flow.chain))  # is for one chain
    flow.memory = "linear"
    flow.memory = schedule
    assert flow.chain.memory is schedule
    assert flow.dequantize.chain.memory == "linear"

    flow.dequantize.chain.inverse = None  # would raise
    assert set(flow.sample(3).flatten().tolist()) <= set(range(5))
    # Levels may be said twice, but not differ.
    assert Flow(chain, shape=(1, 4, 4), levels=5, dequantize=learned(5)).levels == 5
    with pytest.raises(ValueError, match="`levels` is 16, but `dequantize` is for 17"):
        Flow(chain, shape=(1, 4, 4), levels=16, dequantize=learned(17))
