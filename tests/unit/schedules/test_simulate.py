from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    Simulation,
    Tape,
    binomial,
    constant,
    linear,
    log,
    optimal,
    revolve,
    simulate,
    sqrt,
    trace,
)


def execute(schedule: Schedule, x: float) -> tuple[float, list[float], int]:
    """Run a chain of scalar stages, stage i being x -> (x + i)^3, and return its output, the
    derivative of each stage in the order in which they were reversed, and the number of runs."""
    kept: dict[int, float] = {}
    tapes: dict[int, float] = {}
    derivatives: list[float] = []
    working, output, num_runs = x, None, 0
    for action in schedule.actions:
        match action:
            case Keep(index):
                kept[index] = working
            case Drop(index):
                del kept[index]
            case Load(index):
                working = kept[index]
            case Advance(start, stop):
                num_runs += stop - start
                for index in range(start, stop):
                    working = (working + index) ** 3
            case Tape(index):
                num_runs += 1
                tapes[index] = working
                working = (working + index) ** 3
            case Invert(index):
                working = working ** (1 / 3) - index
                tapes[index] = working
            case Reverse(index):
                output = working if output is None and not derivatives else output
                derivatives.append(3 * (tapes.pop(index) + index) ** 2)
    assert not kept
    assert not tapes
    return output, derivatives, num_runs


N = 5
EVERY = [
    sqrt(N),
    log(N),
    *(binomial(N, slots) for slots in (1, 2, 3)),
    *(revolve(N, slots) for slots in (1, 2, 3)),
    *(optimal([Cost(1.0, 1, 3)] * N, budget) for budget in (6, 8, 12)),
    constant(N),
    constant(["invert", "recompute", "keep", "recompute", "invert"]),
    constant(["keep", "invert", "invert", "keep", "recompute"]),
]


@pytest.mark.parametrize("schedule", EVERY, ids=str)
def test_every_schedule_computes_the_derivatives(schedule):
    _, derivatives, num_runs = execute(schedule, 0.25)
    _, expected, _ = execute(linear(N), 0.25)
    assert derivatives == pytest.approx(expected, rel=1e-9)
    assert prod(derivatives) > 0
    assert num_runs == simulate(schedule).num_forwards


def test_simulate_counts_bytes_of_each_state_and_tape():
    schedule = Schedule(
        3,
        (
            *(Keep(0), Advance(0, 2), Tape(2), Reverse(2)),
            *(Load(0), Drop(0), Tape(0), Tape(1), Reverse(1), Reverse(0)),
        ),
    )
    states, tapes = [1, 20, 300, 4000], [10_000, 200_000, 3_000_000]
    assert simulate(schedule, states, tapes) == Simulation(
        num_forwards=5,
        num_inverses=0,
        peak_bytes=1 + 3_000_000 + 4000,  # x_0, the last tape, the output
        peak_states=1,
        peak_tapes=2,
        forwards_per_stage=(2, 2, 1),
    )
    # Without its last stage's weight: both other tapes, and their segment's output.
    assert simulate(schedule, [1, 20, 300, 0], [100, 1000, 500]).peak_bytes == 100 + 1000 + 300


def test_simulate_counts_the_widest_state_on_the_way():
    schedule = Schedule(2, (Keep(0), Advance(0, 2), Keep(2), Drop(0), *constant(2).actions[2:]))
    assert simulate(schedule, [1, 50, 2], [5, 2]).peak_bytes == 1 + 50


def test_simulate_counts_a_state_once():
    # x_1 is kept, and it is the input of the tape of stage 1.
    assert simulate(constant(["invert", "keep"]), [1, 10, 100], [7, 1000]).peak_bytes == 1100
    kept_twice = Schedule(1, (Keep(0), Tape(0), Reverse(0)))
    assert simulate(kept_twice, [10, 0], 10).peak_bytes == 10
    assert simulate(kept_twice, [10, 0], 10).peak_states == 1


def test_an_inverse_is_no_forward():
    simulation = simulate(constant(["invert"]))
    assert (simulation.num_forwards, simulation.num_inverses) == (1, 1)
    assert simulation.forwards_per_stage == (1,)


