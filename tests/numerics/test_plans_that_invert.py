"""Plans that invert blocks, mixed with keep and recompute, against the plain run."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from recoup.invertible import (
    AdditiveCoupling,
    AffineCoupling,
    Chain,
    DriftGuard,
    Flip,
    InvertibleModule,
)
from recoup.schedules import (
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Reverse,
    Schedule,
    Tape,
    simulate,
)

NUM_ROWS, DIM = 512, 8


class Network(nn.Module):
    """A network of couplings, which counts its runs and draws; some take a context."""

    def __init__(self, num_in, num_out, num_context=0):
        super().__init__()
        self.takes_context = num_context > 0
        self.up = nn.Linear(num_in + num_context, 12)
        self.norm = nn.BatchNorm1d(12)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(12, num_out)
        self.count = []

    def forward(self, x, *context):
        self.count.append(1)
        x = torch.cat((x, *context), dim=1)
        return self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))


def modules_of(num_couplings=6, num_context=0):
    torch.manual_seed(0)
    half = DIM // 2
    found = []
    for at in range(num_couplings):
        if at % 2:
            first = Network(half, half), Network(half, half)
            found.append(AdditiveCoupling(*first))
        else:
            found += [AffineCoupling(Network(half, DIM, num_context)), Flip()]
    return found


def chain_of(memory="linear", **kinds):
    return Chain(*modules_of(**kinds), memory=memory).double()


def batch(num_rows=NUM_ROWS):
    return torch.randn(num_rows, DIM, dtype=torch.float64)


def everything(model, *args):
    """Gradients, buffers and the random stream after a step from seed 1; buffers are restored."""
    torch.manual_seed(1)
    model.zero_grad()
    before = [buffer.clone() for buffer in model.buffers()]
    output = model(*args)
    parts = [t.sum() for t in nested(output)]
    sum(parts).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    found = [g.clone() for g in (*gradients, *model.buffers())], torch.rand(3)
    for buffer, old in zip(model.buffers(), before, strict=True):
        buffer.copy_(old)
    return found


def nested(value):
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in nested(v)]


def assert_close(found, expected, rtol):
    assert torch.equal(found[1], expected[1])
    largest = max(float(e.double().norm()) for e in expected[0])
    for got, want in zip(found[0], expected[0], strict=True):
        scale = max(float(want.double().norm()), largest / 16)
        assert float((got - want).double().norm()) <= rtol * scale


def peak_of(model, *args):
    """The peak of a step of the model alone, after a first one; buffers are restored."""
    model.zero_grad()
    before = [buffer.clone() for buffer in model.buffers()]

    def step():
        sum(t.sum() for t in nested(model(*args))).backward()

    found = recoup.measure(step, repeats=0).peak_bytes
    model.zero_grad()
    for buffer, old in zip(model.buffers(), before, strict=True):
        buffer.copy_(old)
    return found


def least_of(model, *args):
    with pytest.raises(BudgetError) as raised:
        model(*args)
    assert str(raised.value.least_bytes) in str(raised.value)
    return raised.value.least_bytes


def budgets_between(least, most, num):
    return [least + (most - least) * at // (num - 1) for at in range(num)]


def plan_of(model):
    (plan,) = recoup.applied_plans(model)
    return plan


def runs_of(plan):
    simulation = simulate(plan.schedule, costs=plan.costs)
    return sum(simulation.forwards_per_stage[:-1]) + simulation.num_inverses


def check_budgets(build, x, num, rtol=1e-10):
    """Check gradients, peaks and counts at `num` budgets between the least and "linear"."""
    linear = build("linear")
    expected, most = everything(linear, x), peak_of(linear, x)
    least = least_of(build("1 KiB"), x)
    found = []
    for budget in budgets_between(least, most, num):
        model = build(f"{budget} B")
        assert_close(everything(model, x), expected, rtol)
        assert peak_of(model, x) <= budget
        found.append(plan_of(model))
        assert plan_of(model).rehearsed_peak_bytes <= 1.05 * plan_of(model).predicted_peak_bytes
    for before, after in pairwise(map(runs_of, found)):
        assert before >= after
    assert any(isinstance(action, Invert) for plan in found for action in plan.actions)
    return found, least


def test_a_chain_inverts_within_its_bytes():
    plans, least = check_budgets(chain_of, batch(), 9)
    ways = {block.way for plan in plans for block in plan.blocks}
    assert {"keep", "recompute", "invert"} <= ways
    constant = chain_of("constant")
    everything(constant, batch())
    assert least <= 1.05 * peak_of(constant, batch())


def inverting_budget(build, x, *context):
    """A budget at which the plan of a chain inverts."""
    linear = build("linear")
    everything(linear, x, *context)
    return 2 * peak_of(linear, x, *context) // 7


def test_networks_run_as_often_as_simulated():
    x = batch()
    chain = chain_of(f"{inverting_budget(chain_of, x)} B")
    chain(x)
    plan = plan_of(chain)
    inverted = {a.index for a in plan.actions if isinstance(a, Invert)}
    advanced = [a for a in plan.actions if isinstance(a, Advance)]
    assert inverted
    assert advanced
    for module in chain.modules():
        if isinstance(module, Network):
            module.count.clear()
    everything(chain, x)
    expected = simulate(plan.schedule, costs=plan.costs).forwards_per_stage
    taped = {a.index: a.variant for a in plan.actions if isinstance(a, Tape)}
    for index, module in enumerate(chain):
        for network in module.modules():
            if isinstance(network, Network):
                runs = expected[index] + (index in inverted)
                assert len(network.count) == runs, (index, taped.get(index))


class Own(nn.Module):
    """A model with a loop of its own over couplings, a block without an inverse among them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(modules_of(8))
        self.plain = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())

    def forward(self, x):
        total = 0.0
        for at, block in enumerate(self.blocks):
            x, log_det = block(x)
            total = total + log_det
            if at == 5:
                x = self.plain(x)
        return x, total


