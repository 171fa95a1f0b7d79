from __future__ import annotations

import math

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
    Split,
    Squeeze,
    VariationalDequantize,
)


def layer(levels=17, memory="linear", num_couplings=2):
    torch.manual_seed(1)
    couplings = [
        AffineCoupling(
            ConvNetwork(1, 2, width=4, num_context=1),
            condition="first" if place % 2 else "second",
            split="checkerboard",
        )
        for place in range(num_couplings)
    ]
    made = VariationalDequantize(levels, Chain(ActNorm(1), *couplings, memory=memory))
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made.eval()


@pytest.mark.parametrize("margin", [None, 0.1])
def test_log_det_is_the_entropy_of_the_noise_by_a_numerical_jacobian(monkeypatch, margin):
    made = layer(5).double()
    if margin is not None:  # that of float64 is too small to be seen
        monkeypatch.setattr(made, "_margin", lambda dtype: margin)
    x = torch.randint(5, (2, 1, 2, 2)).double()
    torch.manual_seed(7)
    y, log_det = made(x)
    eps = []
    randn = torch.randn
    with pytest.MonkeyPatch.context() as patch:
        # What it draws, taken where it is drawn.
        patch.setattr(torch, "randn", lambda *a, **k: eps.append(randn(*a, **k)) or eps[-1])
        torch.manual_seed(7)
        assert torch.equal(made(x)[0], y)
        drawn = eps[0]

        def noise(values):
            patch.setattr(torch, "randn", lambda *a, **k: values.view(2, 1, 2, 2))
            return (made(x)[0] * 5 - x).flatten(1)

        step = 1e-6
        columns = []
        for index in range(4):
            delta = torch.zeros(4, dtype=torch.float64)
            delta[index] = step
            ahead, behind = noise(drawn.flatten(1) + delta), noise(drawn.flatten(1) - delta)
            columns.append((ahead - behind) / (2 * step))
        jacobian = torch.stack(columns, 2)
    log_density = (
        Normal(0.0, 1.0).log_prob(drawn).flatten(1).sum(1)
        - torch.linalg.slogdet(jacobian).logabsdet
    )
    expected = -log_density - 4 * math.log(5)
    torch.testing.assert_close(log_det, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("levels", [2, 17, 256])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64])
