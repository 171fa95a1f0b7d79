"""What no schedule can beat: closed forms for uniform chains, and exhaustive search for tiny ones.

The closed forms are those of Griewank and Walther, "Algorithm 799: revolve" (2000), in terms of
*slots*: kept states, ``x_0`` among them, beside one working state. The searches assume none of
that theory; they are the oracle that the closed forms and `optimal` are held against.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import comb

from recoup.schedules.actions import Action, Advance, Drop, Keep, Load, Reverse, Schedule, Tape

__all__ = [
    "best_split",
    "beta",
    "least_advances",
    "num_advances",
    "num_sweeps",
    "persistent_schedules",
    "require_positive",
]


def require_positive(name: str, value: int) -> None:
    """Refuse a count below one.

    Args:
        name: the argument's name, for the message.
        value: what was got.

    Raises:
        ValueError: `value` is below one.

    Example:
        >>> require_positive("slots", 3)
    """
    if value < 1:
        raise ValueError(f"`{name}` is {value}, but it must be at least 1")


def beta(slots: int, sweeps: int) -> int:
    """Length of the longest chain that `slots` slots reverse with no stage run over `sweeps` times.

    Args:
        slots: number of states that may be kept, ``x_0`` included.
        sweeps: most often that any one stage may be advanced over.

    Returns:
        The binomial coefficient of ``slots + sweeps`` over ``slots``; 0 if `sweeps` is negative.

    Example:
        >>> beta(3, 2)
        10

    Source: Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse
    automatic differentiation" (1992).
    """
    return comb(slots + sweeps, slots) if sweeps >= 0 else 0


def num_sweeps(n: int, slots: int) -> int:
    """The least number of times that the most advanced stage must be advanced over.

    Args:
        n: number of stages.
        slots: number of states that may be kept, ``x_0`` included.

    Returns:
        The least ``r`` with ``beta(slots, r) >= n``.

    Raises:
        ValueError: `n` or `slots` is below one.

    Example:
        >>> num_sweeps(10, 3), num_sweeps(11, 3)
        (2, 3)
    """
    require_positive("n", n)
    require_positive("slots", slots)
    if slots == 1:
        return n - 1
    sweeps = 0
    while beta(slots, sweeps) < n:
        sweeps += 1
    return sweeps


def num_advances(n: int, slots: int) -> int:
    """The least number of advances that reverse a chain, in closed form.

    An advance is a run of one stage that brings the working state forward; the run that makes
    what backward needs is not among them. A schedule that tapes every stage on its last pass runs
    one forward more than this in all (`binomial`), one that runs every stage once more for its
    tape `n` more (`revolve`).

    Args:
        n: number of stages.
        slots: number of states that may be kept, ``x_0`` included.

    Returns:
        ``r n - beta(slots + 1, r - 1)`` with ``r = num_sweeps(n, slots)``.

    Raises:
        ValueError: `n` or `slots` is below one.

    Example:
        >>> num_advances(100, 13), num_advances(1000, 44)
        (185, 1954)

    Source: Griewank and Walther, "Algorithm 799: revolve" (2000).
    """
    sweeps = num_sweeps(n, slots)
    return sweeps * n - beta(slots + 1, sweeps - 1)


def best_split(n: int, slots: int) -> int:
    """How far to advance before the next state is kept, so that the advances are fewest.

    Several distances are optimal in general; this is the longest of them, which nests the fewest
    segments in one another.

    Args:
        n: number of stages, at least 2.
        slots: number of states that may be kept, the one at the start included.

    Returns:
        A distance from 1 to ``n - 1``.

    Raises:
        ValueError: `n` is below two or `slots` below one.

    Example:
        >>> best_split(10, 1), best_split(10, 3), best_split(10, 9)
        (9, 4, 1)
    """
    if n < 2:
        raise ValueError(f"`n` is {n}, but only a chain of at least 2 stages can be split")
    sweeps = num_sweeps(n, slots)
    if slots == 1:
        return n - 1
    # The part behind the split has one slot less; neither part may need more than it can have
    # (beta) while the other has room to spare, or a stage is run once more for nothing.
    return min(beta(slots, sweeps - 1), n - beta(slots - 1, sweeps - 1))


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

    Raises:
        ValueError: `n` or `slots` is below one.

    Example:
        >>> least_advances(6, 2) == num_advances(6, 2)
        True
    """
    require_positive("n", n)
    require_positive("slots", slots)
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

    Raises:
        ValueError: `n` is below one.

    Example:
        >>> [len(list(persistent_schedules(n))) for n in (1, 2, 3)]
        [1, 2, 6]
    """
    require_positive("n", n)
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
