"""The fastest schedules under budgets: by exhaustive search, known curves, and on long chains."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup import schedules as sch
from recoup.errors import ScheduleError
from recoup.schedules.actions import Advance, Drop, Invert, Keep, Load, Offload, Reverse, Tape
from recoup.schedules.search import fastest


def every_simulation(costs):
    found = []
    for actions in _sweep(costs, 0, returns=False):
        with suppress(ScheduleError):
            found.append(sch.simulate(sch.Schedule(len(costs), actions), costs=costs))
    return found


def _sweep(costs, start, *, returns):
    # With `returns`, x_start is the working state again in the end, for an inverse to begin at.
    back = (Load(start), Drop(start)) if returns else ()
    if start == len(costs):
        yield (Keep(start), *back) if returns else ()
        return
    cost = costs[start]
    keep = (Keep(start),) if returns else ()
    for rest in _sweep(costs, start + 1, returns=False):
        for variant in range(len(cost.variants) + 1):
            yield (*keep, Tape(start, variant), *rest, Reverse(start), *back)
    if cost.is_invertible:
        for rest in _sweep(costs, start + 1, returns=True):
            yield (Advance(start, start + 1), *rest, Invert(start), Reverse(start))
    for split in range(start + 1, len(costs)):
        stages = range(start, split)
        load = (Load(start),) if returns else (Load(start), Drop(start))
        tapes = (*map(Tape, stages), *map(Reverse, reversed(stages)))
        after = costs[split]
        holds = after.is_linked and not after.is_invertible and after.offload_seconds is None
        for numbers in product(*(range(len(costs[index].results) + 1) for index in stages)):
            kept = [costs[k].kept(number) for k, number in zip(stages, numbers, strict=True)]
            if any(each.holds_output for each in (kept if not holds else kept[:-1])):
                continue
            runs = [Advance(index, index + 1, numbers[index - start]) for index in stages]
            for later in _sweep(costs, split, returns=False) if any(numbers) else ():
                yield (Keep(start), *runs, *later, *load, *tapes, *back)
        for later in _sweep(costs, split, returns=False):
            for earlier in _again(costs, start, split, kept=True, stays=returns):
                yield (Keep(start), Advance(start, split), *later, Load(start), *earlier, *back)
            if cost.offload_seconds is None:
                continue
            away = (Offload(start), Advance(start, split), *later, Load(start), Drop(start), *keep)
            for earlier in _again(costs, start, split, kept=returns, stays=returns):
                yield (*away, *earlier, *back)


def _again(costs, start, stop, *, kept, stays):
    drop = (Drop(start),) if kept else ()
    keep = () if kept else (Keep(start),)
    rests = _again(costs, start + 1, stop, kept=False, stays=False) if start + 1 < stop else ((),)
    for rest in rests:
        yield (*(() if stays else drop), Tape(start), *rest, Reverse(start))
    for split in range(start + 1, stop):
        for later in _again(costs, split, stop, kept=False, stays=False):
            for earlier in _again(costs, start, split, kept=True, stays=stays):
                yield (*keep, Advance(start, split), *later, Load(start), *earlier)
            if costs[start].offload_seconds is None:
                continue
            back = (Keep(start),) if stays else ()
            away = (Offload(start), Advance(start, split), *later, Load(start), Drop(start), *back)
            for earlier in _again(costs, start, split, kept=stays, stays=stays):
                yield (*drop, *away, *earlier)


SIZES = st.integers(0, 6)
TIMES = st.integers(0, 4).map(float)


@st.composite
def thins(draw, state):
    stopped = draw(st.none() | SIZES)
    whole = (stopped or 0) + draw(SIZES)
    return sch.SelectiveTape(state + draw(SIZES), draw(TIMES), whole, draw(SIZES), stopped)


@st.composite
def results(draw):
    taped = draw(SIZES)
    return sch.Results(taped + draw(SIZES), draw(TIMES), taped, draw(st.booleans()))


@st.composite
def costs_with_moments(draw):
    names = "run_bytes", "tape_run_bytes", "reverse_bytes", "between_bytes"
    moments = {name: draw(SIZES) for name in names} | {"left_bytes": draw(st.integers(-4, 12))}
    state = draw(SIZES)
    return sch.Cost(draw(TIMES), state, state + draw(SIZES), **moments)


@st.composite
def costs_with_choices(draw):
    plain = draw(costs_with_moments())
    state = plain.state_bytes
    return replace(
        plain,
        is_linked=draw(st.sampled_from([True, True, True, False])),
        is_fixed=draw(st.sampled_from([False, False, False, True])),
        is_invertible=draw(st.booleans()),
        invert_seconds=draw(TIMES),
        offload_seconds=draw(st.none() | TIMES),
        variants=tuple(draw(st.lists(thins(state), max_size=1))),
        results=tuple(draw(st.lists(results(), max_size=1))),
        between_run_bytes=draw(SIZES),
        again=draw(st.none() | thins(state)),
        invert_bytes=draw(st.none() | SIZES),
    )


WITH_MOMENTS = st.lists(costs_with_moments(), min_size=1, max_size=5)
WITH_CHOICES = st.lists(costs_with_choices(), min_size=1, max_size=4)


@settings(max_examples=80)
@given(WITH_MOMENTS | WITH_CHOICES)
def test_the_frontier_is_that_of_exhaustive_search(chain):
    found = every_simulation(chain)
    least, most = (f([s.peak_bytes for s in found]) for f in (min, max))
    points = sch.frontier(chain)
    assert points[0].peak_bytes == least
    assert points[-1].seconds == min(s.seconds for s in found)
    for budget in range(least - 1, most + 2):
        if budget < least:
            with pytest.raises(ScheduleError, match=f"needs at least {least} bytes"):
                sch.optimal(chain, budget)
            continue
        simulation = sch.simulate(sch.optimal(chain, budget), costs=chain)
        assert simulation.peak_bytes <= budget
        assert simulation.seconds == min(s.seconds for s in found if s.peak_bytes <= budget)
    for point in points:
        simulation = sch.simulate(point.schedule, costs=chain)
        for name in ("peak_bytes", "seconds", "num_forwards", "num_inverses"):
            assert getattr(simulation, name) == getattr(point, name)
        assert (
            sch.simulate(sch.optimal(chain, point.peak_bytes), costs=chain).seconds == point.seconds
        )
    for before, after in pairwise(points):
        assert before.peak_bytes < after.peak_bytes
        assert before.seconds > after.seconds
    # What the sweep caches counts for all stages in the search, and in a schedule for those run
    # again alone.
    cached = tuple(replace(cost, cached_bytes=cost.state_bytes) for cost in chain)
    for candidate in fastest(cached):
        assert sch.simulate(candidate.build(), costs=cached).peak_bytes <= candidate.peak_bytes


def test_an_output_is_held_where_the_stage_after_keeps_it():
    holding = sch.Results(num_bytes=1, seconds=0.25, holds_output=True)
    stage = sch.Cost(1.0, 10, 50, results=(holding,), lent_bytes=10)
    last = sch.Cost(1.0, 10, 10, reverse_bytes=90, is_fixed=True, lent_bytes=10)
    (held,) = [p for p in sch.frontier([stage, last]) if p.seconds == 2.25]
    assert Advance(0, 1, 1) in held.schedule.actions
    lends = sch.simulate(held.schedule, costs=[stage, last]).peak_bytes
    kept_alone = replace(holding, holds_output=False)
    alone = [replace(stage, results=(kept_alone,)), last]
    assert sch.simulate(held.schedule, costs=alone).peak_bytes == lends - 10
    for after in (replace(last, is_linked=False), replace(last, offload_seconds=0.5)):
        assert all(p.seconds != 2.25 for p in sch.frontier([stage, after]))
    # Nor within a segment, whose states are not kept.
    for point in sch.frontier([stage, replace(stage, state_bytes=30), last]):
        sweep = point.schedule.actions[: point.schedule.sweep_end]
        if Advance(0, 1, 1) in sweep:
            assert Keep(1) in sweep or Tape(1) in sweep


def test_optimal_is_as_good_as_the_known_curve():  # of 32 stages, a tape being 4 states
    costs = [sch.Cost(1.0, 1, 4)] * 32
    for budget, most in {129: 1.0, 98: 1.25, 66: 1.5, 24: 1.9, 18: 2.0, 13: 2.5, 11: 3.0}.items():
        simulation = sch.simulate(sch.optimal(costs, budget), costs=costs)
        assert simulation.num_forwards <= most * 32
        assert simulation.peak_bytes <= budget


def test_budgets_are_kept_and_solutions_that_are_left_out_cost_little(monkeypatch):
    draw = random.Random(0)
    states, seconds = [draw.randint(1, 10**7) for _ in range(24)], {8: [], 16: [], 500: []}
    costs = [sch.Cost(draw.random(), state, state + draw.randint(0, 9 * 10**7)) for state in states]
    most = sch.simulate(sch.linear(24), costs=costs).peak_bytes
    with pytest.raises(ScheduleError, match=r"needs at least \d+ bytes") as raised:
        sch.optimal(costs, -1)
    least = int(str(raised.value).split()[-2])
    assert most > 8 * least
    for num_solutions, found in seconds.items():
        monkeypatch.setattr("recoup.schedules.search._NUM_SOLUTIONS", num_solutions)
        monkeypatch.setattr("recoup.schedules.search._NUM_MORE", 0)
        fastest.cache_clear()
        for budget in [least, *(least + (most - least) * n**2 // 100 for n in range(1, 10))]:
            simulation = sch.simulate(sch.optimal(costs, budget), costs=costs)
            assert simulation.peak_bytes <= budget
            found.append(simulation.seconds)
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(seconds[8]))
    assert all(few <= 1.03 * many for few, many in zip(seconds[16], seconds[500], strict=True))
    assert seconds[16] != seconds[500]
    assert sch.optimal(costs, most).actions == sch.linear(24).actions