def test_every_level_is_found_again(levels, dtype):
    made = layer(levels).to(dtype if dtype.is_floating_point else torch.float32)
    x = torch.arange(levels).repeat(40).view(5, 1, 4, -1).to(dtype)
    y, log_det = made(x)
    back, inverse_log_det = made.inverse(y)
    assert torch.equal(back, x.to(back.dtype))
    assert y.dtype == (dtype if dtype.is_floating_point else torch.float32)
    if dtype == torch.float64:
        torch.testing.assert_close(inverse_log_det, -log_det, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("levels", [3, 17, 100, 255, 256, 1000])
@pytest.mark.parametrize("extreme", [-1e4, -20.0, 20.0, 1e4])
def test_the_ends_of_the_noise_do_not_round_to_another_level(levels, extreme):
    made = layer(levels)
    made.chain = Chain(Constant(extreme))
    x = torch.arange(float(levels)).view(1, 1, 1, -1)
    y, log_det = made(x)
    assert torch.equal(made.inverse(y)[0], x)
    assert log_det.isfinite().all()


class Constant(Flip):
    """A chain's end that gives one number, as a trained one may come close to."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return torch.full_like(x, self.value), x.new_zeros(len(x))

    def inverse(self, y):
        return torch.zeros_like(y), y.new_zeros(len(y))


def test_no_noise_is_moved_to_a_cell_or_cut_off():
    # At 256 levels in float32: the mean over the noise is that of the distribution it states.
    made = layer(256)
    made.chain = Chain(Flip())  # u = sigmoid of a standard normal
    y, log_det = made(torch.full((4, 1, 200, 200), 255))
    noise = (y.double() * 256 - 255).flatten()
    expected = torch.sigmoid(torch.randn(400_000, dtype=torch.float64))
    assert noise.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert noise.var().item() == pytest.approx(expected.var().item(), rel=0.02)
    assert noise.unique().numel() > 30_000  # a grid of 4096 cells would have fewer
    # Density of sigmoid(normal) at each value, by the change of variables in closed form.
    z = torch.logit(noise)
    density = Normal(0.0, 1.0).log_prob(z) - torch.log(noise * (1 - noise))
    entropy = -density.sum().item() / 4 - 40_000 * math.log(256)
    assert log_det.mean().item() == pytest.approx(entropy, rel=1e-4)


def test_noise_outside_of_what_it_makes_is_impossible():
    made = layer(4)
    y, _ = made(torch.ones(2, 1, 2, 2))
    y[1, 0, 0, 0] = 0.25  # the very edge of its level
    _, log_det = made.inverse(y)
    assert log_det[0].isfinite()
    assert log_det[1] == -math.inf


def test_it_follows_one_seed_and_moves_the_stream_by_one():
    made, x = layer(), torch.zeros(2, 1, 4, 4)
    torch.manual_seed(5)
    first, second = made(x)[0], made(x)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(made(x)[0], first)
    torch.manual_seed(5)
    Dequantize(17)(x)
    state = torch.random.get_rng_state()
    torch.manual_seed(5)
    made(x)
    assert torch.equal(torch.random.get_rng_state(), state)


def flow_with(memory, levels=5):
    torch.manual_seed(2)
    chain = Chain(ActNorm(1), Squeeze(), AffineCoupling(nn.Conv2d(2, 4, 1)), Flip())
    flow = Flow(chain, shape=(1, 4, 4), dequantize=layer(levels)).double().eval()
    flow.memory = memory
    return flow


@pytest.mark.filterwarnings("ignore:Under memory=.constant.:UserWarning")
@pytest.mark.parametrize("memory", ["sqrt", "constant"])
def test_within_a_chain_it_is_recomputed(memory):
    # In float32 at 256 levels, where the noise cannot be had back from the sum.
    x = torch.randint(256, (3, 1, 4, 4)).float()
    gradients = {}
    for mode in ("linear", memory):
        chain = Chain(Flip(), layer(256), ActNorm(1), Flip(), memory=mode).eval()
        torch.manual_seed(0)
        y, log_det = chain(x)
        (y.square().sum() + log_det.sum()).backward()
        gradients[mode] = {name: p.grad for name, p in chain.named_parameters()}
    for name, expected in gradients["linear"].items():
        assert expected is not None, name
        torch.testing.assert_close(gradients[memory][name], expected, rtol=0, atol=0)


def test_the_bound_holds_and_training_closes_it():
    # A density over the line that falls steeply within a level: uniform noise wastes bits on it.
    torch.manual_seed(0)
    levels, scale = 2, 0.03
    x = torch.zeros(4000, 1)
    exact = (Normal(0.0, scale).cdf(torch.tensor(0.5)) - 0.5).log().item()
    chain = Chain(ActNorm(1))
    options = {"shape": (1,), "base": Normal(0.0, scale)}
    uniform = Flow(Chain(Flip()), levels=levels, **options).eval().log_prob(x).mean().item()
    made = VariationalDequantize(levels, chain)
    made.chain[0].started = True
    flow = Flow(Chain(Flip()), dequantize=made, **options)
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        (-flow.log_prob(x).mean()).backward()
        optimizer.step()
    with torch.no_grad():
        learned = torch.stack([flow.log_prob(x).mean() for _ in range(5)]).mean().item()
    assert uniform < exact - 10
    assert exact - 0.4 < learned <= exact


def test_its_memory_and_drift_follow_those_of_the_flow():
    flow = flow_with("sqrt")
    assert flow.dequantize.memory == flow.chain.memory == "sqrt"
    flow.drift = "raise"
    assert flow.dequantize.drift.otherwise == flow.chain.drift.otherwise == "raise"
    assert flow.dequantize.drift is not flow.chain.drift


def test_a_schedule_is_for_one_chain():
    flow = flow_with("linear")
    schedule = schedules.sqrt(len(flow.chain))
    flow.memory = schedule
    assert flow.chain.memory is schedule
    assert flow.dequantize.memory == "linear"


def test_levels_may_be_said_twice_but_not_differ():
    chain = Chain(ActNorm(1))
    assert Flow(chain, shape=(1, 2, 2), levels=17, dequantize=layer(17)).levels == 17
    with pytest.raises(ValueError, match="`levels` is 16, but `dequantize` is for 17"):
        Flow(chain, shape=(1, 2, 2), levels=16, dequantize=layer(17))


def test_sampling_gives_levels_without_asking_the_noise():
    flow = flow_with("linear")
    flow.dequantize.chain = Chain(Flip())
    flow.dequantize.chain.inverse = None  # would raise
    assert set(flow.sample(3).flatten().tolist()) <= set(range(5))


@pytest.mark.parametrize("stage", [Squeeze(), Split(dim=2)])
def test_a_chain_that_changes_the_shape_is_refused(stage):
    with pytest.raises(ValueError, match="made noise of shape"):
        VariationalDequantize(5, Chain(stage))(torch.zeros(2, 1, 4, 4))
