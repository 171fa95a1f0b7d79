"""Revolve as it was published: one tape at a time."""

from __future__ import annotations

from recoup.schedules.actions import Action, Advance, Drop, Keep, Load, Reverse, Schedule, Tape
from recoup.schedules.bounds import best_split, require_positive

__all__ = ["revolve"]


def revolve(n: int, slots: int) -> Schedule:
    """Reverse a chain with `slots` kept states and one tape at a time.

    Every stage is run once with its tape, immediately before its backward, beside the fewest
    advances that `slots` slots allow. `binomial` runs up to ``n - 1`` forwards less for the same
    number of slots, but holds up to ``slots + 1`` tapes.

    Kept: at most `slots` states and one tape; with states and tapes of one unit each, at most
    ``slots + 2`` units with the working state. ``num_advances(n, slots) + n`` forward runs in
    all; backward pays all but `n` of them.

    Args:
        n: number of stages.
        slots: number of states that may be kept, the chain's input included. More than ``n - 1``
            change nothing.

    Returns:
        The schedule.

    Raises:
        ValueError: `n` or `slots` is below one.

    Example:
        >>> from recoup.schedules import revolve, simulate
        >>> simulation = simulate(revolve(100, 5))
        >>> simulation.num_forwards, simulation.peak_tapes, simulation.peak_states
        (416, 1, 5)

    Source: Griewank and Walther, "Algorithm 799: revolve" (2000).
    """
    require_positive("n", n)
    require_positive("slots", slots)
    return Schedule(n, tuple(_actions(n, slots)), name=f"revolve, {slots} slots")


# A part of the chain that waits to be solved: first stage, one past the last, slots, whether its
# input is kept already.
_Part = tuple[int, int, int, bool]


def _actions(n: int, slots: int) -> list[Action]:
    """The actions, without recursion: a chain of 1000 stages nests deeper than Python allows."""
    actions: list[Action] = []
    waiting: list[Action | _Part] = [(0, n, slots, False)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting += reversed(_solve(*item))
        else:
            actions.append(item)
    return actions


def _solve(start: int, stop: int, slots: int, kept: bool) -> list[Action | _Part]:
    """One pass through a part, the working state being its input."""
    if stop - start == 1:
        drop: list[Action | _Part] = [Drop(start)] if kept else []
        return [*drop, Tape(start), Reverse(start)]
    middle = start + best_split(stop - start, slots)
    keep: list[Action | _Part] = [] if kept else [Keep(start)]
    later = (middle, stop, slots - 1, False)
    earlier = (start, middle, slots, True)
    return [*keep, Advance(start, middle), later, Load(start), earlier]