def test_a_plan_inverts_where_it_need_not_be_exact():
    model, x = Own().double(), batch()
    expected = everything(model, x)
    exact = recoup.plan(model, x)
    rounding = recoup.plan(model, x, exact=False)
    assert rounding.least_bytes < exact.least_bytes
    budget = (rounding.least_bytes + exact.least_bytes) // 2
    plan = rounding.plan(budget)
    assert "invert" in {block.way for block in plan.blocks}
    assert all(block.seconds > 0 for block in plan.blocks if block.way == "invert")
    assert "exact=False" not in str(plan)
    assert "inverted blocks round: gradients are equal to 0.001" in str(plan)
    with pytest.raises(ValueError, match="`exact` is 'no'"):
        recoup.plan(model, x, exact="no")
    with plan.applied():
        assert_close(everything(model, x), expected, 1e-10)
        assert peak_of(model, x) <= budget
        assert plan.drift.errors
        assert plan.drift.largest_error < 1e-10
    plan = exact.plan(2 * budget)
    assert plan.drift is None
    assert not any(isinstance(action, Invert) for action in plan.actions)
    assert "exact=False" in str(plan)
    with pytest.raises(BudgetError, match="exact=False may take less"):
        recoup.plan(model, x, budget="1 KiB")
    with pytest.raises(BudgetError) as raised:
        recoup.plan(model, x, budget="1 KiB", exact=False)
    assert "exact" not in str(raised.value)


