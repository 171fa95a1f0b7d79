"""Revolve's least number of forward runs, with each stage taped on its last pass."""

from __future__ import annotations

from functools import partial

from recoup.schedules._revolve import Part, solved
from recoup.schedules.actions import Action, Advance, Drop, Keep, Load, Reverse, Schedule, Tape
from recoup.schedules.bounds import best_split, require_positive

__all__ = ["binomial"]


def binomial(n: int, slots: int) -> Schedule:
    """Reverse a chain with `slots` kept states and the fewest forward runs that this allows.

    A stage that revolve runs for the last time before its backward is run with its tape there
    and then, so no stage is run twice in a row; a state that only its own stage's backward would
    need is not kept beside that tape. This is ``num_advances(n, slots) + 1`` forward runs, `n` of
    them in the sweep: the optimum of chains whose backward needs the states alone.

    Kept: at most `slots` states, and the tape of the stage in front of each of them, and one tape
    more. If a tape is little more than its stage's output (tanh, sigmoid), the state behind it
    *is* that tape and the peak is about `slots` units; if states and tapes are one unit each, it
    is at most ``2 * slots + 2`` units with the working state. Where tapes are much larger than
    states `revolve` holds one tape at a time for `n` - 1 runs more, and `optimal` weighs
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


# A part of the chain that waits to be solved: first stage, one past the last, slots, whether its
def _solve(n: int, start: int, stop: int, slots: int, kept: bool) -> list[Action | Part]:
    """One pass through a part none of whose stages is taped, the working state being its input.

    The pass tapes its last stage, ``middle - 1``. What is behind it is solved first, with one slot
    less; then that tape is reversed; then what is before it, with all slots.
    """
    if start == stop:
        return []
    if stop == n:
        # In the sweep the stage at the very end is run once more than revolve counts.
        length = stop - start
        middle = start + (best_split(length, slots) if length > 1 else 1)
    else:
        # Revolve's part ends with a stage that the pass before has taped and that is reversed by
        # now: it is one stage longer than what is left to do here.
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
