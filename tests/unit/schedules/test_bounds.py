"""The closed forms of binomial schedules, beside their recurrence and an exhaustive search."""

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


def least_advances(n: int, slots: int) -> int:
    """The same by a search through all that can be done with few stages, which assumes no theory.

    A position is the states that are kept, the working state, and how many stages are left. The
    working state may be kept in a free slot, a kept one let go of or gone back to; to advance by
    one stage costs 1, and to reverse the last one from its input is free.
    """
    reached = {(frozenset({0}), 0, n)}
    for num_runs in range(n * n):
        todo = list(reached)
        while todo:
            kept, working, left = todo.pop()
            if left == 0:
                return num_runs
            moves = {(kept - {each}, working, left) for each in kept}
            moves |= {(kept, each, left) for each in kept}
            if len(kept) < slots:
                moves.add((kept | {working}, working, left))
            if working == left - 1:
                moves.add((kept, working, left - 1))
            todo += moves - reached
            reached |= moves
        reached = {(kept, at + 1, left) for kept, at, left in reached if at < left - 1}
    raise AssertionError("with x_0 kept every chain can be reversed")


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


@pytest.mark.parametrize("n", range(1, 7))
def test_num_advances_equals_an_exhaustive_search(n):
    for slots in range(1, n + 1):
        assert num_advances(n, slots) == least_advances(n, slots)


def test_beta_is_the_longest_chain_for_a_number_of_sweeps():
    for slots in range(1, 8):
        for sweeps in range(1, 6):
            assert num_sweeps(beta(slots, sweeps), slots) == sweeps
            assert num_sweeps(beta(slots, sweeps) + 1, slots) == sweeps + 1
    assert beta(3, -1) == 0