BAD = {
    "needs the working state x_1, and the working state is x_0": [Tape(1)],
    "needs the working state x_2, and the working state is x_1": [Advance(0, 1), Keep(2)],
    "action 1, Advance\\(start=0, stop=1, results=0\\): it needs the working state x_0": [
        Advance(0, 1),
        Advance(0, 1),
    ],
    "x_0 is kept already": [Keep(0), Keep(0)],
    "x_0 is offloaded already": [Offload(0), Offload(0)],
    "to='host'\\): it needs the working state x_1": [Offload(1)],
    "it needs x_1 kept, and it is not": [Drop(1)],
    "it needs x_0 kept, and it is not": [Tape(0), Tape(1), Load(0)],
    "it belongs to backward, but the sweep has not reached x_2": [Keep(0), Load(0)],
    "action 1, Reverse\\(index=0\\): it belongs to backward": [Tape(0), Reverse(0)],
    "the next stage to reverse is 1": [Tape(0), Tape(1), Reverse(0)],
    "it needs a tape of stage 1": [Advance(0, 2), Reverse(1)],
    "keep x_2 in the sweep and load it first": [Advance(0, 2), Invert(1)],
    "stage 1 is taped already": [Keep(0), Advance(0, 1), Keep(1), Tape(1), Load(1), Tape(1)],
    "stage 1 is reversed already": [Tape(0), Keep(1), Tape(1), Reverse(1), Load(1), Tape(1)],
    "has no such stage or state": [Tape(2)],
    "of 2 stages has no such stage": [Keep(-1)],
    "chain of 2 stages has no such": [Advance(0, 0)],
    "incomplete: the sweep ends before x_2": [Tape(0)],
    "incomplete: it never reverses stage 0": [Tape(0), Tape(1), Reverse(1)],
}


@pytest.mark.parametrize("message", BAD)
def test_simulate_refuses_what_cannot_be_executed(message):
    with pytest.raises(ScheduleError, match=message):
        simulate(Schedule(2, tuple(BAD[message]), name="bad"))


def test_the_output_is_kept_at_once_or_never():
    late = (Keep(0), Advance(0, 1), Drop(0), Keep(1), Load(1), Invert(0), Reverse(0))
    simulate(Schedule(1, (*late[:2], late[3], late[2], *late[4:])))
    with pytest.raises(ScheduleError, match="the working state is gone where backward begins"):
        simulate(Schedule(1, late))


def test_simulate_refuses_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"`state_bytes` has 2 numbers, .* needs 3"):
        simulate(linear(2), [1, 1], 1)
    with pytest.raises(ValueError, match=r"`tape_bytes` has 3 numbers, .* needs 2"):
        simulate(linear(2), 1, [1, 1, 1])
    with pytest.raises(ValueError, match=r"`tape_bytes` is -1, but it must not be"):
        simulate(linear(2), 1, [1, -1])
    with pytest.raises(ValueError, match=r"num_stages` is 0"):
        simulate(Schedule(0, ()))


@given(n=st.integers(1, 40), slots=st.integers(1, 10), data=st.data())
def test_the_peak_grows_with_the_sizes_and_with_them_alone(n, slots, data):
    states = data.draw(st.lists(st.integers(0, 50), min_size=n + 1, max_size=n + 1))
    tapes = [state + data.draw(st.integers(0, 50)) for state in states[:n]]
    for schedule in (sqrt(n), binomial(n, slots), revolve(n, slots)):
        once = simulate(schedule, states, tapes)
        twice = simulate(schedule, [2 * s for s in states], [2 * t for t in tapes])
        assert twice.peak_bytes == 2 * once.peak_bytes
        assert once.peak_bytes >= max(tapes)
        assert once.num_forwards == simulate(schedule).num_forwards


def test_a_trace_needs_one_cost_for_each_stage():
    with pytest.raises(ValueError, match=r"`costs` has 1 numbers, but this schedule needs 2"):
        trace(linear(2), [Cost(1.0, 1, 1)])


@pytest.mark.parametrize("schedule", [linear(6), sqrt(6), binomial(6, 2), constant(6)])
def test_a_trace_has_the_peak_and_the_runs_of_its_schedule(schedule):
    costs = [Cost(1.0, 1, 3, run_bytes=2, reverse_bytes=1, is_invertible=True)] * 6
    simulation, moments = simulate(schedule, costs=costs), trace(schedule, costs)
    assert max(moment.peak_bytes for moment in moments) == simulation.peak_bytes
    assert moments[-1].held_bytes <= 1  # the chain's input, which an inverse has made
    # The backward of a stage takes twice its forward.
    assert moments[-1].seconds == simulation.seconds + 2 * 6
    assert sum(isinstance(m.action, Advance | Tape) for m in moments) == simulation.num_forwards
