"""Plans that invert blocks, mixed with keep and recompute, against the plain run."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError, DriftError
from recoup.invertible import AdditiveCoupling, AffineCoupling, Chain, Flip, InvertibleModule
from recoup.schedules import Invert, simulate
from tests.neighbours.planned import result_of
from tests.oracle import assert_same_tensors, tensors
from tests.plan_oracle import Made, assert_as_plain, peak_of, ways_of

NUM_ROWS, DIM, RTOL = 512, 8, 1e-10


class Network(nn.Sequential):
    def __init__(self, num_in, num_out):
        norm, drop = nn.BatchNorm1d(12), nn.Dropout(0.2)
        super().__init__(nn.Linear(num_in, 12), norm, nn.Tanh(), drop, nn.Linear(12, num_out))
        self.runs = []  # a number would be that of first runs

    def forward(self, x):
        self.runs.append(1)
        return super().forward(torch.cat((x,), dim=1))  # a copy, as with a context


class Off(InvertibleModule):
    """A module whose inverse is off by a hundredth, or raises."""

    error, num_channels = 0.01, DIM

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 2.0))

    def forward(self, x):
        return self.scale * x, x.new_zeros(len(x))

    def inverse(self, y):
        if isinstance(self.error, Exception):
            raise self.error
        x = (1 + self.error) * y / self.scale
        return x[:, : self.num_channels], y.new_zeros(len(y))


Broken = type("Broken", (Off,), {"error": ArithmeticError("no inverse here")})
Stiffening = type("Stiffening", (Off,), {"error": 0.0})  # at first
OneWay = type("OneWay", (Off,), {"error": NotImplementedError("no closed form")})
OfAnotherShape = type("OfAnotherShape", (Off,), {"error": 0.0, "num_channels": 2})


def batch():
    return torch.randn(NUM_ROWS, DIM, dtype=torch.float64)


def step_of(model, x):
    return lambda: sum(t.sum() for t in tensors(model(x))).backward()


def modules_of(num_couplings=6, between=()):
    torch.manual_seed(0)
    half, found = DIM // 2, []
    for at in range(num_couplings):
        if at % 2:
            found.append(AdditiveCoupling(Network(half, half), Network(half, half)))
        else:
            found += [AffineCoupling(Network(half, DIM)), Flip()]
    return [*found[:4], *between, *found[4:]]


def chain_of(memory="linear", between=()):
    between = [kind() for kind in between]
    return Chain(*modules_of(between=between), memory=memory).double()


def plan_of(model):
    (plan,) = recoup.applied_plans(model)
    return plan


def inverted_by(plan):
    return {action.index for action in plan.actions if isinstance(action, Invert)}


def assert_inverts(between, share=2 / 7):
    """Check a step that inverts; return it with what the plain one leaves, and the budget."""
    linear, x = chain_of("linear", between), batch()
    plain = step_of(linear, x)
    wanted, budget = result_of(linear, plain), int(peak_of(linear, plain) * share)
    chain = chain_of(f"{budget} B", between)
    step = step_of(chain, x)
    assert_same_tensors(result_of(chain, step), wanted, RTOL)
    assert peak_of(chain, step) <= budget
    assert inverted_by(plan_of(chain))
    return chain, step, wanted, budget


def test_a_chain_inverts_within_its_bytes():
    x = batch()
    linear, chain = chain_of(), chain_of("1 KiB")
    wanted, most = result_of(linear, step_of(linear, x)), peak_of(linear, step_of(linear, x))
    step = step_of(chain, x)
    with pytest.raises(BudgetError) as raised:
        step()
    least = raised.value.least_bytes
    plans, runs = [], []
    for budget in (least, 2 * most // 7, most // 2, most):
        chain = chain_of(f"{budget} B")
        step = step_of(chain, x)
        assert_same_tensors(result_of(chain, step), wanted, RTOL)
        assert peak_of(chain, step) <= budget
        plan = plan_of(chain)
        assert plan.rehearsed_peak_bytes <= 1.05 * plan.predicted_peak_bytes
        simulation = simulate(plan.schedule, costs=plan.costs)
        runs.append(sum(simulation.forwards_per_stage[:-1]) + simulation.num_inverses)
        plans.append(plan)
        networks = [[m for m in each.modules() if isinstance(m, Network)] for each in chain]
        for network in (each for of_module in networks for each in of_module):
            network.runs.clear()
        step()
        for index, of_module in enumerate(networks):
            num_runs = simulation.forwards_per_stage[index] + (index in inverted_by(plan))
            assert all(len(network.runs) == num_runs for network in of_module), index
    assert all(before >= after for before, after in pairwise(runs))
    assert {"keep", "recompute", "invert"} <= {way for plan in plans for way in ways_of(plan)}
    constant = chain_of("constant")
    assert least <= 1.05 * peak_of(constant, step_of(constant, x))


def own_loop():
    """A model with a loop of its own over couplings, a block without an inverse among them."""

    def forward(model, x):
        total = 0.0
        for at, block in enumerate(model.blocks):
            x, log_det = block(x)
            total = total + log_det
            x = model.plain(x) if at == 5 else x
        return x, total

    plain = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
    return Made(forward, blocks=modules_of(8), plain=plain).double()


def test_a_plan_inverts_where_it_need_not_be_exact():
    model, x = own_loop(), batch()
    step = step_of(model, x)
    exact, rounding = recoup.plan(model, x), recoup.plan(model, x, exact=False)
    assert rounding.least_bytes < exact.least_bytes
    plan = rounding.plan((rounding.least_bytes + exact.least_bytes) // 2)
    assert "invert" in ways_of(plan)
    assert all(block.seconds > 0 for block in plan.blocks if block.way == "invert")
    assert "inverted blocks round: gradients are equal to 0.001" in str(plan)
    assert_as_plain(plan, step, rtol=RTOL)
    assert 0 < plan.drift.largest_error < 1e-10
    plan = exact.plan("1 GiB")
    assert plan.drift is None
    assert not inverted_by(plan)


def test_an_error_in_the_first_step_leaves_the_chain_as_it_was(monkeypatch):
    chain = chain_of("4 MiB", [Broken])
    step, before = step_of(chain, batch()), copy.deepcopy(chain.state_dict())
    with pytest.raises(ArithmeticError, match="no inverse here") as raised:
        step()
    assert "inverts_in_backward = False" in "".join(raised.value.__notes__)
    assert recoup.applied_plans(chain) == []
    assert all(p.grad is None for p in chain.parameters())
    assert_same_tensors(dict(chain.state_dict()), before)
    monkeypatch.setattr(Broken, "inverts_in_backward", False)
    step()


@pytest.mark.drifts
def test_a_module_whose_inverse_drifts_is_not_inverted_or_an_error():
    chain, _, _, _ = assert_inverts([Off])
    assert 4 not in inverted_by(plan_of(chain))
    chain = Chain(*chain, memory="8 MiB", drift="raise")
    with pytest.raises(DriftError):
        chain(batch())


@pytest.mark.drifts
@pytest.mark.filterwarnings("ignore:Inverses drift|Most states|.*drift since the plan was made")
def test_drift_that_begins_later_is_computed_again_and_planned_anew(monkeypatch):
    chain, step, wanted, budget = assert_inverts([Stiffening] * 4, share=0.27)
    first = plan_of(chain)
    assert any(isinstance(chain[index], Stiffening) for index in inverted_by(first))
    monkeypatch.setattr(Stiffening, "error", 0.01)
    result_of(chain, step)  # found late in the first step (Rule 3 of NOTE [ Drift ])
    for _ in range(3):
        assert_same_tensors(result_of(chain, step), wanted, RTOL)
    assert chain.drift.kept
    assert plan_of(chain) is not first
    assert peak_of(chain, step) <= budget


@pytest.mark.parametrize(("kind", "words"), [(OneWay, "no closed form"), (OfAnotherShape, "")])
def test_blocks_that_cannot_be_inverted_are_not(kind, words):
    chain, x = Chain(*(kind() for _ in range(6))).double(), batch()
    loss = lambda output: output[0].sin().sum()  # noqa: E731
    given = {"loss": loss, "blocks": list(chain)}
    with pytest.warns(UserWarning, match=f"No block is inverted.*{words}"):
        frontier = recoup.plan(chain, x, **given, exact=False)
    assert frontier.least_bytes == recoup.plan(chain, x, **given).least_bytes
    assert_as_plain(frontier.plan(frontier.least_bytes), lambda: loss(chain(x)).backward())
