"""Law 1: the same numbers, whatever backward remembers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recoup
from recoup.invertible import ActNorm, Chain, Split
from recoup.schedules import (
    Advance,
    Cost,
    Drop,
    Keep,
    Load,
    Reverse,
    Schedule,
    Tape,
    constant,
    optimal,
    revolve,
)
from tests.oracle import (
    assert_same_step,
    assert_same_tensor,
    assert_same_tensors,
    loss_of_all,
    run_step,
)
from tests.zoo import CHAINS, INVERTIBLE, chain_of, invertible_chain_of, leaf


def tape_first_keep_later(n):
    """Tape a third in the sweep, then keep and advance, then tape the end."""
    first, last = n // 3, max(n - 1, 1)
    actions = [Tape(i) for i in range(first)]
    if first < last and n > 1:
        actions += [Keep(first), Advance(first, last)]
    actions += [Tape(last)] if n > 1 else [Tape(0)]
    if n > 1:
        actions += [Reverse(last), Load(first), Drop(first)]
        actions += [Tape(i) for i in range(first, last)]
        actions += [Reverse(i) for i in reversed(range(last))]
    else:
        actions += [Reverse(0)]
    return Schedule(n, tuple(actions), name="tape first, keep later")


def planned(n):
    """What the planner makes of stages of unlike costs under the tightest budget."""
    costs = [Cost(1.0 + i % 3, 2 + i % 2, 3 + 5 * (i % 3)) for i in range(n)]
    for budget in range(200):
        try:
            return optimal(costs, budget)
        except recoup.errors.ScheduleError:
            continue
    raise AssertionError


def roomy(n):
    """The same, with enough bytes for some tapes in the sweep."""
    costs = [Cost(1.0 + i % 3, 2 + i % 2, 3 + 5 * (i % 3)) for i in range(n)]
    return optimal(costs, 8 * n - n // 2)


def mixed(n):
    return constant(["keep" if i % 3 == 1 else "recompute" for i in range(n)])


MODES = {
    "sqrt": lambda n: "sqrt",
    "log": lambda n: "log",
    "1 slot": lambda n: 1,
    "3 slots": lambda n: 3,
    "100 slots": lambda n: 100,
    "revolve": lambda n: revolve(n, 2),
    "tape first, keep later": tape_first_keep_later,
    "planned": lambda n: planned(min(n, 12)) if n <= 12 else "sqrt",
    "roomy": lambda n: roomy(n) if n <= 12 else "sqrt",
    "constant, mixed": mixed,
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_the_plain_run_bit_by_bit(name, memory):
    modules, x = chain_of(name)
    if name == "input is a view":
        x = x.detach()[:, ::2].requires_grad_()
    mode = MODES[memory](len(modules))
    want = run_step(nn.Sequential(*modules), x)
    got = run_step(recoup.Sequential(*modules), x, memory=mode)
    assert_same_step(got, want)
    linear = run_step(recoup.Sequential(*modules), x, memory="linear")
    assert_same_step(linear, want)


@pytest.mark.parametrize("otherwise", ["recompute", "keep"])
def test_constant_with_a_word_for_the_others(otherwise):
    modules, x = chain_of("dropout")
    couplings, _ = invertible_chain_of("dropout")
    mixture = [couplings[0], modules[0], couplings[1], couplings[2], modules[1], couplings[4]]
    model = recoup.Sequential(*mixture, otherwise=otherwise)
    want = run_step(model, x, memory="linear")
    assert_same_step(run_step(model, x, memory="constant"), want, rtol=1e-10)
    for memory in ("sqrt", 2):
        assert_same_step(run_step(model, x, memory=memory), want)


INVERTING = {
    "constant": lambda n: "constant",
    "constant, mixed": lambda n: constant(
        [("invert", "recompute", "invert", "keep")[i % 4] for i in range(n)]
    ),
    "constant, mixed otherwise": lambda n: constant(
        [("recompute", "invert", "invert", "recompute", "keep")[i % 5] for i in range(n)]
    ),
}
LOSSES = {
    "all": loss_of_all,
    "y alone": lambda output: loss_of_all(output[0]),
    "log_det alone": lambda output: (output[1] * output[1]).sum() + output[1].sum(),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("memory", [*INVERTING, "sqrt", "log", "1 slot", "tape first, keep later"])
@pytest.mark.parametrize("name", INVERTIBLE)
def test_an_invertible_chain_is_its_linear_run(name, memory, loss):
    modules, x = invertible_chain_of(name)
    model = Chain(*modules)
    mode = (INVERTING | MODES)[memory](len(modules))
    rtol = 1e-10 if memory in INVERTING else 0.0
    if loss == "log_det alone" and not model(x)[1].requires_grad:
        pytest.skip("its log_det is a constant")
    want = run_step(model, x, memory="linear", loss=LOSSES[loss])
    assert_same_step(run_step(model, x, memory=mode, loss=LOSSES[loss]), want, rtol)


@pytest.mark.parametrize("memory", [*INVERTING, "sqrt", "1 slot"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_latent_of_three(memory, place):
    modules, x = invertible_chain_of("multi-scale")
    model = Chain(*modules)
    assert sum(isinstance(module, Split) for module in modules) == 2
    mode = (INVERTING | MODES)[memory](len(modules))
    rtol = 1e-10 if memory in INVERTING else 0.0

    def loss(output):
        return loss_of_all(output[0][place])

    want = run_step(model, x, memory="linear", loss=loss)
    assert_same_step(run_step(model, x, memory=mode, loss=loss), want, rtol)


@pytest.mark.parametrize("inner", ["linear", "sqrt", 1, "constant"])
@pytest.mark.parametrize("outer", ["constant", "sqrt", 1])
def test_a_chain_of_chains(inner, outer):
    first, x = invertible_chain_of("dropout")
    second, _ = invertible_chain_of("norms")
    plain = Chain(Chain(*first), Chain(*second))
    want = run_step(plain, x)
    got = run_step(
        Chain(Chain(*first, memory=inner), Chain(*second, memory=inner)), x, memory=outer
    )
    assert_same_step(got, want, rtol=1e-10)


@pytest.mark.parametrize("memory", ["sqrt", 1])
def test_a_chain_in_a_chain_in_a_checkpoint(memory):
    modules, x = chain_of("dropout")

    class Nest(nn.Module):
        def __init__(self):
            super().__init__()
            inner = recoup.Sequential(*modules[1:4], memory=memory)
            self.chain = recoup.Sequential(modules[0], inner, *modules[4:], memory=memory)

        def forward(self, x):
            return recoup.checkpoint(lambda x: recoup.checkpoint(self.chain, x) * 1.0, x)

    want, got = run_step(nn.Sequential(*modules), x), run_step(Nest(), x)
    assert len(got.gradients) == len(want.gradients)
    for a, b in zip(got.gradients.values(), want.gradients.values(), strict=True):
        assert_same_tensor("a gradient", a, b)
    assert torch.equal(got.outputs[0], want.outputs[0])
    assert torch.equal(got.stream, want.stream)


@pytest.mark.parametrize("memory", ["sqrt", "log", 1, 2])
def test_a_parameter_as_the_input(memory):
    modules, x = chain_of("mlp")
    p = nn.Parameter(x.detach().clone())
    want = run_step(nn.Sequential(*modules), p)
    assert_same_step(run_step(recoup.Sequential(*modules), p, memory=memory), want)


def test_a_parameter_as_the_input_of_an_invertible_chain():
    modules, x = invertible_chain_of("dropout")
    p = nn.Parameter(x.detach().clone())
    want = run_step(Chain(*modules), p, memory="linear")
    assert_same_step(run_step(Chain(*modules), p, memory="constant"), want, rtol=1e-10)


@pytest.mark.parametrize("memory", ["sqrt", "log", 1, 2])
def test_an_in_place_activation_as_a_stage(memory):
    # Linear, ReLU(inplace=True), Linear, ... is how many models are written.
    torch.manual_seed(3)
    modules = [m for _ in range(5) for m in (nn.Linear(6, 6), nn.ReLU(inplace=True))]
    model, x = nn.Sequential(*modules).double(), leaf(4, 6)
    want = run_step(model, x)
    assert_same_step(run_step(recoup.Sequential(*modules), x, memory=memory), want)


@pytest.mark.parametrize("memory", ["sqrt", "log", "constant", 1, 3])
def test_the_data_dependent_start_is_the_same(memory):
    modules, x = invertible_chain_of("glow")
    started = Chain(*modules, memory=memory)
    plain = copy.deepcopy(started)
    plain.memory = "linear"
    for model in (started, plain):
        torch.manual_seed(1)
        loss_of_all(model(x)).backward()
    assert all(m.started for m in started.modules() if isinstance(m, ActNorm))
    got = {name: value.detach() for name, value in started.named_parameters()}
    want = {name: value.detach() for name, value in plain.named_parameters()}
    assert_same_tensors(got, want)


def trajectory(model, make_x, memory, num_steps=50):
    model = copy.deepcopy(model)
    model.memory = memory
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    torch.manual_seed(1)
    losses = []
    for _ in range(num_steps):
        loss = loss_of_all(model(make_x()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    steps = [state["step"] for state in optimizer.state.values()]
    assert steps == [num_steps] * len(list(model.parameters()))
    return torch.stack(losses), {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", ["constant", "sqrt", "log", 2])
def test_fifty_steps_of_an_invertible_chain(memory):
    modules, x = invertible_chain_of("multi-scale")
    model = Chain(*modules)

    def make_x():
        return torch.randn(x.shape, dtype=x.dtype)

    losses, parameters = trajectory(model, make_x, "linear")
    assert losses.isfinite().all()
    assert losses[-1] != losses[0]
    other_losses, other_parameters = trajectory(model, make_x, memory)
    rtol = 1e-8 if memory == "constant" else 0.0
    assert_same_tensor("losses", other_losses, losses, rtol)
    assert_same_tensors(other_parameters, parameters, 100 * rtol)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", ["sqrt", "log", 1])
def test_fifty_steps_of_a_chain(memory):
    modules, x = chain_of("convolutions and norms")
    model = recoup.Sequential(*modules)

    def make_x():
        return torch.randn(x.shape, dtype=x.dtype)

    losses, parameters = trajectory(model, make_x, "linear")
    other_losses, other_parameters = trajectory(model, make_x, memory)
    assert_same_tensor("losses", other_losses, losses)
    assert_same_tensors(other_parameters, parameters)


@pytest.mark.parametrize("memory", ["sqrt", "log", 1, 2, 3, 5])
def test_an_in_place_activation_behind_a_view_of_what_is_kept(memory):
    torch.manual_seed(0)
    modules = []
    for _ in range(3):
        modules += [nn.Conv1d(2, 2, 3, padding=1), nn.Flatten(), nn.ReLU(inplace=True)]
        modules += [nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.ReLU(inplace=True)]
    x = torch.randn(3, 2, 4, requires_grad=True)
    plain, model = nn.Sequential(*modules), recoup.Sequential(*modules, memory=memory)
    want = torch.autograd.grad(plain(x).sin().sum(), [x, *plain.parameters()])
    got = torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
