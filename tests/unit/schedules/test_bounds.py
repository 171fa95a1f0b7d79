"""The closed forms of binomial schedules, beside their recurrence."""

from __future__ import annotations

from functools import cache

import pytest

from recoup.schedules import beta, num_advances, num_sweeps
from recoup.schedules._binomial import best_split


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
def test_num_advances_and_best_split_attain_the_recurrence(n):
    for slots in range(1, n + 2):
        assert num_advances(n, slots) == recurrence(n, slots)
        if n > 1:
            split = best_split(n, slots)
            assert 1 <= split < n
            assert slots > 1 or split == n - 1
            later = recurrence(n - split, slots - 1) if slots > 1 else 0
            assert split + later + recurrence(split, slots) == recurrence(n, slots)


def test_beta_is_the_longest_chain_for_a_number_of_sweeps():
    for slots in range(1, 8):
        for sweeps in range(1, 6):
            assert num_sweeps(beta(slots, sweeps), slots) == sweeps
            assert num_sweeps(beta(slots, sweeps) + 1, slots) == sweeps + 1
    assert beta(3, -1) == 0
