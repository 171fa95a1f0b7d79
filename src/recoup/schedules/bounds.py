"""Lower bounds for schedules: closed forms for uniform chains.

They are from Griewank and Walther, "Algorithm 799: revolve" (2000), in terms of
*slots*: kept states, ``x_0`` among them, beside one working state.
"""

from __future__ import annotations

from math import comb
from numbers import Integral

from recoup._arguments import check_whole

__all__ = [
    "best_split",
    "beta",
    "num_advances",
    "num_sweeps",
    "require_positive",
]


def require_positive(name: str, value: int) -> None:
    """Raise a ValueError if a count is below one.

    Args:
        name: the argument's name, for the message.
        value: the count.

    Raises:
        ValueError: `value` is below one, or no whole number.

    Example:
        >>> from recoup.schedules.bounds import require_positive
        >>> require_positive("slots", 3)
    """
    if type(value) is bool or not isinstance(value, Integral):  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
        raise ValueError(f"`{name}` is {value!r}, but must be a whole number")
    if value < 1:
        raise ValueError(f"`{name}` is {value}, but it must be at least 1")
    if value > 2**31:
        raise ValueError(f"`{name}` is {value}, but it must be at most 2**31")


def beta(slots: int, sweeps: int) -> int:
    """Return the length of the longest chain that can be reversed with these slots and sweeps.

    Args:
        slots: number of states that may be kept, ``x_0`` included.
        sweeps: the most times that any one stage may be advanced over.

    Returns:
        The binomial coefficient of ``slots + sweeps`` over ``slots``; 0 if `sweeps` is negative.

    Example:
        >>> from recoup.schedules import beta
        >>> beta(3, 2)
        10

    Source: Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse
    automatic differentiation" (1992).
    """
    check_whole(0, slots=slots)
    check_whole(-1, sweeps=sweeps)
    return comb(slots + sweeps, slots) if sweeps >= 0 else 0


def num_sweeps(n: int, slots: int) -> int:
    """Return the least number of times that some stage must be advanced over.

    Args:
        n: number of stages.
        slots: number of states that may be kept, ``x_0`` included.

    Returns:
        The least ``r`` with ``beta(slots, r) >= n``.

    Raises:
        ValueError: `n` or `slots` is below one.

    Example:
        >>> from recoup.schedules import num_sweeps
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
    """Return the least number of advances with which a chain can be reversed, in closed form.

    An advance is a run of one stage that brings the working state forward, without the run that
    makes the tape. In all, a schedule that tapes every stage on its last pass runs one forward more
    than this (`binomial`), and one that runs every stage once more for its tape runs `n` more
    (`revolve`).

    Args:
        n: number of stages.
        slots: number of states that may be kept, ``x_0`` included.

    Returns:
        ``r n - beta(slots + 1, r - 1)`` with ``r = num_sweeps(n, slots)``.

    Raises:
        ValueError: `n` or `slots` is below one.

    Example:
        >>> from recoup.schedules import num_advances
        >>> num_advances(100, 13), num_advances(1000, 44)
        (185, 1954)

    Source: Griewank and Walther, "Algorithm 799: revolve" (2000).
    """
    sweeps = num_sweeps(n, slots)
    return sweeps * n - beta(slots + 1, sweeps - 1)


def best_split(n: int, slots: int) -> int:
    """Return the distance to advance before the next state is kept that minimizes the advances.

    In general several distances are optimal; this is the longest of them, which leads to the
    least nesting of segments.

    Args:
        n: number of stages, at least 2.
        slots: number of states that may be kept, the one at the start included.

    Returns:
        A distance from 1 to ``n - 1``.

    Raises:
        ValueError: `n` is below two or `slots` below one.

    Example:
        >>> from recoup.schedules.bounds import best_split
        >>> best_split(10, 1), best_split(10, 3), best_split(10, 9)
        (9, 4, 1)
    """
    if n < 2:
        raise ValueError(f"`n` is {n}, but only a chain of at least 2 stages can be split")
    sweeps = num_sweeps(n, slots)
    if slots == 1:
        return n - 1
    # The part behind the split has one slot less. Neither part may be longer than its bound (beta)
    # while the other one is shorter, or a stage is run once more than necessary.
    return min(beta(slots, sweeps - 1), n - beta(slots - 1, sweeps - 1))
