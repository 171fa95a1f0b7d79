"""Schedules with a number of slots: `revolve`, `binomial` and `log`.

All three split a chain by the closed forms in `bounds`. `revolve` is the published schedule, with
one tape at a time; `binomial` tapes each stage in the last pass over it; `log` chooses the number
of slots from the length of the chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from recoup.schedules.actions import Action, Advance, Drop, Keep, Load, Reverse, Schedule, Tape
from recoup.schedules.bounds import best_split, beta, require_positive

__all__ = ["binomial", "log", "revolve"]


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
    return _solve(n, slots, _pass_of_revolve, name=f"revolve, {slots} slots")


def binomial(n: int, slots: int) -> Schedule:
    """Reverse a chain with `slots` kept states and the fewest forward runs that this allows.

    The last run of a stage before its backward makes its tape, so no stage is run twice in a row
    as in `revolve`; a state that only the backward of its own stage would need is not kept beside
    that tape. This is ``num_advances(n, slots) + 1`` forward runs, `n` of
    them in the sweep: the optimum for chains whose backward needs the states alone.

    Kept: at most `slots` states, the tape of the stage in front of each of them, and one more
    tape. If a tape is little more than its stage's output (tanh, sigmoid), the state behind it
    *is* that tape and the peak is about `slots` units; if states and tapes are one unit each, it
    is at most ``2 * slots + 2`` units with the working state. Where tapes are much larger than
    states, `revolve` holds one tape at a time for `n` - 1 more runs, and `optimal` weighs
    both. Backward pays ``num_advances(n, slots) + 1 - n`` forward runs.

    Args:
        n: number of stages.
        slots: number of states that may be kept, the chain's input included; ``slots >= n - 1``
            tapes every stage in the sweep, as `linear` does.

    Returns:
        The schedule.

    Raises:
        ValueError: `n` or `slots` is below one.

    Example:
        >>> from recoup.schedules import binomial, simulate
        >>> simulate(binomial(1000, 44)).num_forwards
        1955

    Source: Griewank and Walther, "Algorithm 799: revolve" (2000).
    """
    return _solve(n, slots, partial(_pass_of_binomial, n), name=f"binomial, {slots} slots")


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


# A part of the chain that is to be solved: its first stage, one past its last stage, its slots, and
# whether its input is kept already.
_Part = tuple[int, int, int, bool]


def _solve(
    n: int, slots: int, one_pass: Callable[..., list[Action | _Part]], *, name: str
) -> Schedule:
    """Solve the whole chain, given the actions of one pass through a part and its further parts."""
    require_positive("n", n)
    require_positive("slots", slots)
    actions: list[Action] = []
    # Not recursive, because a chain of 1000 stages nests deeper than Python allows.
    waiting: list[Action | _Part] = [(0, n, slots, False)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting += reversed(one_pass(*item))
        else:
            actions.append(item)
    return Schedule(n, tuple(actions), name=name)


def _pass_of_revolve(start: int, stop: int, slots: int, kept: bool) -> list[Action | _Part]:
    """Return one pass through a part whose input is the working state."""
    if stop - start == 1:
        drop: list[Action | _Part] = [Drop(start)] if kept else []
        return [*drop, Tape(start), Reverse(start)]
    middle = start + best_split(stop - start, slots)
    keep: list[Action | _Part] = [] if kept else [Keep(start)]
    later = (middle, stop, slots - 1, False)
    earlier = (start, middle, slots, True)
    return [*keep, Advance(start, middle), later, Load(start), earlier]


def _pass_of_binomial(
    n: int, start: int, stop: int, slots: int, kept: bool
) -> list[Action | _Part]:
    """Return one pass through a part without tapes, whose input is the working state.

    The pass tapes its last stage. The part behind that stage is solved first, with one slot less.
    Then the stage is reversed, and the part before it is solved with all slots.
    """
    if start == stop:
        return []
    # A part that does not end with the chain counts one stage more: `best_split` splits a part that
    # ends with a stage that the pass before has taped, and that is reversed by now.
    length = stop - start + (stop < n)
    taped = start + (best_split(length, slots) if length > 1 else 1) - 1
    later = (taped + 1, stop, slots - 1, False)
    if taped == start:
        drop: list[Action | _Part] = [Drop(start)] if kept else []
        return [*drop, Tape(start), later, Reverse(start)]
    keep: list[Action | _Part] = [] if kept else [Keep(start)]
    earlier = (start, taped, slots, True)
    tape = [Advance(start, taped), Tape(taped)]
    return [*keep, *tape, later, Reverse(taped), Load(start), earlier]
