"""Schedules as data: what each costs by `simulate`, what its family promises, what is refused."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise, product
from math import comb

import pytest

from recoup import schedules as sch
from recoup.errors import ScheduleError
from recoup.schedules import actions
from recoup.schedules.actions import Advance, Drop, Invert, Keep, Load, Offload, Reverse, Tape
from recoup.schedules.memory import schedule_for

SWEEP = Keep(0), Advance(0, 2), Tape(2), Reverse(2)
LAST = Load(0), Drop(0), Tape(0), Reverse(0)
SEGMENT = sch.Schedule(3, (*SWEEP, *LAST[:3], Tape(1), Reverse(1), Reverse(0)))
STEP_BACK = sch.Schedule(3, (*SWEEP, Load(0), Advance(0, 1), Tape(1), Reverse(1), *LAST))
AGAIN = sch.Schedule(2, (Keep(0), Advance(0, 1), Tape(1), Reverse(1), *LAST))
AWAY = sch.Schedule(2, (Offload(0), *AGAIN.actions[1:]))
WIDE = sch.Schedule(2, (*SWEEP[:2], Keep(2), Drop(0), *sch.constant(2).actions[2:]))
KEPT_TWICE = sch.Schedule(1, (Keep(0), Tape(0), Reverse(0)))


def test_simulate_counts_bytes_of_each_state_and_tape():
    states, tapes = [1, 20, 300, 4000], [10_000, 200_000, 3_000_000]
    found = sch.simulate(SEGMENT, states, tapes)
    assert (found.num_forwards, found.num_inverses, found.forwards_per_stage) == (5, 0, (2, 2, 1))
    assert (found.peak_states, found.peak_tapes) == (1, 2)
    assert found.peak_bytes == 1 + 3_000_000 + 4000  # x_0, the last tape, the output
    # Without its last stage's weight: both other tapes, and their segment's output.
    assert sch.simulate(SEGMENT, [1, 20, 300, 0], [100, 1000, 500]).peak_bytes == 100 + 1000 + 300
    # The widest state on the way.
    assert sch.simulate(WIDE, [1, 50, 2], [5, 2]).peak_bytes == 1 + 50
    # A state that is kept and the input of a tape counts once.
    mixed = sch.constant(["invert", "keep"])
    assert sch.simulate(mixed, [1, 10, 100], [7, 1000]).peak_bytes == 1100
    found = sch.simulate(KEPT_TWICE, [10, 0], 10)
    assert (found.peak_bytes, found.peak_states) == (10, 1)
    assert sch.simulate(STEP_BACK).forwards_per_stage == (3, 2, 1)


stage = partial(sch.Cost, 1.0, 10, 100)


ENDS = sch.SelectiveTape(100, 0.0, 500, 0, 50)  # a run whose output is not needed ends with it


@pytest.mark.parametrize(("schedule", "more", "peak"), [
    (sch.linear(2), {"run_bytes": 500}, 200), (AGAIN, {"run_bytes": 500}, 510),
    (sch.linear(2), {"tape_run_bytes": 500}, 610), (sch.linear(2), {"reverse_bytes": 500}, 700),
    (sch.linear(2), {"between_bytes": 7}, 214), (sch.linear(2), {"cached_bytes": 300}, 200),
    (AGAIN, {"cached_bytes": 300}, 410), (sch.linear(2), {"left_bytes": 300}, 600),
    (sch.linear(2), {"left_bytes": -50}, 200), (AGAIN, {"again": ENDS}, 110),
    (SEGMENT, {"again": ENDS}, 510),
])  # fmt: skip
def test_simulate_counts_the_worst_moment(schedule, more, peak):
    costs = [stage(**more)] * schedule.num_stages
    assert sch.simulate(schedule, costs=costs).peak_bytes == peak


def test_simulate_counts_seconds_and_host_memory():
    costs = [stage(offload_seconds=0.25), stage(variants=(sch.SelectiveTape(30, 0.5),))]
    found = sch.simulate(AWAY, costs=costs)
    assert (found.seconds, found.peak_offloaded_bytes) == (3.25, 10)
    assert (found.peak_states, found.peak_bytes) == (0, 110)
    thin = sch.Schedule(2, (Tape(0), Tape(1, 1), Reverse(1), Reverse(0)))
    found = sch.simulate(thin, costs=costs)
    assert (found.seconds, found.peak_bytes, found.num_forwards) == (2.5, 130, 3)
    found = sch.simulate(sch.constant(1), costs=[stage(is_invertible=True, invert_seconds=2.0)])
    assert (found.seconds, found.peak_bytes) == (3.0, 100)
    # An inverse is no forward.
    assert (found.num_forwards, found.num_inverses, found.forwards_per_stage) == (1, 1, (1,))


@pytest.mark.parametrize("make", [sch.linear, sch.sqrt, sch.log, sch.constant])
def test_a_trace_has_the_peak_and_the_runs_of_its_schedule(make):
    schedule = make(6)
    costs = [sch.Cost(1.0, 1, 3, run_bytes=2, reverse_bytes=1, is_invertible=True)] * 6
    simulation, moments = sch.simulate(schedule, costs=costs), sch.trace(schedule, costs)
    assert max(moment.peak_bytes for moment in moments) == simulation.peak_bytes
    assert moments[-1].held_bytes <= 1  # the chain's input, which an inverse has made
    # The backward of a stage takes twice its forward.
    assert moments[-1].seconds == simulation.seconds + 2 * 6
    assert sum(isinstance(m.action, Advance | Tape) for m in moments) == simulation.num_forwards


BAD = [
    ([Advance(0, 1), Keep(2)], "needs the working state x_2, and the working state is x_1"),
    ([Advance(0, 1)] * 2, r"action 1, Advance\(.*\): it needs the working state x_0"),
    ([Keep(0), Keep(0)], "x_0 is kept already"),
    ([Tape(0), Tape(1), Load(0)], "it needs x_0 kept, and it is not"),
    ([Keep(0), Load(0)], "it belongs to backward, but the sweep has not reached x_2"),
    ([Tape(0), Reverse(0)], r"action 1, Reverse\(index=0\): it belongs to backward"),
    ([Tape(0), Tape(1), Reverse(0)], "the next stage to reverse is 1"),
    ([Advance(0, 2), Reverse(1)], "it needs a tape of stage 1"),
    ([Advance(0, 2), Invert(1)], "keep x_2 in the sweep and load it first"),
    ([Keep(0), Advance(0, 1), Keep(1), Tape(1), Load(1), Tape(1)], "stage 1 is taped already"),
    ([Tape(0), Keep(1), Tape(1), Reverse(1), Load(1), Tape(1)], "stage 1 is reversed already"),
    ([Keep(-1)], "of 2 stages has no such stage or state"),
    ([Advance(0, 0)], "chain of 2 stages has no such"),
    ([Tape(0), "tape 1"], "action 1, 'tape 1': it is no action of recoup.schedules"),
    ([Keep(0), Advance(0, 1.5)], r"action 1, .*stop=1\.5.*no such stage"),
    ([Tape(0, "whole"), Tape(1)], "action 0, .*stage 0 has 0 variants"),
    ([Tape(0)], "incomplete: the sweep ends before x_2"),
    ([Tape(0), Tape(1), Reverse(1)], "incomplete: it never reverses stage 0"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_simulate_refuses_what_cannot_be_executed(bad, message):
    schedule = sch.Schedule(2, tuple(bad), name="bad")
    for call in (sch.simulate, lambda schedule: schedule_for(schedule, 2)):
        with pytest.raises(ScheduleError, match=message):
            call(schedule)


def test_the_output_is_kept_at_once_or_never():
    sweep, end = (Keep(0), Advance(0, 1)), (Load(1), Invert(0), Reverse(0))
    sch.simulate(sch.Schedule(1, (*sweep, Keep(1), Drop(0), *end)))
    with pytest.raises(ScheduleError, match="the working state is gone where backward begins"):
        sch.simulate(sch.Schedule(1, (*sweep, Drop(0), Keep(1), *end)))


TWICE = Keep(0), Advance(0, 3), Tape(3), Reverse(3), Load(0), Advance(0, 2), Tape(2)
INVERTIBLE = stage(is_invertible=True)
UNLINKED = stage(is_invertible=True, is_linked=False)
THIN_AGAIN = sch.Schedule(2, (*AGAIN.actions[:-2], Tape(0, 1), Reverse(0)))
THIN = stage(variants=(sch.SelectiveTape(10, 0.0),))


@pytest.mark.parametrize(("schedule", "costs", "message"), [
    (STEP_BACK, (stage(), UNLINKED, stage()), "x_1, which running stage 0 again"),
    (SEGMENT, (stage(), UNLINKED, stage()), "x_1, which running stage 0 again"),
    (SEGMENT, (stage(is_fixed=True), stage(), stage()), "stage 0 is fixed"),
    (sch.Schedule(4, TWICE), (stage(), UNLINKED, stage(), stage()), "stage 0 again does not"),
    (sch.constant(1), [stage()], "stage 0 is not invertible"),
    (sch.constant(2), [INVERTIBLE, UNLINKED], "x_1 is not what stage 0 returned"),
    (AWAY, [stage()] * 2, "x_0 cannot be offloaded"),
    (sch.Schedule(1, (Tape(0, 1), Reverse(0))), [stage()], "stage 0 has 0 variants"),
    (THIN_AGAIN, [THIN, stage()], "only a tape of the sweep"),
])  # fmt: skip
def test_simulate_refuses_what_the_costs_rule_out(schedule, costs, message):
    with pytest.raises(ScheduleError, match=message):
        sch.simulate(schedule, costs=costs)


REFUSED = [
    (lambda: sch.constant(["invert", "offload"]), r"`ways\[1\]` is 'offload', but must be one of"),
    (lambda: sch.simulate(sch.linear(2), [1, 1], 1), "`state_bytes` has 2 numbers, .* needs 3"),
    (lambda: sch.simulate(sch.linear(2), 1, [1, 1, 1]), "`tape_bytes` has 3 numbers, .* needs 2"),
    (lambda: sch.simulate(sch.linear(2), in_flight_bytes=-1), "`in_flight_bytes` is -1"),
    *((partial(call, sch.linear(2), costs=[stage()]), "`costs` has 1 numbers, .* needs 2")
      for call in (sch.simulate, sch.trace)),
    (lambda: sch.trace(sch.linear(2), [stage()] * 2, first=-1), "`first` is -1"),
    (lambda: sch.Cost(float("nan"), 1, 1), "`seconds` is nan"),
    (lambda: sch.Cost(1.0, -1, 1), "`state_bytes` is -1"),
    (lambda: sch.Cost(1.0, 2, 1), r"`tape_bytes` is 1, .* `state_bytes` \(2\)"),
    (lambda: stage(offload_seconds=-1.0), "`offload_seconds` is -1"),
    (lambda: stage(variants=(sch.SelectiveTape(9, 0.0),)), r"`variants\[0\].tape_bytes` is 9"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_only_these_arguments_have_wrong_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def indices(schedule, kind):
    return [action.index for action in schedule.actions if isinstance(action, kind)]


def test_linear_runs_each_stage_once():
    assert sch.linear(7).actions == (*map(Tape, range(7)), *map(Reverse, reversed(range(7))))
    simulation = sch.simulate(sch.linear(7))
    assert (simulation.peak_bytes, simulation.peak_states, simulation.peak_tapes) == (8, 0, 7)


@cache
def least_advances(n: int, slots: int) -> int:
    if n == 1:
        return 0
    if slots == 1:
        return n * (n - 1) // 2
    least = least_advances
    return min(k + least(n - k, slots - 1) + least(k, slots) for k in range(1, n))


def check_binomial_and_revolve(n, slots, num_forwards):
    assert sch.num_advances(n, slots) == num_forwards - 1
    schedule = sch.binomial(n, slots)
    simulation = sch.simulate(schedule)
    assert simulation.num_forwards == num_forwards
    assert simulation.peak_states <= slots
    assert simulation.peak_tapes <= slots + 1
    assert simulation.peak_bytes <= 2 * slots + 2
    assert sorted(indices(schedule, Keep)) == sorted(indices(schedule, Drop))
    assert slots < n - 1 or schedule.actions == sch.linear(n).actions
    simulation = sch.simulate(sch.revolve(n, slots))
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
        assert sch.num_sweeps(sch.beta(slots, sweeps), slots) == sweeps
        assert sch.num_sweeps(sch.beta(slots, sweeps) + 1, slots) == sweeps + 1
    assert sch.beta(3, -1) == 0
    # Half a million stage runs, but one pass for each tape.
    assert len(sch.binomial(1000, 1).actions) < 4 * 1000


def test_log_is_binomial_with_as_many_slots_as_runs():
    for n in (1, 2, 3, 6, 7, 20, 21, 70, 252, 253):
        slots = next(c for c in range(1, n + 1) if comb(2 * c, c) >= n)
        assert sch.log(n).actions == sch.binomial(n, slots).actions
        assert max(sch.simulate(sch.log(n)).forwards_per_stage) <= slots


@pytest.mark.parametrize("n", [*range(1, 12), 29, 100])
def test_sqrt_is_triangular(n):
    longest = next(k for k in range(1, n + 1) if k * (k + 1) // 2 >= n)
    simulation = sch.simulate(sch.sqrt(n))
    last = simulation.forwards_per_stage.index(1)
    lengths = [stop - start for start, stop in pairwise([*indices(sch.sqrt(n), Keep), last, n])]
    assert sum(lengths) == n
    assert simulation.peak_bytes <= longest + 1
    assert simulation.num_forwards == 2 * n - lengths[-1]
    assert max(simulation.forwards_per_stage) <= 2
    # A last segment that is one longer would not fit below the same peak.
    assert lengths[-1] == longest - len(lengths) + 1 or len(lengths) == 1
    assert lengths == {8: [3, 3, 2], 9: [4, 3, 2], 10: [4, 3, 2, 1]}.get(n, lengths)


def test_constant_holds_the_same_at_every_depth_and_executes_every_mixture():
    for n in (1, 64, 1000):
        found = sch.simulate(sch.constant(n))
        assert (found.num_forwards, found.num_inverses) == (n, n)
        assert (found.peak_bytes, found.peak_states, found.peak_tapes) == (1, 1, 1)
    assert sch.constant(["invert", "recompute", "keep", "invert"]).actions == (
        *(Advance(0, 1), Keep(1), Advance(1, 2), Tape(2), Advance(3, 4), Keep(4)),
        *(Load(4), Drop(4), Invert(3), Reverse(3)),
        Reverse(2),
        *(Load(1), Tape(1), Reverse(1)),
        *(Load(1), Drop(1), Invert(0), Reverse(0)),
    )
    for ways in product(["invert", "recompute", "keep"], repeat=4):
        schedule = sch.constant(ways)
        simulation = sch.simulate(schedule)
        runs = tuple(2 if way == "recompute" else 1 for way in ways)
        assert simulation.forwards_per_stage == runs
        assert simulation.num_inverses == ways.count("invert")
        assert sorted(indices(schedule, Keep)) == sorted(set(indices(schedule, Drop)))
        for before, action in pairwise(schedule.actions):  # a state goes with its last load
            assert not isinstance(action, Drop) or before == Load(action.index)


@pytest.mark.parametrize(("n", "every"), [(1, 1), (7, 1), (7, 3), (64, 3), (7, 100)])
def test_every_stage_of_an_offloaded_chain_is_reversed(n, every):
    for in_flight, peak in ((0, 2), (2, 4), (1000, 2 + 63)):
        assert sch.simulate(sch.offloaded(64), in_flight_bytes=in_flight).peak_bytes == peak
    for slots in (None, 1, 2):
        schedule = sch.offloaded(n, "/scratch", every=every, slots=slots)
        simulation = sch.simulate(schedule)
        assert all(a.to == "/scratch" for a in schedule.actions if isinstance(a, Offload))
        assert simulation.peak_offloaded_bytes == (n - 1) // every
        if slots is None:
            assert simulation.num_forwards == 2 * n - min(n, every)
            assert simulation.peak_tapes == min(n, every)
            continue
        # A segment is run once, and reversed as a chain of its own.
        whole, rest = divmod(n, every)
        alone = [every] * whole + [rest] * bool(rest)
        forwards = sum(sch.simulate(sch.binomial(each, slots)).num_forwards for each in alone)
        assert simulation.num_forwards == forwards + n - min(n, every)
        assert simulation.peak_states <= slots


SCHEDULES = [
    *(make(n) for make in (sch.sqrt, sch.log, sch.linear) for n in (1, 3, 31)),
    *(
        make(n, slots)
        for make in (sch.revolve, sch.binomial)
        for n, slots in ((7, 1), (20, 3), (7, 30))
    ),
    sch.constant(4),
    sch.constant(["keep", "recompute", "recompute", "keep", "recompute"]),
    sch.constant(["recompute", "invert", "invert", "recompute"]),
    sch.optimal([sch.Cost(1.0, 1, 1 + 3 * (i % 3)) for i in range(12)], 22),
]


def test_a_schedule_prints_its_sweep_and_its_backward():
    assert str(sch.constant(2)) == (
        "constant, 2 stages\n"
        "sweep: run 0 to 1, keep x_2\n"
        "backward: load x_2, drop x_2, invert 1, reverse 1, invert 0, reverse 0"
    )
    actions = (Offload(0), Advance(0, 1), Tape(1, 2), Reverse(1), Load(0), Tape(0), Reverse(0))
    assert str(sch.Schedule(2, actions)) == (
        "schedule, 2 stages\n"
        "sweep: offload x_0, run 0, tape 1 (variant 2)\n"
        "backward: reverse 1, load x_0, tape 0, reverse 0"
    )
    assert str(sch.linear(1)) == "linear, 1 stage\nsweep: tape 0\nbackward: reverse 0"
    schedule = sch.binomial(30, 3)  # A long one breaks its lines.
    assert max(map(len, str(schedule).splitlines())) <= 100
    _, printed = " ".join(str(schedule).split()).split("sweep: ")
    assert printed.replace(" backward: ", ", ") == ", ".join(map(str, schedule.actions))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.num_stages}")
def test_a_sweep_ends_at_the_last_state_and_groups_of_stages_run_as_often_as_each(schedule):
    assert not any(isinstance(a, Reverse) for a in schedule.actions[: schedule.sweep_end])
    assert isinstance(schedule.actions[schedule.sweep_end], Load | Reverse)
    groups = actions.groups_of(schedule)
    assert [stage for group in groups for stage in group] == [*range(schedule.num_stages)]
    of_groups = sch.simulate(actions.on_groups(schedule, groups)).forwards_per_stage
    found = [num for num, group in zip(of_groups, groups, strict=True) for _ in group]
    assert found == [*sch.simulate(schedule).forwards_per_stage]
    # No state within a group is kept.
    within = {stage for group in groups for stage in group[1:]}
    assert within.isdisjoint(a.index for a in schedule.actions if isinstance(a, Keep | Load))
    # A group holds its input, so it begins with a kept state.
    away = sch.Schedule(3, (Offload(0), *sch.sqrt(3).actions[1:]))
    found = [len(actions.groups_of(each)) for each in (sch.linear(5), sch.sqrt(3), away)]
    assert found == [5, 2, 3]
