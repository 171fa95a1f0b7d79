from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.errors import ScheduleError
from recoup.schedules import Cost, Thin, frontier, optimal, simulate
from tests.unit.schedules.exhaustive import every_simulation

SIZES = st.integers(0, 6)
TIMES = st.integers(0, 4).map(float)


@st.composite
def thins(draw, state):
    return Thin(state + draw(SIZES), draw(TIMES), draw(SIZES), draw(SIZES))


@st.composite
def costs(draw, *, with_choices=True, with_moments=True):
    state = draw(SIZES)
    sizes = [draw(SIZES) for _ in range(4)] if with_moments else [0] * 4
    left = draw(st.integers(-4, 4)) if with_moments else 0
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
        assert simulate(optimal(chain, point.peak_bytes), costs=chain).seconds == point.seconds
    for before, after in zip(points, points[1:], strict=False):
        assert before.peak_bytes < after.peak_bytes
        assert before.seconds > after.seconds
        assert before.num_forwards >= after.num_forwards


@settings(max_examples=60, deadline=None)
@given(st.lists(costs(with_choices=False), min_size=1, max_size=5))
def test_moments_equal_exhaustive_search(chain):
    check_all_budgets(chain)


@settings(max_examples=100, deadline=None)
@given(st.lists(costs(), min_size=1, max_size=4))
def test_choices_equal_exhaustive_search(chain):
    check_all_budgets(chain)
