from __future__ import annotations

import pytest

from recoup.errors import ScheduleError
from recoup.schedules import (
    Advance,
    Cost,
    Drop,
    Invert,
    Keep,
    Load,
    Offload,
    Reverse,
    Schedule,
    SelectiveTape,
    Tape,
    constant,
    linear,
    simulate,
)

AGAIN = Schedule(
    2,
    (
        *(Keep(0), Advance(0, 1), Tape(1), Reverse(1)),
        *(Load(0), Drop(0), Tape(0), Reverse(0)),
    ),
)
AWAY = Schedule(2, (Offload(0), *AGAIN.actions[1:]))


def stage(**more):
    return Cost(1.0, 10, 100, **more)


@pytest.mark.parametrize(
    ("more", "peak"),
    [
        ({}, 200),
        ({"run_bytes": 500}, 510),
        ({"tape_run_bytes": 500}, 610),
        ({"reverse_bytes": 500}, 700),
        ({"between_bytes": 7}, 214),
        ({"left_bytes": 300}, 600),
        ({"left_bytes": -50}, 200),
    ],
)
def test_simulate_counts_the_worst_moment(more, peak):
    assert simulate(linear(2), costs=[stage(**more)] * 2).peak_bytes == (
        200 if "run_bytes" in more else peak
    )
    if "run_bytes" in more:
        assert simulate(AGAIN, costs=[stage(**more)] * 2).peak_bytes == peak


def test_simulate_counts_seconds_and_host_memory():
    costs = [stage(offload_seconds=0.25), stage(variants=(SelectiveTape(30, 0.5),))]
    simulation = simulate(AWAY, costs=costs)
    assert (simulation.seconds, simulation.peak_offloaded_bytes) == (3.25, 10)
    assert (simulation.peak_states, simulation.peak_bytes) == (0, 110)
    thin = Schedule(2, (Tape(0), Tape(1, 1), Reverse(1), Reverse(0)))
    assert (simulate(thin, costs=costs).seconds, simulate(thin, costs=costs).peak_bytes) == (
        2.5,
        130,
    )
    inverted = simulate(constant(1), costs=[stage(is_invertible=True, invert_seconds=2.0)])
    assert (inverted.seconds, inverted.num_inverses, inverted.peak_bytes) == (3.0, 1, 100)


@pytest.mark.parametrize(
    ("message", "costs"),
    [
        (r"x_1, which running stage 0 again", (stage(), stage(is_linked=False), stage())),
        (r"stage 0 is fixed", (stage(is_fixed=True), stage(), stage())),
    ],
)
def test_simulate_refuses_to_run_again_what_cannot_be(message, costs):
    schedule = Schedule(
        3,
        (
            *(Keep(0), Advance(0, 2), Tape(2), Reverse(2)),
            *(Load(0), Advance(0, 1), Tape(1), Reverse(1), Load(0), Drop(0), Tape(0), Reverse(0)),
        ),
    )
    simulate(schedule, costs=[stage()] * 3)
    with pytest.raises(ScheduleError, match=message):
        simulate(schedule, costs=costs)
    taped = Schedule(
        3,
        (
            *(Keep(0), Advance(0, 2), Tape(2), Reverse(2)),
            *(Load(0), Drop(0), Tape(0), Tape(1), Reverse(1), Reverse(0)),
        ),
    )
    with pytest.raises(ScheduleError, match=message):
        simulate(taped, costs=costs)


def test_simulate_refuses_what_the_costs_rule_out():
    with pytest.raises(ScheduleError, match="stage 0 is not invertible"):
        simulate(constant(1), costs=[stage()])
    costs = [stage(is_invertible=True), stage(is_invertible=True, is_linked=False)]
    with pytest.raises(ScheduleError, match="x_1 is not what stage 0 returned"):
        simulate(constant(2), costs=costs)
    with pytest.raises(ScheduleError, match="x_0 cannot be offloaded"):
        simulate(AWAY, costs=[stage()] * 2)
    with pytest.raises(ScheduleError, match="stage 0 has 0 variants"):
        simulate(Schedule(1, (Tape(0, 1), Reverse(0))), costs=[stage()])
    again = Schedule(2, (*AGAIN.actions[:-2], Tape(0, 1), Reverse(0)))
    with pytest.raises(ScheduleError, match="only a tape of the sweep"):
        simulate(again, costs=[stage(variants=(SelectiveTape(10, 0.0),)), stage()])
    with pytest.raises(ValueError, match="`costs` has 1 numbers, but this schedule needs 2"):
        simulate(linear(2), costs=[stage()])


def test_costs_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"`run_bytes` is -1"):
        stage(run_bytes=-1)
    with pytest.raises(ValueError, match=r"`invert_seconds` is -1"):
        stage(invert_seconds=-1.0)
    with pytest.raises(ValueError, match=r"`offload_seconds` is -1"):
        stage(offload_seconds=-1.0)
    with pytest.raises(ValueError, match=r"`variants\[0\].tape_bytes` is 9"):
        stage(variants=(SelectiveTape(9, 0.0),))
    with pytest.raises(ValueError, match=r"`seconds` is nan"):
        SelectiveTape(1, float("nan"))


def test_further_actions_are_printed():
    assert str(Tape(3, 2)) == "tape 3 (variant 2)"
    assert str(Offload(3)) == "offload x_3"
    assert str(Invert(1)) == "invert 1"
