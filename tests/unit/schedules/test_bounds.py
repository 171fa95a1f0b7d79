from __future__ import annotations

from functools import cache

import pytest

from recoup.schedules import (
    beta,
    num_advances,
    num_sweeps,
    simulate,
)
from recoup.schedules._binomial import best_split
from tests.unit.schedules.oracles import least_advances, persistent_schedules


@cache
def recurrence(n: int, slots: int) -> int:
    """The least number of advances by its definition, without the closed form."""
    if n == 1:
        return 0
    if slots == 1:
        return n * (n - 1) // 2
    return min(
        split + recurrence(n - split, slots - 1) + recurrence(split, slots) for split in range(1, n)
    )


@pytest.mark.parametrize("n", range(1, 61))
def test_num_advances_equals_the_recurrence(n):
    for slots in range(1, n + 2):
        assert num_advances(n, slots) == recurrence(n, slots)


@pytest.mark.parametrize("n", range(1, 7))
def test_num_advances_equals_an_exhaustive_search(n):
    for slots in range(1, n + 1):
        assert num_advances(n, slots) == least_advances(n, slots)


@pytest.mark.parametrize("n", range(2, 61))
def test_best_split_attains_the_recurrence(n):
    for slots in range(1, n + 2):
        split = best_split(n, slots)
        assert 1 <= split < n
        later = recurrence(n - split, slots - 1) if slots > 1 else 0
        assert slots > 1 or split == n - 1
        assert split + later + recurrence(split, slots) == recurrence(n, slots)


def test_beta_is_the_longest_chain_for_a_number_of_sweeps():
    for slots in range(1, 8):
        for sweeps in range(1, 6):
            assert num_sweeps(beta(slots, sweeps), slots) == sweeps
            assert num_sweeps(beta(slots, sweeps) + 1, slots) == sweeps + 1
    assert beta(3, -1) == 0


def test_persistent_schedules_are_distinct_and_can_be_executed():
    schedules = list(persistent_schedules(5))
    assert len({schedule.actions for schedule in schedules}) == len(schedules) == 90
    for schedule in schedules:
        assert simulate(schedule).num_forwards >= 5


@pytest.mark.parametrize("function", [num_sweeps, num_advances])
def test_counts_below_one_are_refused(function):
    with pytest.raises(ValueError, match=r"`n` is 0, but must be a whole number, at least 1"):
        function(0, 1)
    with pytest.raises(ValueError, match=r"`slots` is 0, but must be a whole number, at least 1"):
        function(3, 0)


def test_a_chain_of_one_stage_cannot_be_split():
    with pytest.raises(ValueError, match=r"`n` is 1"):
        best_split(1, 3)
