"""A schedule with something that is no action, or a number that is none, is a ScheduleError."""

from __future__ import annotations

import pytest
from torch import nn

import recoup
from recoup.errors import ScheduleError
from recoup.schedules import Advance, Keep, Reverse, Schedule, Tape, simulate

WRONG = {
    "a string": ((Tape(0), "tape 1"), "action 1, 'tape 1': it is no action of recoup.schedules"),
    "a class": ((Tape, Tape(1)), "action 0, .*: it is no action"),
    "half a stage": ((Tape(0), Tape(1.5)), r"action 1, .*1\.5.*no such stage"),
    "half a run": ((Keep(0), Advance(0, 1.5)), r"action 1, .*1\.5.*no such stage"),
    "a name": ((Keep("x_0"),), "action 0, .*x_0.*no such stage or state"),
    "a flag": ((Tape(0), Tape(True)), "action 1, .*True.*no such stage"),
    "a variant": ((Tape(0, "whole"), Tape(1)), "action 0, .*stage 0 has 0 variants"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_named(name):
    actions, reason = WRONG[name]
    schedule = Schedule(2, (*actions, Reverse(1), Reverse(0)))
    with pytest.raises(ScheduleError, match=reason):
        simulate(schedule)
    with pytest.raises(ScheduleError, match=reason):
        recoup.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), memory=schedule)
