"""Groups of stages that a schedule treats alike."""

from __future__ import annotations

import pytest

from recoup.schedules import (
    Advance,
    Cost,
    Keep,
    Load,
    Offload,
    Reverse,
    Schedule,
    Tape,
    binomial,
    constant,
    linear,
    log,
    optimal,
    revolve,
    simulate,
    sqrt,
)
from recoup.schedules.actions import groups_of, on_groups

SCHEDULES = [
    *(make(n) for make in (sqrt, log, linear) for n in (1, 2, 3, 10, 31)),
    *(make(n, slots) for make in (revolve, binomial) for n in (1, 7, 20) for slots in (1, 3, 30)),
    constant(["keep", "recompute", "recompute", "keep", "recompute"]),
    constant(["recompute", "invert", "invert", "recompute"]),
    optimal([Cost(1.0, 1, 1 + 3 * (i % 3)) for i in range(12)], 22),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.num_stages}")
def test_the_schedule_on_groups_runs_each_stage_as_often(schedule):
    groups = groups_of(schedule)
    assert [stage for group in groups for stage in group] == [*range(schedule.num_stages)]
    of_groups = simulate(on_groups(schedule, groups)).forwards_per_stage
    found = [num for num, group in zip(of_groups, groups, strict=True) for _ in group]
    assert found == [*simulate(schedule).forwards_per_stage]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.num_stages}")
def test_no_state_within_a_group_is_kept(schedule):
    within = {stage for group in groups_of(schedule) for stage in group[1:]}
    assert within.isdisjoint(a.index for a in schedule.actions if isinstance(a, Keep | Load))


def test_segments_are_groups():
    starts = [action.index for action in sqrt(100).actions if isinstance(action, Keep)]
    assert [group.start for group in groups_of(sqrt(100))] == [*starts, 97, 98, 99]


def test_a_group_holds_its_input_so_it_begins_with_a_kept_state():
    assert len(groups_of(linear(5))) == 5
    (keep, *rest) = sqrt(3).actions
    assert len(groups_of(Schedule(3, (keep, *rest)))) == 2
    assert len(groups_of(Schedule(3, (Offload(0), *rest)))) == 3


def test_neighbours_that_are_treated_apart_are_no_group():
    tapes, reverses = (Tape(0), Tape(1, variant=1)), (Reverse(1), Reverse(0))
    assert len(groups_of(Schedule(2, (*tapes, *reverses)))) == 2
    runs = (Keep(0), Advance(0, 1), Advance(1, 2), Load(0), Tape(0), Tape(1), *reverses)
    assert len(groups_of(Schedule(2, runs))) == 2
    offloads = (Offload(0), Advance(0, 1), Keep(1), Tape(1), Reverse(1), Load(0), Tape(0))
    assert len(groups_of(Schedule(2, (*offloads, Reverse(0))))) == 2
