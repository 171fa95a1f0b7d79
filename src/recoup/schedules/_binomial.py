"""The binomial schedule: revolve with each stage taped in the last pass over it."""

from __future__ import annotations

from functools import partial

from recoup.schedules._revolve import Part, solved
from recoup.schedules.actions import Action, Advance, Drop, Keep, Load, Reverse, Schedule, Tape
from recoup.schedules.bounds import best_split, require_positive

__all__ = ["binomial"]


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
    require_positive("n", n)
    require_positive("slots", slots)
    return Schedule(
        n, solved((0, n, slots, False), partial(_solve, n)), name=f"binomial, {slots} slots"
    )


def _solve(n: int, start: int, stop: int, slots: int, kept: bool) -> list[Action | Part]:
    """Return one pass through a part without tapes, whose input is the working state.

    The pass tapes its last stage, ``middle - 1``. The part behind that stage is solved first, with
    one slot less. Then the stage is reversed, and the part before it is solved with all slots.
    """
    if start == stop:
        return []
    if stop == n:
        # Revolve does not count the run of the last stage in the sweep.
        length = stop - start
        middle = start + (best_split(length, slots) if length > 1 else 1)
    else:
        # The part of revolve is one stage longer: it ends with a stage that the pass before has
        # taped, and that is reversed by now.
        middle = start + best_split(stop - start + 1, slots)
    todo: list[Action | Part] = []
    if middle - 1 == start:
        todo += [Drop(start)] if kept else []
        todo += [Tape(start), (middle, stop, slots - 1, False), Reverse(start)]
        return todo
    todo += [] if kept else [Keep(start)]
    todo += [Advance(start, middle - 1), Tape(middle - 1), (middle, stop, slots - 1, False)]
    todo += [Reverse(middle - 1), Load(start), (start, middle - 1, slots, True)]
    return todo
