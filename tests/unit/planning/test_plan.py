"""What a plan does, says and draws, for bytes or by a policy."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from functools import partial
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup.errors import BudgetError
from recoup.planning import options, priced_blocks, report
from recoup.planning.measuring import Times
from recoup.schedules import Offload, simulate
from tests import plan_oracle
from tests.alive import held_after, no_collector
from tests.neighbours.planned import Block, Net, assert_same, loss_of, result_of
from tests.oracle import Operators
from tests.plan_oracle import Made, assert_as_plain, between, peak_of, square, step_of, ways_of


def batch():
    return torch.ones(64, 32)


def planned(share=0.5):
    """A model, its input, and a plan for a share of what can be saved."""
    model, x = plan_oracle.stack(), batch()
    frontier = recoup.plan(model, x, loss=square)
    return model, x, frontier.plan(between(frontier, share))


def give_times(monkeypatch, **times):
    found = Times(shares=[0.0], **times)  # products do not pay
    monkeypatch.setattr(priced_blocks, "times_of", lambda *args, **kwargs: found)


# -- what it does ----------------------------------------------------------------------------------


def test_a_total_counts_what_is_alive_before():
    model, x = plan_oracle.stack(3), batch()
    parameters = list(model.parameters())
    optimizer, step = torch.optim.Adam(parameters, fused=True), step_of(model, x)
    weights = sum(p.nbytes for p in parameters)
    standing = 3 * weights + 4 * len(parameters)  # the numbers of steps
    of_step = recoup.plan(model, x, loss=square).least_bytes
    of_total = partial(recoup.plan, model, x, loss=square, budget_of="total")
    for _ in range(2):  # before there are states, and then
        total = of_total(optimizer=optimizer)
        plan = total.plan(total.least_bytes)
        assert plan.baseline_bytes == standing
        assert total.least_bytes == of_step + standing >= plan.rehearsed_peak_bytes
        assert "(total)" in str(total)
        with pytest.raises(BudgetError, match="of which are alive before a step"):
            total.plan(total.least_bytes - 1)
        step()
        optimizer.step()
        optimizer.zero_grad()
    # Gradients of backwards that are accumulated: those that come later are said, once.
    without = of_total()
    step()
    total = of_total()
    assert total.baseline_bytes == without.baseline_bytes + weights
    with total.plan(total.least_bytes).applied():
        step()
        assert total.baseline_bytes + peak_of(model, step) <= total.least_bytes
    with without.plan(without.least_bytes).applied():
        step()
        with pytest.warns(UserWarning, match="has gradients of .* before its step"):
            step()
        step()


def test_apply_and_remove_leave_the_model_as_it_was():
    model, x, made = planned()
    before = [dict(vars(module)) for module in model.modules()]
    step = step_of(model, x)
    plain = peak_of(model, step)
    assert made.apply() is made
    assert made.is_applied
    assert assert_as_plain(made, step) < plain
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert peak_of(other, step_of(other, x)) == plain
        assert list(other.state_dict()) == list(model.state_dict())
    with no_collector():  # nothing outlives a forward without backward
        for _ in range(2):
            assert held_after(lambda: (model(x), None)[1]).num_bytes == 0
    made.remove()
    made.remove()
    assert peak_of(model, step) == plain
    assert [dict(vars(module)) for module in model.modules()] == before


def test_blocks_that_keep_products_share_one_kept_input():
    model = plan_oracle.stack(8, lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout()))
    frontier = recoup.plan(model, x := torch.randn(512, 64), loss=square)
    plan = frontier.plan(between(frontier, 0.5))
    kept = [getattr(action, "results", 0) for action in plan.schedule.actions]  # of `Advance` alone
    assert any(one and two for one, two in pairwise(kept))
    assert_as_plain(plan, step_of(model, x))


def test_inputs_wait_in_a_folder_where_that_is_faster_than_to_recompute(tmp_path, monkeypatch):
    def plan_for(seconds_per_byte):
        monkeypatch.setattr(options, "_seconds_per_byte", lambda to, device: seconds_per_byte)
        return recoup.plan(model, x, budget=budget, offload_to=tmp_path)

    model, x = plan_oracle.stack(12, partial(plan_oracle.Residual, 64)), torch.randn(512, 64)
    without = recoup.plan(model, x)
    budget = without.points[0].peak_bytes + 9 * 512 * 64  # two states are in flight
    plan = plan_for(1e-12)
    offloaded, recomputed = (
        sum(block.num_forwards for block in each.blocks) for each in (plan, without.plan(budget))
    )
    assert offloaded < recomputed
    assert {a.to for a in plan.schedule.actions if isinstance(a, Offload)} == {str(tmp_path)}
    assert "recompute, offload" in str(plan)
    assert_as_plain(plan, step_of(model, x, loss=torch.sum))
    assert not list(tmp_path.iterdir())
    assert not any(isinstance(action, Offload) for action in plan_for(0.1).schedule.actions)


# -- what it says ----------------------------------------------------------------------------------


def test_the_report_the_repr_and_the_html_name_blocks_ways_and_bytes():
    _, _, made = planned()
    text = str(made)
    assert f"least feasible {recoup.memory.format_bytes(made.least_bytes)}" in text
    for row in made.blocks:
        assert row.way in text
        assert row.keeps_bytes + row.saves_bytes == made.costs[int(row.name)].tape_bytes
        assert (row.seconds > 0) == (row.num_forwards > 1)
    ways = [row.way for row in made.blocks]
    size = f"6 blocks in {recoup.memory.format_bytes(made.budget_bytes)} (step)"
    assert repr(made).startswith(f"Plan(Sequential, {size}: ")
    assert all(f" {ways.count(way)} {way};" in repr(made) for way in set(ways))


@pytest.mark.parametrize("share", [0.0, 9.0])
def test_all_times_of_a_plan_are_seconds(monkeypatch, share):
    again = [0.5, 0.25, 0.25, 0.5, 0.25, 0.25]
    give_times(monkeypatch, plain=6.0, again=again)
    _, _, made = planned(share)
    assert [cost.seconds for cost in made.costs] == pytest.approx([*again, 0.0])
    pays = sum(row.seconds for row in made.blocks)
    assert (pays > 0) == (share == 0.0)
    assert made.predicted_time_ratio == pytest.approx((6.0 + pays) / 6.0)
    assert simulate(made.schedule, costs=made.costs).peak_bytes == made.predicted_peak_bytes
    for point in made.frontier:
        simulation = simulate(point.schedule, costs=made.costs)
        assert point.seconds == pytest.approx(simulation.seconds)


@pytest.mark.clocked
def test_plans_by_the_clock_fall_in_time_as_budgets_grow_and_keep_all_at_the_plain_peak():
    model, x = plan_oracle.stack(4), batch()
    frontier = recoup.plan(model, x)
    times = [point.relative_time for point in frontier.points]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] == pytest.approx(1.0)
    made = frontier.plan(peak_of(model, step_of(model, x, loss=lambda y: y.abs().sum())))
    assert ways_of(made) == {"keep"}
    assert made.predicted_time_ratio == pytest.approx(1.0)
    assert made.step_seconds > 0


def test_both_panels_of_the_figure_say_the_same_time(monkeypatch, tmp_path):
    give_times(monkeypatch, plain=3.5, again=[0.5] * 6)  # runs again pay more than first
    _, _, made = planned()
    assert made.predicted_time_ratio > 1
    panels = [MagicMock(), MagicMock()]
    monkeypatch.setattr(report, "rendered", lambda draw, *_, **__: draw(panels) or b"")
    monkeypatch.setattr(report, "finish", lambda *_: None)
    made.figure(tmp_path / "plan.png")
    before, after = (call.args[0] for call in panels[0].plot.call_args_list)
    (place,) = (call.args[1] for call in panels[1].plot.call_args_list)
    assert before[-1] == pytest.approx(1.0)
    assert (before, after) == (sorted(before), sorted(after))
    assert after[-1] == pytest.approx(float(place)) == pytest.approx(made.predicted_time_ratio)


# -- policies: what people choose by hand for all blocks -------------------------------------------


def attends(width):
    def forward(block, x):
        q, k, v = block.given(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.gelu(block.made(y.transpose(1, 2).flatten(2)))

    return Made(forward, given=nn.Linear(width, 3 * width), made=nn.Linear(width, width))


def of_net(block=Block):
    torch.manual_seed(0)
    model, x = Net(32, 6, block), torch.randn(8, 64, 32)
    model.stem = nn.Linear(32, 32)
    return model, x, lambda: loss_of(model(x)).backward()


def counted(model, step):
    peak, runs = peak_of(model, step), Counter()
    for index, block in enumerate(model.blocks):
        block.norm.register_forward_pre_hook(lambda *_, i=index: runs.update([i]))
    return result_of(model, step), peak, runs


@pytest.mark.parametrize(("policy", "every"), [("full", 1), ("every 2nd block", 2), ("keep", 7)])
def test_a_policy_is_what_people_do_by_hand(policy, every):
    hand, _, step = of_net()
    for block in list(hand.blocks)[: 6 * (every < 7) : every]:
        block.forward = partial(recoup.checkpoint, block.forward)
    wanted, most, runs = counted(hand, step)
    model, x, step = of_net()
    plan = recoup.plan(model, x, policy=policy, loss=loss_of)
    with plan.applied():
        found, peak, own_runs = counted(model, step)
    assert_same(found, wanted)
    assert own_runs == runs
    assert abs(peak - most) <= 0.005 * most  # of one region, or of several, are random states
    assert peak <= plan.rehearsed_peak_bytes
    with plan.applied():
        loss_of(model(x) + model(x)).backward()  # it has no budget, and so no bound
    assert f'Net: 6 blocks, policy "{policy}" (step)' in str(plan)
    assert "least feasible" not in str(plan)


def test_attention_is_kept_and_the_rest_runs_again():
    model, x, step = of_net(attends)
    wanted = result_of(model, step)
    plan = recoup.plan(model, x, policy="save attention", loss=loss_of)
    assert ways_of(plan) == {"keep products"}
    kept = x.nbytes + 4 * x.shape[0] * 4 * x.shape[1]  # its result, and a number a row and head
    assert {row.keeps_bytes for row in plan.blocks} == {x.nbytes + kept}
    with plan.applied(), Operators() as ran:
        found = result_of(model, step)
    assert_same(found, wanted)
    assert ran.of("_scaled_dot_product_flash_attention_for_cpu") == 6
    assert ran.of("addmm") >= 2 * 6 + 2
