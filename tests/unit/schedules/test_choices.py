from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.errors import ScheduleError
from recoup.schedules import (
    Advance,
    Cost,
    Invert,
    Keep,
    Offload,
    Results,
    SelectiveTape,
    Tape,
    frontier,
    optimal,
    simulate,
)
from recoup.schedules.search import fastest
from tests.unit.schedules.exhaustive import every_simulation

SIZES = st.integers(0, 6)
TIMES = st.integers(0, 4).map(float)


@st.composite
def thins(draw, state):
    return SelectiveTape(state + draw(SIZES), draw(TIMES), draw(SIZES), draw(SIZES))


@st.composite
def results(draw):
    taped = draw(SIZES)
    return Results(taped + draw(SIZES), draw(TIMES), taped, draw(st.booleans()))


@st.composite
def costs(draw, *, with_choices=True, with_moments=True):
    state = draw(SIZES)
    sizes = [draw(SIZES) for _ in range(4)] if with_moments else [0] * 4
    left = draw(st.integers(-4, 12)) if with_moments else 0
    if not with_choices:
        return Cost(draw(TIMES), state, state + draw(SIZES), *sizes[:3], left, sizes[3])
    return Cost(
        *(draw(TIMES), state, state + draw(SIZES), *sizes[:3], left, sizes[3]),
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


def check_all_budgets(chain):
    found = every_simulation(chain)
    least, most = (f([s.peak_bytes for s in found]) for f in (min, max))
    points = frontier(chain)
    assert points[0].peak_bytes == least
    assert points[-1].seconds == min(s.seconds for s in found)
    for budget in range(least - 1, most + 2):
        if budget < least:
            with pytest.raises(ScheduleError, match=f"needs at least {least} bytes"):
                optimal(chain, budget)
            continue
        simulation = simulate(optimal(chain, budget), costs=chain)
        assert simulation.peak_bytes <= budget
        assert simulation.seconds == min(s.seconds for s in found if s.peak_bytes <= budget)
    for point in points:
        simulation = simulate(point.schedule, costs=chain)
        assert simulation.peak_bytes == point.peak_bytes
        assert simulation.seconds == point.seconds
        assert simulation.num_forwards == point.num_forwards
        assert simulation.num_inverses == point.num_inverses
        assert simulate(optimal(chain, point.peak_bytes), costs=chain).seconds == point.seconds
    for before, after in pairwise(points):
        assert before.peak_bytes < after.peak_bytes
        assert before.seconds > after.seconds
        assert before.num_runs >= after.num_runs


@settings(max_examples=60, deadline=None)
@given(st.lists(costs(with_choices=False), min_size=1, max_size=5))
def test_moments_equal_exhaustive_search(chain):
    check_all_budgets(chain)


@settings(max_examples=100, deadline=None)
@given(st.lists(costs(), min_size=1, max_size=4))
def test_choices_equal_exhaustive_search(chain):
    check_all_budgets(chain)


def test_an_output_is_held_where_the_stage_after_keeps_it():
    """Only then does it cost nothing, but for what it holds while that stage is reversed."""
    holding = Results(num_bytes=1, seconds=0.25, holds_output=True)
    stage = Cost(1.0, 10, 50, results=(holding,), lent_bytes=10)
    last = Cost(1.0, 10, 10, reverse_bytes=90, is_fixed=True, lent_bytes=10)
    (held,) = [p for p in frontier([stage, last]) if p.seconds == 2.25]
    assert Advance(0, 1, 1) in held.schedule.actions
    lends = simulate(held.schedule, costs=[stage, last]).peak_bytes
    kept_alone = replace(holding, holds_output=False)
    alone = [replace(stage, results=(kept_alone,)), last]
    assert simulate(held.schedule, costs=alone).peak_bytes == lends - 10
    for after in (replace(last, is_linked=False), replace(last, offload_seconds=0.5)):
        assert all(p.seconds != 2.25 for p in frontier([stage, after]))
    # Nor within a segment, whose states are not kept.
    for point in frontier([stage, replace(stage, state_bytes=30), last]):
        sweep = point.schedule.actions[: point.schedule.sweep_end]
        if Advance(0, 1, 1) in sweep:
            assert Keep(1) in sweep or Tape(1) in sweep


def test_what_an_inverse_gives_back_is_counted_beside_the_gradients():
    stage = Cost(1.0, 5, 50, left_bytes=120, is_invertible=True, invert_seconds=0.5)
    check_all_budgets([stage, Cost(1.0, 1, 1, tape_run_bytes=100, is_fixed=True)])


def various(num_stages, seed):
    draw = random.Random(seed)
    chain = []
    for _ in range(num_stages):
        state, more = draw.randint(1, 10**6), draw.randint(0, 10**7)
        thin = SelectiveTape(state + more // 3, 0.1, more, more // 2)
        kept = [
            Results(more // part, 0.02 * part, more // (2 * part), part == 3) for part in (2, 3, 4)
        ]
        chain.append(
            Cost(
                *(draw.random(), state, state + more, state, 2 * more, more // 2),
                left_bytes=draw.randint(-(10**5), 10**6),
                between_bytes=draw.choice([0, 0, 10**5]),
                is_linked=draw.random() < 0.9,
                is_fixed=draw.random() < 0.05,
                is_invertible=draw.random() < 0.2,
                invert_seconds=draw.random(),
                offload_seconds=draw.choice([None, 1.0]),
                variants=draw.choice([(), (thin,)]),
                results=tuple(draw.sample(kept, draw.randint(0, 3))),
                again=thin if len(chain) % 3 == 0 else None,
            )
        )
    return chain


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_stages", [20, 40, 80, 150])
def test_every_schedule_holds_what_was_counted(num_stages):
    chain = various(num_stages, seed=num_stages)
    for candidate in fastest(tuple(chain)):
        simulation = simulate(candidate.build(), costs=chain)
        assert simulation.peak_bytes == candidate.peak_bytes
        assert simulation.seconds == pytest.approx(candidate.seconds, rel=1e-9)
    actions = [action for point in frontier(chain) for action in point.schedule.actions]
    assert {Tape, Invert, Offload} <= set(map(type, actions))
    assert any(isinstance(action, Advance) and action.results for action in actions)


def test_a_frontier_is_the_same_every_time():
    chain = various(30, seed=0)
    once = frontier(chain)
    fastest.cache_clear()
    assert frontier(chain) == once


def test_a_frontier_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"`costs` is empty"):
        frontier([])
