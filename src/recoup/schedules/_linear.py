"""The linear schedule: keeps every tape, as plain autograd does."""

from __future__ import annotations

from recoup.schedules.actions import Action, Reverse, Schedule, Tape
from recoup.schedules.bounds import require_positive

__all__ = ["linear"]


def linear(n: int) -> Schedule:
    """Tape every stage in the sweep; the fastest schedule, with the most memory.

    Kept: `n` tapes. Backward pays nothing: `n` forward runs in all.

    Args:
        n: number of stages.

    Returns:
        The schedule.

    Raises:
        ValueError: `n` is below one.

    Example:
        >>> from recoup.schedules import linear, simulate
        >>> simulation = simulate(linear(100))
        >>> simulation.num_forwards, simulation.peak_tapes
        (100, 100)
    """
    require_positive("n", n)
    sweep: list[Action] = [Tape(i) for i in range(n)]
    backward: list[Action] = [Reverse(i) for i in reversed(range(n))]
    return Schedule(n, (*sweep, *backward), name="linear")
