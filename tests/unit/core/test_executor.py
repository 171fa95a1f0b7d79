from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup._core.executor import Executor
from recoup.errors import NotInvertibleError, ScheduleError
from recoup.invertible import Chain
from recoup.schedules import (
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Reverse,
    Schedule,
    Tape,
    constant,
    simulate,
    sqrt,
)
from tests.oracle import assert_same_step, run_step
from tests.zoo import couplings, leaf


def test_a_plan_refuses_what_cannot_be_executed():
    with pytest.raises(ScheduleError, match=r"needs x_1 kept"):
        Executor(Schedule(2, (Advance(0, 2), Load(1), Tape(1), Reverse(1)), name="wrong"))
    with pytest.raises(ScheduleError, match=r"incomplete"):
        Executor(Schedule(2, (Tape(0), Tape(1), Reverse(1)), name="half"))


def test_a_plan_is_for_as_many_stages_as_it_says():
    with pytest.raises(ScheduleError, match=r"for 3 stages and the chain has 2"):
        Executor(sqrt(3)).execute([None, None], (torch.zeros(1),))


BY_HAND = {
    "keeps before dropping": (Keep(0), Advance(0, 3), Keep(3), Drop(0), Load(3), Drop(3)),
    "drops before keeping": (Keep(0), Advance(0, 3), Drop(0), Keep(3), Load(3), Drop(3)),
    "keeps two states": (Advance(0, 2), Keep(2), Advance(2, 3), Keep(3), Load(3), Drop(3), Drop(2)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_simulate_accepts_can_be_executed(name):
    end = [action for index in (2, 1, 0) for action in (Invert(index), Reverse(index))]
    schedule = Schedule(3, (*BY_HAND[name], *end), name=name)
    torch.manual_seed(0)
    model, x = Chain(*couplings(0.3)[:3]).double(), leaf(4, 6)
    try:
        assert simulate(schedule).num_inverses == 3
    except ScheduleError:
        model.memory = schedule
        with pytest.raises(ScheduleError, match=name):
            model(x)
        return
    want = run_step(model, x, memory="linear")
    assert_same_step(run_step(model, x, memory=schedule), want, rtol=1e-10)


def test_a_stage_without_an_inverse_in_a_schedule_that_inverts():
    model = recoup.Sequential(nn.Linear(3, 3), nn.Tanh(), memory=constant(2))
    with pytest.raises(NotInvertibleError, match=r"Linear"):
        model(torch.randn(2, 3)).sum().backward()
