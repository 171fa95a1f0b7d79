"""Schedules with states on a disk: what they cost, and how long they wait for copies."""

from __future__ import annotations

import pytest

from recoup.schedules import Advance, Cost, Load, Offload, binomial, offloaded, revolve, simulate
from recoup.schedules._simulate import waiting_seconds


@pytest.mark.parametrize("n", [1, 2, 7, 64])
@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("slots", [None, 1, 2])
def test_every_stage_is_reversed(n, every, slots):
    schedule = offloaded(n, "/scratch", every=every, slots=slots)
    simulation = simulate(schedule)
    assert all(a.to == "/scratch" for a in schedule.actions if isinstance(a, Offload))
    assert simulation.peak_offloaded_bytes == (n - 1) // every
    if slots is None:
        assert simulation.num_forwards == 2 * n - min(n, every)
        assert simulation.peak_tapes == min(n, every)
    else:
        # A segment is run once, and reversed as a chain of its own.
        whole, rest = divmod(n, every)
        alone = [every] * whole + [rest] * bool(rest)
        forwards = sum(simulate(binomial(each, slots)).num_forwards for each in alone)
        assert simulation.num_forwards == forwards + n - min(n, every)
        assert simulation.peak_states <= slots


def test_the_peak_with_what_is_in_flight():
    schedule = offloaded(64)
    assert simulate(schedule).peak_bytes == 2
    assert simulate(schedule, in_flight_bytes=2).peak_bytes == 4
    assert simulate(schedule, in_flight_bytes=1000).peak_bytes == 2 + 63
    assert (
        simulate(revolve(64, 64), in_flight_bytes=2).peak_bytes
        == simulate(revolve(64, 64)).peak_bytes
    )
    with pytest.raises(ValueError, match="`in_flight_bytes` is -1"):
        simulate(schedule, in_flight_bytes=-1)


COSTS = [Cost(1.0, 100, 300)] * 16


def waits(speed, in_flight_bytes=200, n=16):
    found = simulate(
        offloaded(n),
        costs=COSTS[:n],
        bytes_per_second={"host": speed},
        in_flight_bytes=in_flight_bytes,
    )
    return found.waiting_seconds


def test_copies_that_are_faster_than_the_stages_cost_nothing():
    assert waits(100.0) == 0.0  # a second for a copy, and for a stage
    assert waits(1e9, in_flight_bytes=1) == pytest.approx(0.0, abs=1e-4)


def test_slower_copies_cost_what_is_not_hidden():
    slow, slower = waits(50.0), waits(25.0)
    # 15 copies of two seconds each way, behind a second of forward and three of backward each.
    assert 10 <= slow <= 16
    assert slower > 2 * slow
    assert waits(50.0, in_flight_bytes=10_000) < slow <= waits(50.0, in_flight_bytes=1)


def test_waiting_for_a_state_by_hand():
    schedule = offloaded(2)
    assert schedule.actions[:2] == (Offload(0), Advance(0, 1))
    assert Load(0) in schedule.actions
    # What left last is still here when it is loaded.
    assert waiting_seconds(schedule, COSTS[:2], {"host": 1.0}, 200) == 0.0
    # State 1 leaves when state 0 has left, and is still here in backward; state 0 is fetched when
    # that is loaded, 3 seconds before, or, if state 1 is still leaving, when it is asked for.
    times = [waiting_seconds(offloaded(3), COSTS[:3], {"host": s}, 100) for s in (1e3, 25.0, 10.0)]
    assert times == [pytest.approx(0.0), pytest.approx(3.0 + 1.0), pytest.approx(9.0 + 13.0)]


def test_what_a_simulation_of_waits_needs():
    with pytest.raises(ValueError, match="`bytes_per_second` is given without `costs`"):
        simulate(offloaded(4), bytes_per_second={"host": 1.0})
    with pytest.raises(ValueError, match=r"`bytes_per_second\['/scratch'\]` is None"):
        simulate(offloaded(4, "/scratch"), costs=COSTS[:4], bytes_per_second={"host": 1.0})


@pytest.mark.parametrize("name", ["n", "every", "slots"])
def test_wrong_counts(name):
    arguments = {"n": 4, "every": 2, "slots": 1, name: 0}
    with pytest.raises(ValueError, match=f"`{name}` is 0, but must be a whole number, at least 1"):
        offloaded(arguments.pop("n"), **arguments)
    with pytest.raises(ValueError, match=f"`{name}` is 1.5, but must be a whole number"):
        offloaded(**{"n": 4, "every": 2, "slots": 1, name: 1.5})


def test_a_place_that_is_no_string():
    with pytest.raises(ValueError, match="`to` is 3, but must be"):
        offloaded(11, 3, every=3)
