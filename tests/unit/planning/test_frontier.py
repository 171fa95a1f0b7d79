"""The frontier of a model: plans for several budgets from one measurement."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch

import recoup
from recoup.errors import BudgetError
from recoup.planning import compiling
from recoup.planning import frontier as frontier_module
from recoup.planning.verification import DifferentStepError
from tests.neighbours.planned import (
    Net,
    assert_same,
    give_steady_times,
    give_steps_times,
    loss_of,
    result_of,
)


def model_and_input(num_blocks=5):
    torch.manual_seed(0)
    model = Net(32, num_blocks)
    model.stem.eval()  # so that all steps are the same
    return model, torch.randn(64, 32)


def budgets_of(frontier, num):
    least, most = frontier.least_bytes, frontier.points[-1].peak_bytes
    return [least + (most - least) * place // (num - 1) for place in range(num)]


@pytest.mark.exhaustive
def test_plans_are_those_that_are_made_for_each_budget():
    model, x = model_and_input()
    frontier = recoup.plan(model, x, loss=loss_of)
    for budget in budgets_of(frontier, 4):
        made, wanted = frontier.plan(budget), recoup.plan(model, x, budget=budget, loss=loss_of)
        assert made.actions == wanted.actions
        assert made.rehearsed_peak_bytes == wanted.rehearsed_peak_bytes <= budget


@pytest.mark.slow
def test_twenty_budgets():
    model, x = model_and_input()
    wanted = result_of(model, lambda: loss_of(model(x)).backward())
    frontier = recoup.plan(model, x, loss=loss_of)
    peaks, times = [], []
    for budget in budgets_of(frontier, 20):
        plan = frontier.plan(budget)
        with plan.applied():
            assert_same(result_of(model, lambda: loss_of(model(x)).backward()), wanted)
            peak = recoup.measure(lambda: loss_of(model(x)).backward(), device="cpu", repeats=0)
        assert peak.peak_bytes <= budget
        peaks.append(peak.peak_bytes)
        times.append(sum(row.num_forwards for row in plan.blocks))
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)


def test_points_are_what_plans_take():
    model, x = model_and_input()
    frontier = recoup.plan(model, x, loss=loss_of)
    points = frontier.points
    assert [point.peak_bytes for point in points] == sorted({p.peak_bytes for p in points})
    assert [point.relative_time for point in points] == sorted(
        (point.relative_time for point in points), reverse=True
    )
    assert (points[-1].relative_time, points[-1].num_forwards) == (1.0, 5)
    assert points[0].peak_bytes <= frontier.least_bytes < 1.02 * points[0].peak_bytes
    plan = frontier.plan(points[-2].peak_bytes + 4096)  # a rehearsal may take a little more
    assert plan.predicted_peak_bytes == points[-2].peak_bytes
    assert sum(row.num_forwards for row in plan.blocks) == points[-2].num_forwards


def test_a_further_plan_runs_few_steps():
    model, x = model_and_input()
    calls = []
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    frontier = recoup.plan(model, x, loss=loss_of)
    budget = budgets_of(frontier, 3)[1]
    calls.clear()
    frontier.plan(budget)
    assert len(calls) <= 4  # the plain step, the least, the planned one, and its time


def test_a_plan_after_training_is_compared_with_the_parameters_of_now():
    model, x = model_and_input()
    frontier = recoup.plan(model, x, loss=loss_of)
    frontier.plan("1 GiB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    wanted = result_of(model, lambda: loss_of(model(x)).backward())
    with frontier.plan(budgets_of(frontier, 3)[1]).applied():
        assert_same(result_of(model, lambda: loss_of(model(x)).backward()), wanted)


def test_a_plan_while_another_is_applied():
    model, x = model_and_input()
    frontier = recoup.plan(model, x, loss=loss_of)
    budgets = budgets_of(frontier, 3)
    first = frontier.plan(budgets[0]).apply()
    second = frontier.plan(budgets[1])
    assert first.is_applied
    assert second.actions == recoup.plan(model, x, loss=loss_of, budget=budgets[1]).actions


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.eval(),
        lambda model: model.double(),
        lambda model: model.requires_grad_(False),
        lambda model: model.blocks.append(torch.nn.Linear(32, 32)),
    ],
)
def test_another_state_of_the_model(change):
    model, x = model_and_input()
    frontier = recoup.plan(model, x, loss=loss_of)
    change(model)
    with pytest.raises(ValueError, match="measured for another state of the Net"):
        frontier.plan("1 GiB")


def test_errors():
    model, x = model_and_input()
    frontier = recoup.plan(model, x, loss=loss_of)
    with pytest.raises(BudgetError) as info:
        frontier.plan(10)
    assert info.value.frontier is frontier
    sent = pickle.loads(pickle.dumps(info.value))
    assert (sent.least_bytes, sent.frontier) == (info.value.least_bytes, None)
    with pytest.raises(BudgetError) as info:
        recoup.plan(model, x, loss=loss_of, budget="1 B")
    assert info.value.frontier.plan(info.value.least_bytes).rehearsed_peak_bytes
    with pytest.raises(ValueError, match="`budget` is 'much'"):
        frontier.plan("much")
    with pytest.raises(ValueError, match="`budget_of` is 'all'"):
        recoup.plan(model, x, budget_of="all")


def test_total_budgets():
    model, x = model_and_input()
    optimizer = torch.optim.Adam(model.parameters())
    step = recoup.plan(model, x, loss=loss_of)
    total = recoup.plan(model, x, loss=loss_of, budget_of="total", optimizer=optimizer)
    standing = 3 * sum(p.nbytes for p in model.parameters())
    assert standing < total.least_bytes - step.least_bytes < 1.01 * standing + 2**12
    plan = total.plan(total.least_bytes)
    assert plan.rehearsed_peak_bytes <= total.least_bytes
    assert "(total)" in str(total)


def test_the_table(tmp_path):
    model, x = model_and_input()
    frontier = recoup.plan(model, x, loss=loss_of)
    title, _, head, *rows = str(frontier).splitlines()
    assert title.startswith("Plans for Net: 5 blocks, from ")
    assert head.split() == ["peak", "time", "forwards", "blocks"]
    assert 2 < len(rows) <= 12
    pytest.importorskip("matplotlib")
    assert frontier.figure(tmp_path / "frontier.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_blocks_are_measured_once(monkeypatch, caplog, tmp_path):
    give_steady_times(monkeypatch)
    model, x = model_and_input()
    frontier = recoup.plan(model, x, loss=loss_of, compile="aot_eager")
    assert {point.is_compiled for point in frontier.points} >= {True}
    assert "compiled" in str(frontier)
    caplog.set_level(logging.INFO, logger=compiling.__name__)
    for budget in budgets_of(frontier, 3)[1:]:
        plan = frontier.plan(budget)
        assert any("compiled" in row.way for row in plan.blocks)
        with plan.applied():
            peak = recoup.measure(lambda: loss_of(model(x)).backward(), device="cpu", repeats=0)
        assert peak.peak_bytes <= budget
    assert not [record for record in caplog.records if record.name == compiling.__name__]
    pytest.importorskip("matplotlib")
    frontier.figure(tmp_path / "frontier.png")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_steps_of_both_kinds_are_timed_where_their_predictions_are_close(monkeypatch):
    give_steady_times(monkeypatch)
    monkeypatch.setattr(frontier_module, "_CLOSE", 10.0)
    model, x = model_and_input(num_blocks=3)
    frontier = recoup.plan(model, x, loss=loss_of, compile="aot_eager")
    peaks = {}
    for compiled, others in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.01)):
        give_steps_times(monkeypatch, compiled=compiled, others=others)
        plan = frontier.plan("1 GiB")
        peaks[any("compiled" in row.way for row in plan.blocks)] = plan.rehearsed_peak_bytes
        if (compiled, others) == (1.0, 2.0):
            assert set(peaks) == {True}
    assert set(peaks) == {True, False}
    assert plan.rehearsed_peak_bytes == min(peaks.values())  # of those about as fast


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_second_kind_that_computes_something_else_is_passed_over(monkeypatch):
    give_steady_times(monkeypatch)
    monkeypatch.setattr(frontier_module, "_CLOSE", 10.0)
    model, x = model_and_input(num_blocks=3)
    frontier = recoup.plan(model, x, loss=loss_of, compile="aot_eager")
    verified = frontier_module.verified

    def other_fails(kind, *args):
        if kind.is_compiled:
            return verified(kind, *args)
        raise DifferentStepError("another")

    monkeypatch.setattr(frontier_module, "verified", other_fails)
    assert any("compiled" in row.way for row in frontier.plan("1 GiB").blocks)
