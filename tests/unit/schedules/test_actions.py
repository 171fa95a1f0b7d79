"""Schedules as data: how they print, where their sweep ends, and which stages they treat alike."""

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
    *(make(n) for make in (sqrt, log, linear) for n in (1, 3, 31)),
    *(make(n, slots) for make in (revolve, binomial) for n, slots in ((7, 1), (20, 3), (7, 30))),
    constant(4),
    constant(["keep", "recompute", "recompute", "keep", "recompute"]),
    constant(["recompute", "invert", "invert", "recompute"]),
    optimal([Cost(1.0, 1, 1 + 3 * (i % 3)) for i in range(12)], 22),
]


def test_a_schedule_prints_its_sweep_and_its_backward():
    assert str(constant(2)) == (
        "constant, 2 stages\n"
        "sweep: run 0 to 1, keep x_2\n"
        "backward: load x_2, drop x_2, invert 1, reverse 1, invert 0, reverse 0"
    )
    actions = (Offload(0), Advance(0, 1), Tape(1, 2), Reverse(1), Load(0), Tape(0), Reverse(0))
    assert str(Schedule(2, actions)) == (
        "schedule, 2 stages\n"
        "sweep: offload x_0, run 0, tape 1 (variant 2)\n"
        "backward: reverse 1, load x_0, tape 0, reverse 0"
    )
    assert str(linear(1)) == "linear, 1 stage\nsweep: tape 0\nbackward: reverse 0"
    # A long one breaks its lines between actions.
    schedule = binomial(30, 3)
    lines = str(schedule).splitlines()
    assert max(map(len, lines)) <= 100
    words = " ".join(line.strip() for line in lines[1:])
    words = words.replace("sweep: ", "").replace(" backward: ", ", ")
    assert words.split(", ") == [str(action) for action in schedule.actions]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.num_stages}")
def test_a_sweep_ends_at_the_last_state_and_groups_of_stages_run_as_often_as_each(schedule):
    assert not any(isinstance(a, Reverse) for a in schedule.actions[: schedule.sweep_end])
    assert isinstance(schedule.actions[schedule.sweep_end], Load | Reverse)
    groups = groups_of(schedule)
    assert [stage for group in groups for stage in group] == [*range(schedule.num_stages)]
    of_groups = simulate(on_groups(schedule, groups)).forwards_per_stage
    found = [num for num, group in zip(of_groups, groups, strict=True) for _ in group]
    assert found == [*simulate(schedule).forwards_per_stage]
    # No state within a group is kept.
    within = {stage for group in groups for stage in group[1:]}
    assert within.isdisjoint(a.index for a in schedule.actions if isinstance(a, Keep | Load))


RUNS, REVERSES = (Advance(0, 1), Advance(1, 2)), (Reverse(1), Reverse(0))
AGAIN = Load(0), Tape(0), Reverse(0)


@pytest.mark.parametrize(
    ("schedule", "num_groups"),
    [
        (linear(5), 5),
        # A group holds its input, so it begins with a kept state.
        (sqrt(3), 2),
        (Schedule(3, (Offload(0), *sqrt(3).actions[1:])), 3),
        # Neighbours that are treated apart are no group.
        (Schedule(2, (Tape(0), Tape(1, variant=1), *REVERSES)), 2),
        (Schedule(2, (Keep(0), *RUNS, Load(0), Tape(0), Tape(1), *REVERSES)), 2),
        (Schedule(2, (Offload(0), RUNS[0], Keep(1), Tape(1), REVERSES[0], *AGAIN)), 2),
    ],
    ids=str,
)
def test_which_stages_are_a_group(schedule, num_groups):
    assert len(groups_of(schedule)) == num_groups