class Broken(InvertibleModule):
    """A module whose inverse raises."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 2.0))

    def forward(self, x):
        return torch.tanh(self.scale * x), x.new_zeros(len(x))

    def inverse(self, y):
        raise ArithmeticError("no inverse here")


def test_an_error_in_the_first_step_leaves_the_chain_as_it_was():
    chain = Chain(*modules_of(2), Broken(), *modules_of(2), memory="4 MiB").double()
    before = copy.deepcopy(chain.state_dict())
    torch.manual_seed(5)
    with pytest.raises(ArithmeticError, match="no inverse here") as raised:
        chain(batch())
    assert "inverts_in_backward = False" in "".join(raised.value.__notes__)
    assert recoup.applied_plans(chain) == []
    assert all(p.grad is None for p in chain.parameters())
    for name, value in chain.state_dict().items():
        assert torch.equal(value, before[name])
    Broken.inverts_in_backward = False
    try:
        everything(chain, batch())
    finally:
        del Broken.inverts_in_backward


class Off(Broken):
    """A module whose inverse is off by a hundredth."""

    def forward(self, x):
        return self.scale * x, x.new_zeros(len(x))

    def inverse(self, y):
        return 1.01 * y / self.scale, y.new_zeros(len(y))


@pytest.mark.drifts
def test_a_module_whose_inverse_drifts_is_not_inverted():
    def build(memory="linear"):
        modules = modules_of(6)
        return Chain(*modules[:4], Off(), *modules[4:], memory=memory).double()

    x = batch()
    expected = everything(build(), x)
    budget = inverting_budget(build, x)
    chain = build(f"{budget} B")
    assert_close(everything(chain, x), expected, 1e-10)
    inverted = {a.index for a in plan_of(chain).actions if isinstance(a, Invert)}
    assert inverted
    assert 4 not in inverted
    assert peak_of(chain, x) <= budget


class Stiffening(Off):
    """A module whose inverse begins to be off."""

    error = 0.0

    def inverse(self, y):
        return (1 + self.error) * y / self.scale, y.new_zeros(len(y))


@pytest.mark.drifts
def test_a_guard_that_raises():
    modules = modules_of(6)
    chain = Chain(*modules[:4], Off(), *modules[4:], memory="8 MiB", drift="raise").double()
    with pytest.raises(recoup.errors.DriftError):
        chain(batch())
    assert isinstance(chain.drift, DriftGuard)


@pytest.mark.drifts
def test_a_plan_says_that_inverses_drift():
    """The gradients are right, and the warning comes once."""
    modules = modules_of(6)
    model = nn.ModuleList([*modules[:4], *(Stiffening() for _ in range(4)), *modules[4:]])
    chain, x = Chain(*model).double(), batch()
    expected = everything(chain, x)
    frontier = recoup.plan(chain, x, exact=False)
    plan = frontier.plan(2 * peak_of(chain, x) // 7)
    assert any(isinstance(chain[a.index], Stiffening) for a in plan.actions if type(a) is Invert)
    with plan.applied():
        everything(chain, x)
        assert not plan.drift.kept
        try:
            Stiffening.error = 0.01
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                everything(chain, x)  # found late in the first step (Rule 3 of NOTE [ Sketches ])
            assert plan.drift.kept
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for _ in range(3):
                    assert_close(everything(chain, x), expected, 1e-10)
            of_plan = [
                each for each in said if "drift since the plan was made" in str(each.message)
            ]
            assert len(of_plan) == 1
        finally:
            Stiffening.error = 0.0


BELOW_TAPES = (
    *(Keep(0), Tape(0), Tape(1), Advance(2, 4), Keep(4)),
    *(Load(4), Drop(4), Invert(3), Reverse(3), Invert(2), Reverse(2), Reverse(1), Reverse(0)),
)


@pytest.mark.drifts
def test_a_state_is_computed_again_over_stages_that_were_taped():
    modules = [*modules_of(2)[:2], Off(), Off()]
    chain, x = Chain(*modules).double(), batch()
    expected = everything(chain, x)
    chain.memory = Schedule(4, BELOW_TAPES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(everything(chain, x), expected, 1e-10)
    assert chain.drift.refused


@pytest.mark.drifts
def test_drift_that_begins_later_is_computed_again_and_planned_anew():
    def build(memory="linear"):
        modules = modules_of(6)
        late = [Stiffening() for _ in range(4)]
        return Chain(*modules[:4], *late, *modules[4:], memory=memory).double()

    x = batch()
    expected = everything(build(), x)
    budget = inverting_budget(build, x)
    chain = build(f"{budget} B")
    assert_close(everything(chain, x), expected, 1e-10)
    first = plan_of(chain)
    inverted = {a.index for a in first.actions if isinstance(a, Invert)}
    late = [at for at in sorted(inverted) if isinstance(chain[at], Stiffening)]
    assert late
    try:
        Stiffening.error = 0.01
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            everything(chain, x)  # found late in the first step (Rule 3 of NOTE [ Sketches ])
            for _ in range(4):
                assert_close(everything(chain, x), expected, 1e-10)
        assert chain.drift.kept
        assert plan_of(chain) is not first
        assert peak_of(chain, x) <= budget
    finally:
        Stiffening.error = 0.0


class OfAnotherShape(AdditiveCoupling):
    """A coupling whose inverse is wrong."""

    def __init__(self):
        super().__init__(nn.Linear(DIM // 2, DIM // 2), nn.Linear(DIM // 2, DIM // 2))

    def inverse(self, y):
        return super().inverse(y)[0][:, :2], super().inverse(y)[1]


def test_blocks_that_cannot_be_inverted_are_not():
    torch.manual_seed(0)
    chain = Chain(*(OfAnotherShape() for _ in range(6))).double()
    x = torch.randn(NUM_ROWS, DIM, dtype=torch.double)

    def loss(output):
        return output[0].square().sum()

    def run():
        chain.zero_grad()
        loss(chain(x)).backward()
        return [p.grad.clone() for p in chain.parameters()]

    want = run()
    with pytest.warns(UserWarning, match="No block is inverted"):
        frontier = recoup.plan(chain, x, loss=loss, exact=False, blocks=list(chain))
    with frontier.plan(frontier.least_bytes).applied():
        assert all(map(torch.equal, run(), want))


def test_a_context_gets_its_gradient():
    x, context = batch(), torch.randn(NUM_ROWS, 3, dtype=torch.float64, requires_grad=True)
    build = lambda memory: chain_of(memory, num_context=3)  # noqa: E731
    expected = everything(build("linear"), x, context)
    wanted, context.grad = context.grad, None
    chain = build(f"{inverting_budget(build, x, context)} B")
    context.grad = None
    assert_close(everything(chain, x, context), expected, 1e-10)
    assert torch.allclose(context.grad, wanted, rtol=1e-10, atol=1e-12)
    assert any(isinstance(action, Invert) for action in plan_of(chain).actions)
