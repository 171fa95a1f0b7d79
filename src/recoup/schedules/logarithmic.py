"""The log schedule: memory and extra time are both logarithmic in the depth."""

from __future__ import annotations

from dataclasses import replace

from recoup.schedules._binomial import binomial
from recoup.schedules.actions import Schedule
from recoup.schedules.bounds import beta, require_positive

__all__ = ["log"]


def log(n: int) -> Schedule:
    """Return `binomial` with equally many slots and runs: the least ``c`` with ``C(2 c, c) >= n``.

    ``c`` grows like ``log_4 n``: 3 for 20 stages, 5 for 100, 7 for 1000, 11 for half a million.

    Kept: at most ``c`` states and ``c + 1`` tapes. No stage is run more than ``c`` times.

    Args:
        n: number of stages.

    Returns:
        The schedule.

    Raises:
        ValueError: `n` is below one.

    Example:
        >>> from recoup.schedules import log, simulate
        >>> simulation = simulate(log(1000))
        >>> simulation.peak_states, max(simulation.forwards_per_stage)
        (7, 6)

    Source: Griewank, "Achieving logarithmic growth of temporal and spatial complexity in reverse
    automatic differentiation" (1992).
    """
    require_positive("n", n)
    slots = 1
    while beta(slots, slots) < n:
        slots += 1
    return replace(binomial(n, slots), name="log")
