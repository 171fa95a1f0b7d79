"""What each family of schedules promises, by `simulate`; schedules as data: print and groups."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product
from math import comb

import pytest

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
    Tape,
    beta,
    binomial,
    constant,
    linear,
    log,
    num_advances,
    num_sweeps,
    offloaded,
    optimal,
    revolve,
    simulate,
    sqrt,
)
from recoup.schedules.actions import groups_of, on_groups


def indices(schedule, kind):
    return [action.index for action in schedule.actions if isinstance(action, kind)]


def test_linear_runs_each_stage_once():
    tapes, reverses = map(Tape, range(7)), map(Reverse, reversed(range(7)))
    assert linear(7).actions == (*tapes, *reverses)
    simulation = simulate(linear(7))
    assert simulation.forwards_per_stage == (1,) * 7
    assert (simulation.peak_bytes, simulation.peak_states, simulation.peak_tapes) == (8, 0, 7)


@cache
def least_advances(n: int, slots: int) -> int:
    """The least number of advances by its definition, without the closed form."""
    if n == 1:
        return 0
    if slots == 1:
        return n * (n - 1) // 2
    return min(
        split + least_advances(n - split, slots - 1) + least_advances(split, slots)
        for split in range(1, n)
    )


def check_binomial_and_revolve(n, slots, num_forwards):
    """Revolve tapes one stage at a time, and so runs all but the last once more."""
    assert num_advances(n, slots) == num_forwards - 1
    schedule = binomial(n, slots)
    simulation = simulate(schedule)
    assert simulation.num_forwards == num_forwards
    assert simulation.peak_states <= slots
    assert simulation.peak_tapes <= slots + 1
    assert simulation.peak_bytes <= 2 * slots + 2
    assert sorted(indices(schedule, Keep)) == sorted(indices(schedule, Drop))
    assert slots < n - 1 or schedule.actions == linear(n).actions
    simulation = simulate(revolve(n, slots))
    assert simulation.num_forwards == num_forwards + n - 1
    assert (simulation.peak_states <= slots, simulation.peak_tapes) == (True, 1)
    assert simulation.peak_bytes <= slots + 2


def test_binomial_and_revolve_are_optimal_for_every_number_of_slots():
    for n in (*range(1, 14), 20):
        for slots in range(1, n + 2):
            check_binomial_and_revolve(n, slots, least_advances(n, slots) + 1)
    # As tabulated: 1 + r n - C(slots + r, slots + 1).
    check_binomial_and_revolve(100, 3, 491)
    check_binomial_and_revolve(1000, 44, 1955)


def test_beta_is_the_longest_chain_for_a_number_of_sweeps():
    for slots, sweeps in product(range(1, 8), range(1, 6)):
        assert num_sweeps(beta(slots, sweeps), slots) == sweeps
        assert num_sweeps(beta(slots, sweeps) + 1, slots) == sweeps + 1
    assert beta(3, -1) == 0
    # Half a million stage runs, but one pass for each tape.
    assert len(binomial(1000, 1).actions) < 4 * 1000


def test_log_is_binomial_with_as_many_slots_as_runs():
    for n in (1, 2, 3, 6, 7, 20, 21, 70, 252, 253):
        slots = next(c for c in range(1, n + 1) if comb(2 * c, c) >= n)
        assert log(n).actions == binomial(n, slots).actions
        assert max(simulate(log(n)).forwards_per_stage) <= slots


@pytest.mark.parametrize("n", [*range(1, 12), 29, 100])
def test_sqrt_is_triangular(n):
    longest = next(k for k in range(1, n + 1) if k * (k + 1) // 2 >= n)
    simulation = simulate(sqrt(n))
    last = simulation.forwards_per_stage.index(1)
    lengths = [stop - start for start, stop in pairwise([*indices(sqrt(n), Keep), last, n])]
    assert sum(lengths) == n
    assert simulation.peak_bytes <= longest + 1
    assert simulation.num_forwards == 2 * n - lengths[-1]
    assert max(simulation.forwards_per_stage) <= 2
    # A last segment that is one longer would not fit below the same peak.
    assert lengths[-1] == longest - len(lengths) + 1 or len(lengths) == 1
    assert lengths == {8: [3, 3, 2], 9: [4, 3, 2], 10: [4, 3, 2, 1]}.get(n, lengths)


def test_constant_holds_the_same_at_every_depth_and_hands_over_between_ways():
    for n in (1, 64, 1000):
        found = simulate(constant(n))
        assert (found.num_forwards, found.num_inverses) == (n, n)
        assert (found.peak_bytes, found.peak_states, found.peak_tapes) == (1, 1, 1)
    assert constant(["invert", "recompute", "keep", "invert"]).actions == (
        *(Advance(0, 1), Keep(1), Advance(1, 2), Tape(2), Advance(3, 4), Keep(4)),
        *(Load(4), Drop(4), Invert(3), Reverse(3)),
        Reverse(2),
        *(Load(1), Tape(1), Reverse(1)),
        *(Load(1), Drop(1), Invert(0), Reverse(0)),
    )


def test_constant_executes_every_mixture():
    for ways in product(["invert", "recompute", "keep"], repeat=4):
        schedule = constant(ways)
        simulation = simulate(schedule)
        runs = tuple(2 if way == "recompute" else 1 for way in ways)
        assert simulation.forwards_per_stage == runs
        assert simulation.num_inverses == ways.count("invert")
        assert sorted(indices(schedule, Keep)) == sorted(set(indices(schedule, Drop)))
        for before, action in pairwise(schedule.actions):  # a state goes with its last load
            assert not isinstance(action, Drop) or before == Load(action.index)


@pytest.mark.parametrize(("n", "every"), [(1, 1), (7, 1), (7, 3), (64, 3), (7, 100)])
def test_every_stage_of_an_offloaded_chain_is_reversed(n, every):
    for slots in (None, 1, 2):
        schedule = offloaded(n, "/scratch", every=every, slots=slots)
        simulation = simulate(schedule)
        assert all(a.to == "/scratch" for a in schedule.actions if isinstance(a, Offload))
        assert simulation.peak_offloaded_bytes == (n - 1) // every
        if slots is None:
            assert simulation.num_forwards == 2 * n - min(n, every)
            assert simulation.peak_tapes == min(n, every)
            continue
        # A segment is run once, and reversed as a chain of its own.
        whole, rest = divmod(n, every)
        alone = [every] * whole + [rest] * bool(rest)
        forwards = sum(simulate(binomial(each, slots)).num_forwards for each in alone)
        assert simulation.num_forwards == forwards + n - min(n, every)
        assert simulation.peak_states <= slots


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
    schedule = binomial(30, 3)  # A long one breaks its lines.
    assert max(map(len, str(schedule).splitlines())) <= 100
    _, printed = " ".join(str(schedule).split()).split("sweep: ")
    assert printed.replace(" backward: ", ", ") == ", ".join(map(str, schedule.actions))


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


@pytest.mark.parametrize(
    ("schedule", "num_groups"),
    [
        (linear(5), 5),
        # A group holds its input, so it begins with a kept state.
        (sqrt(3), 2),
        (Schedule(3, (Offload(0), *sqrt(3).actions[1:])), 3),
        # Neighbours that are treated apart are no group.
        (Schedule(2, (Tape(0), Tape(1, variant=1), Reverse(1), Reverse(0))), 2),
    ],
    ids=str,
)
def test_which_stages_are_a_group(schedule, num_groups):
    assert len(groups_of(schedule)) == num_groups
