"""What each family of schedules promises, by `simulate`: runs, bytes, states and tapes."""

from __future__ import annotations

from itertools import pairwise, product
from math import comb
from math import log as ln

import pytest

from recoup.schedules import (
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Offload,
    Reverse,
    Tape,
    binomial,
    constant,
    linear,
    log,
    num_advances,
    offloaded,
    revolve,
    simulate,
    sqrt,
)


def indices(schedule, kind):
    return [action.index for action in schedule.actions if isinstance(action, kind)]


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_linear_runs_each_stage_once(n):
    tapes, reverses = map(Tape, range(n)), map(Reverse, reversed(range(n)))
    assert linear(n).actions == (*tapes, *reverses)
    simulation = simulate(linear(n))
    assert simulation.forwards_per_stage == (1,) * n
    assert (simulation.peak_bytes, simulation.peak_states, simulation.peak_tapes) == (n + 1, 0, n)


# -- binomial, revolve, log ------------------------------------------------------------------------

# Number of forward runs for each number of slots: 1 + rn - C(slots + r, slots + 1), tabulated.
OPTIMUM = {
    10: {1: 46, 2: 21, 3: 16, 9: 10},
    100: {1: 4951, 3: 491, 13: 186, 50: 149, 99: 100},
    1000: {1: 499501, 3: 12156, 10: 3637, 44: 1955, 200: 1799, 999: 1000},
}
ROWS = [(n, slots, runs) for n, row in OPTIMUM.items() for slots, runs in row.items()]


def check_binomial_and_revolve(n, slots, num_forwards):
    """Revolve tapes one stage at a time, and so runs all but the last once more."""
    schedule = binomial(n, slots)
    simulation = simulate(schedule)
    assert simulation.num_forwards == num_forwards
    assert simulation.peak_states <= slots
    assert simulation.peak_tapes <= slots + 1
    assert simulation.peak_bytes <= 2 * slots + 2
    assert sorted(indices(schedule, Keep)) == sorted(indices(schedule, Drop))
    simulation = simulate(revolve(n, slots))
    assert simulation.num_forwards == num_forwards + n - 1
    assert simulation.peak_states <= slots
    assert simulation.peak_tapes == 1
    assert simulation.peak_bytes <= slots + 2


@pytest.mark.parametrize(("n", "slots", "num_forwards"), ROWS)
def test_binomial_and_revolve_equal_the_tabulated_optimum(n, slots, num_forwards):
    check_binomial_and_revolve(n, slots, num_forwards)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("n", range(1, 61))
def test_binomial_and_revolve_are_optimal_for_every_number_of_slots(n):
    for slots in range(1, n + 2):
        check_binomial_and_revolve(n, slots, num_advances(n, slots) + 1)


@pytest.mark.parametrize(("n", "slots"), [(1, 1), (2, 1), (7, 6), (7, 7), (7, 100)])
def test_binomial_with_slots_enough_is_linear(n, slots):
    assert binomial(n, slots).actions == linear(n).actions


def test_binomial_of_a_long_chain_takes_few_actions():
    # Half a million stage runs, but one pass for each tape.
    assert len(binomial(1000, 1).actions) < 4 * 1000


@pytest.mark.parametrize("n", [*range(1, 25), 69, 70, 252, 253, 924])
def test_log_is_binomial_with_as_many_slots_as_runs(n):
    slots = next(c for c in range(1, n + 1) if comb(2 * c, c) >= n)
    assert log(n).actions == binomial(n, slots).actions
    assert max(simulate(log(n)).forwards_per_stage) <= slots
    # Stirling: C(2c, c) is at least 4^c / (2 sqrt(c)).
    assert slots <= 2 + ln(n, 4) + ln(2 * slots**0.5, 4)


# -- sqrt ------------------------------------------------------------------------------------------


def segments(n):
    last = simulate(sqrt(n)).forwards_per_stage.index(1)
    return [stop - start for start, stop in pairwise([*indices(sqrt(n), Keep), last, n])]


@pytest.mark.parametrize("n", [*range(1, 60), 100, 399, 1000])
def test_sqrt_is_triangular(n):
    # The nominal 4, 3, 2 is exact; never 1, 1, 1, 1, 5.
    longest = next(k for k in range(1, n + 1) if k * (k + 1) // 2 >= n)
    simulation, lengths = simulate(sqrt(n)), segments(n)
    assert sum(lengths) == n
    assert all(length >= 1 for length in lengths)
    assert simulation.peak_bytes <= longest + 1
    assert simulation.num_forwards == 2 * n - lengths[-1]
    assert max(simulation.forwards_per_stage) <= 2
    # A last segment that is one longer would not fit below the same peak.
    assert lengths[-1] == longest - len(lengths) + 1 or len(lengths) == 1
    wanted = {8: [3, 3, 2], 9: [4, 3, 2], 10: [4, 3, 2, 1]}
    assert lengths == wanted.get(n, lengths)


# -- constant --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 64, 1000])
def test_constant_holds_the_same_at_every_depth(n):
    simulation = simulate(constant(n))
    assert (simulation.num_forwards, simulation.num_inverses) == (n, n)
    assert (simulation.peak_bytes, simulation.peak_states, simulation.peak_tapes) == (1, 1, 1)


def test_constant_hands_over_between_ways():
    assert constant(["invert", "recompute", "keep", "invert"]).actions == (
        *(Advance(0, 1), Keep(1), Advance(1, 2), Tape(2), Advance(3, 4), Keep(4)),
        *(Load(4), Drop(4), Invert(3), Reverse(3)),
        Reverse(2),
        *(Load(1), Tape(1), Reverse(1)),
        *(Load(1), Drop(1), Invert(0), Reverse(0)),
    )


def test_constant_executes_every_mixture():
    for n in range(1, 6):
        for ways in product(["invert", "recompute", "keep"], repeat=n):
            schedule = constant(ways)
            simulation = simulate(schedule)
            runs = tuple(2 if way == "recompute" else 1 for way in ways)
            assert simulation.forwards_per_stage == runs
            assert simulation.num_inverses == ways.count("invert")
            assert sorted(indices(schedule, Keep)) == sorted(set(indices(schedule, Drop)))
            for before, action in pairwise(schedule.actions):  # a state goes with its last load
                assert not isinstance(action, Drop) or before == Load(action.index)


# -- states on a disk ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 64])
@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("slots", [None, 1, 2])
def test_every_stage_of_an_offloaded_chain_is_reversed(n, every, slots):
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
