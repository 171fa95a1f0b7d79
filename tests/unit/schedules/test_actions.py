from __future__ import annotations

import pytest

from recoup.schedules import (
    Advance,
    Drop,
    Keep,
    Load,
    Reverse,
    Schedule,
    Tape,
    binomial,
    constant,
    linear,
    sqrt,
)


def test_a_schedule_prints_its_sweep_and_its_backward():
    assert str(constant(2)) == (
        "constant, 2 stages\n"
        "sweep: run 0 to 1, keep x_2\n"
        "backward: load x_2, drop x_2, invert 1, reverse 1, invert 0, reverse 0"
    )
    assert str(linear(1)) == "linear, 1 stage\nsweep: tape 0\nbackward: reverse 0"
    actions = (Keep(0), Advance(0, 1), Tape(1), Reverse(1), Load(0), Drop(0), Tape(0), Reverse(0))
    assert str(Schedule(2, actions)) == (
        "schedule, 2 stages\n"
        "sweep: keep x_0, run 0, tape 1\n"
        "backward: reverse 1, load x_0, drop x_0, tape 0, reverse 0"
    )


def test_a_long_schedule_breaks_its_lines_between_actions():
    schedule = binomial(30, 3)
    lines = str(schedule).splitlines()
    assert max(map(len, lines)) <= 100
    words = " ".join(line.strip() for line in lines[1:])
    words = words.replace("sweep: ", "").replace(" backward: ", ", ")
    assert words.split(", ") == [str(action) for action in schedule.actions]


@pytest.mark.parametrize("schedule", [linear(4), constant(4), binomial(9, 2), sqrt(9)])
def test_the_sweep_ends_where_the_last_state_is_reached(schedule):
    assert not any(isinstance(a, Reverse) for a in schedule.actions[: schedule.sweep_end])
    assert isinstance(schedule.actions[schedule.sweep_end], Load | Reverse)


def test_actions_of_different_kinds_differ():
    assert Keep(0) != Load(0)
    assert len({Keep(0), Load(0), Drop(0), Reverse(0), Keep(0)}) == 4
