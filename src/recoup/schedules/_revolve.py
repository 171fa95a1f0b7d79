"""The revolve schedule as published, with one tape at a time."""

from __future__ import annotations

from collections.abc import Callable

from recoup.schedules.actions import Action, Advance, Drop, Keep, Load, Reverse, Schedule, Tape
from recoup.schedules.bounds import best_split, require_positive

__all__ = ["Part", "revolve", "solved"]


def revolve(n: int, slots: int) -> Schedule:
    """Reverse a chain with `slots` kept states and one tape at a time.

    Every stage is run once with its tape, immediately before its backward, in addition to the
    fewest advances that `slots` slots allow. `binomial` runs up to ``n - 1`` forwards fewer with
    the same number of slots, but holds up to ``slots + 1`` tapes.

    Kept: at most `slots` states and one tape; with states and tapes of one unit each, at most
    ``slots + 2`` units with the working state. ``num_advances(n, slots) + n`` forward runs in
    all; backward pays all but `n` of them.

    Args:
        n: number of stages.
        slots: number of states that may be kept, the chain's input included. More than ``n - 1``
            have no further effect.

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
    return Schedule(n, solved((0, n, slots, False), _solve), name=f"revolve, {slots} slots")


# A part of the chain that is to be solved: its first stage, one past its last stage, its slots, and
# whether its input is kept already.
Part = tuple[int, int, int, bool]


def solved(whole: Part, solve: Callable[..., list[Action | Part]]) -> tuple[Action, ...]:
    """Return the actions of a part, whose solution may contain further parts.

    This is not recursive, because a chain of 1000 stages nests deeper than Python allows.

    Args:
        whole: the part.
        solve: a function that returns the actions of a part, with parts among them.
    """
    actions: list[Action] = []
    waiting: list[Action | Part] = [whole]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting += reversed(solve(*item))
        else:
            actions.append(item)
    return tuple(actions)


def _solve(start: int, stop: int, slots: int, kept: bool) -> list[Action | Part]:
    """Return one pass through a part whose input is the working state."""
    if stop - start == 1:
        drop: list[Action | Part] = [Drop(start)] if kept else []
        return [*drop, Tape(start), Reverse(start)]
    middle = start + best_split(stop - start, slots)
    keep: list[Action | Part] = [] if kept else [Keep(start)]
    later = (middle, stop, slots - 1, False)
    earlier = (start, middle, slots, True)
    return [*keep, Advance(start, middle), later, Load(start), earlier]
