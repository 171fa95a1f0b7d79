from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.errors import ScheduleError
from recoup.schedules import (
    Cost,
    Schedule,
    Simulation,
    linear,
    optimal,
    simulate,
)
from tests.unit.schedules.oracles import persistent_schedules


def simulated(schedule: Schedule, costs: Sequence[Cost]) -> Simulation:
    states = [cost.state_bytes for cost in costs]
    return simulate(schedule, [*states, 0], [cost.tape_bytes for cost in costs])


def seconds(schedule: Schedule, costs: Sequence[Cost]) -> float:
    runs = simulate(schedule).forwards_per_stage
    return sum(run * cost.seconds for run, cost in zip(runs, costs, strict=True))


def least_bytes(costs: Sequence[Cost]) -> int:
    with pytest.raises(ScheduleError, match=r"needs at least \d+ bytes") as raised:
        optimal(costs, -1)
    return int(str(raised.value).split()[-2])


def various(num_stages: int, seed: int, most: int = 10**7) -> list[Cost]:
    draw = random.Random(seed)
    states = [draw.randint(1, most) for _ in range(num_stages)]
    return [Cost(draw.random(), state, state + draw.randint(0, 9 * most)) for state in states]


@st.composite
def small_costs(draw):
    integers = st.integers(0, 6)
    rows = draw(st.lists(st.tuples(integers, integers, integers), min_size=1, max_size=5))
    return [Cost(float(time), state, state + more) for time, state, more in rows]


@settings(max_examples=40, deadline=None)
@given(small_costs())
def test_optimal_equals_exhaustive_search(costs):
    found = [
        (simulated(schedule, costs).peak_bytes, seconds(schedule, costs))
        for schedule in persistent_schedules(len(costs))
    ]
    least = min(peak for peak, _ in found)
    for budget in range(max(peak for peak, _ in found) + 2):
        if budget < least:
            with pytest.raises(ScheduleError, match=f"needs at least {least} bytes"):
                optimal(costs, budget)
            continue
        schedule = optimal(costs, budget)
        assert simulated(schedule, costs).peak_bytes <= budget
        assert seconds(schedule, costs) == min(time for peak, time in found if peak <= budget)


@pytest.mark.slow
def test_optimal_equals_exhaustive_search_for_six_and_seven_stages():
    for num_stages in (6, 7):
        costs = various(num_stages, seed=num_stages, most=4)
        found = [
            (simulated(schedule, costs).peak_bytes, seconds(schedule, costs))
            for schedule in persistent_schedules(num_stages)
        ]
        least = min(peak for peak, _ in found)
        assert least_bytes(costs) == least
        for budget in range(least, simulated(linear(num_stages), costs).peak_bytes + 1, 5):
            best = min(time for peak, time in found if peak <= budget)
            assert seconds(optimal(costs, budget), costs) == pytest.approx(best, rel=1e-12)


# Least memory for a number of forward runs, in units of a state, tapes being a states each.
KNOWN = [
    (32, 1, {33: 1.0, 26: 1.25, 18: 1.5, 10: 1.9, 9: 2.0, 7: 2.5, 6: 3.0}),
    (32, 4, {129: 1.0, 98: 1.25, 66: 1.5, 24: 1.9, 18: 2.0, 13: 2.5, 11: 3.0}),
    (32, 17, {545: 1.0, 410: 1.25, 274: 1.5, 76: 1.9, 41: 2.0, 32: 2.5, 24: 3.0}),
]


@pytest.mark.parametrize(("n", "tape", "row"), KNOWN)
def test_optimal_is_as_good_as_the_known_curve(n, tape, row):
    costs = [Cost(1.0, 1, tape)] * n
    for budget, most in row.items():
        simulation = simulated(optimal(costs, budget), costs)
        assert simulation.num_forwards <= most * n
        assert simulation.peak_bytes <= budget


@pytest.fixture
def coarse(monkeypatch):
    """Count bytes in 128 levels, as for a chain of a hundred stages."""
    monkeypatch.setattr("recoup.schedules.search._WORK", 0)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("seed", range(3))
def test_budgets_are_kept_and_time_falls_with_them(seed):
    # Sizes of up to a hundred million bytes are rounded, to finer units for smaller budgets.
    costs = various(40, seed)
    least, most = least_bytes(costs), simulated(linear(40), costs).peak_bytes
    assert most > 8 * least
    before = inf
    budgets = [least + (most - least) * step**2 // 144 for step in range(13)]
    for budget in [least, least + 1, *budgets[1:]]:
        schedule = optimal(costs, budget)
        assert simulated(schedule, costs).peak_bytes <= budget
        assert seconds(schedule, costs) <= before * (1 + 1e-12)
        before = seconds(schedule, costs)
    assert optimal(costs, most).actions == linear(40).actions


@pytest.mark.usefixtures("coarse")
def test_rounding_costs_little():
    # The same chain in units of one and of a million bytes and a little noise.
    draw = random.Random(0)
    exact = [Cost(1.0, 1, draw.randint(1, 9)) for _ in range(40)]
    noisy = [
        Cost(c.seconds, c.state_bytes * 10**6, c.tape_bytes * 10**6 + draw.randint(0, 999))
        for c in exact
    ]
    for budget in (20, 30, 50, 90, 150):
        fine = seconds(optimal(exact, budget), exact)
        assert seconds(optimal(noisy, budget * 10**6), noisy) <= 1.06 * fine


@pytest.mark.usefixtures("coarse")
def test_small_budgets_are_counted_in_fine_units():
    costs = various(40, seed=0)
    budget = 5 * least_bytes(costs) // 4
    assert simulated(linear(40), costs).peak_bytes > 10 * budget
    assert 0.95 * budget <= simulated(optimal(costs, budget), costs).peak_bytes <= budget


def test_the_least_feasible_budget_is_feasible():
    for seed in range(5):
        costs = various(12, seed)
        least = least_bytes(costs)
        assert simulated(optimal(costs, least), costs).peak_bytes == least
        with pytest.raises(ScheduleError, match=f"`budget` is {least - 1} bytes"):
            optimal(costs, least - 1)


def test_costs_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"`costs` is empty"):
        optimal([], 1)
    with pytest.raises(ValueError, match=r"`seconds` is nan"):
        Cost(float("nan"), 1, 1)
    with pytest.raises(ValueError, match=r"`state_bytes` is -1"):
        Cost(1.0, -1, 1)
    with pytest.raises(ValueError, match=r"`tape_bytes` is 1, .* `state_bytes` \(2\)"):
        Cost(1.0, 2, 1)


def test_a_chain_that_costs_nothing_is_linear():
    assert optimal([Cost(0.0, 0, 0)] * 3, 0).actions == linear(3).actions
