"""The part of a budget that is left for what an allocator that caches reserves."""

from __future__ import annotations

import pytest
import torch

import recoup
from recoup.errors import BudgetError
from recoup.planning import options
from recoup.planning.options import Room
from tests.plan_oracle import dense, ways_of


@pytest.mark.parametrize(("has_fixed_segments", "headroom"), [(False, 0.05), (True, 0.25)])
def test_an_accelerator_has_a_headroom(monkeypatch, has_fixed_segments, headroom):
    monkeypatch.setattr(options, "is_accelerator", lambda device: True)
    monkeypatch.setattr(options, "has_fixed_segments", lambda device: has_fixed_segments)
    plan = recoup.plan(dense(), torch.ones(256, 64), budget="1 GiB")
    assert plan.headroom == headroom


@pytest.mark.parametrize("headroom", [0.0, 0.05, 0.3])
def test_the_least_budget_for_a_step_suffices(headroom):
    for step_bytes in (1, 20, 999, 12_345_678_901):
        room = Room(100, headroom)
        budget = room.budget_for(step_bytes)
        assert room.of(budget) >= step_bytes > room.of(budget - 1)


def test_a_plan_leaves_its_headroom_free():
    model, x = dense(), torch.ones(256, 64)
    frontier = recoup.plan(model, x, headroom=0.25)
    assert "; 0.25 of a budget is left for fragmentation" in str(frontier)
    least = frontier.least_bytes
    with pytest.raises(BudgetError, match=r"with a headroom of 0\.25 of it") as caught:
        frontier.plan(least - 8)
    assert caught.value.least_bytes == least
    most = frontier.points[-1].peak_bytes
    assert ways_of(frontier.plan(most)) == {"keep"}
    assert ways_of(frontier.plan(most - 4)) != {"keep"}
    for budget in (least, (least + most) // 8 * 4):
        plan = frontier.plan(budget)
        assert plan.rehearsed_peak_bytes <= 0.75 * budget == plan.usable_bytes
        assert "left for fragmentation: 0.25 of the budget" in str(plan)
        assert plan.rehearsed_peaks == (plan.rehearsed_peak_bytes,) * 2 + (None,)
    assert recoup.plan(model, x, budget=budget).headroom == 0
