"""Exhaustive searches for tiny chains, which assume no theory and so can tell if one is wrong."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from recoup.schedules import Action, Advance, Drop, Keep, Load, Reverse, Schedule, Tape

__all__ = ["least_advances", "persistent_schedules"]

# Of the game of `least_advances`: kept states, working state, number of stages not reversed.
_Position = tuple[frozenset[int], int, int]


def least_advances(n: int, slots: int) -> int:
    """The least number of advances, by a search through all that can be done (tiny chains only).

    The game: keep the working state in a free slot, let go of a kept one, go back to a kept one,
    advance by one stage (which costs 1), reverse the last stage left when the working state is
    its input (free).

    Args:
        n: number of stages; every stage doubles the search, so at most about 10.
        slots: number of states that may be kept, ``x_0`` included.

    Returns:
        The cost of the cheapest way to reverse all stages.
    """
    start: _Position = (frozenset({0}), 0, n)
    cost: dict[_Position, int] = {start: 0}
    queue: list[tuple[int, int, _Position]] = [(0, 0, start)]
    pushed = 0
    while queue:
        advances, _, position = heapq.heappop(queue)
        if position[2] == 0:
            return advances
        if advances > cost[position]:
            continue
        for step, following in _moves(*position, slots):
            if advances + step < cost.get(following, advances + step + 1):
                cost[following] = advances + step
                pushed += 1
                heapq.heappush(queue, (advances + step, pushed, following))
    raise AssertionError("unreachable: with x_0 kept every chain can be reversed")


def _moves(
    kept: frozenset[int], working: int, remaining: int, slots: int
) -> Iterator[tuple[int, _Position]]:
    """All moves of the game of `least_advances`, each with its cost."""
    if working == remaining - 1:
        yield 0, (kept, working, remaining - 1)
    elif working < remaining - 1:
        yield 1, (kept, working + 1, remaining)
    if working not in kept and len(kept) < slots:
        yield 0, (kept | {working}, working, remaining)
    for index in kept:
        yield 0, (kept - {index}, working, remaining)
        yield 0, (kept, index, remaining)


def persistent_schedules(n: int) -> Iterator[Schedule]:
    """Every persistent schedule of a chain (tiny chains only).

    A schedule is persistent if what it keeps stays until what it is for is done: a stage is taped
    when it is passed and stays taped until it is reversed, or the input of a segment is kept, the
    segment is run without tapes, and later it is solved in the same manner.

    Args:
        n: number of stages; there are 2, 6, 22, 90, 394, 1806 schedules for 2, 3, ... 7.

    Yields:
        Schedules, each once.
    """
    for actions in _persistent(0, n, kept=False):
        yield Schedule(n, actions, name="persistent")


def _persistent(start: int, stop: int, *, kept: bool) -> Iterator[tuple[Action, ...]]:
    """All ways to solve stages `start ... stop - 1` from the working state ``x_start``."""
    drop: tuple[Action, ...] = (Drop(start),) if kept else ()
    keep: tuple[Action, ...] = () if kept else (Keep(start),)
    rests = _persistent(start + 1, stop, kept=False) if start + 1 < stop else ((),)
    for rest in rests:
        yield (*drop, Tape(start), *rest, Reverse(start))
    for split in range(start + 1, stop):
        for later in _persistent(split, stop, kept=False):
            for earlier in _persistent(start, split, kept=True):
                yield (*keep, Advance(start, split), *later, Load(start), *earlier)
