"""Schedules with a number of slots, `revolve`, `binomial` and `log`, and their closed forms.

All three split a chain by the closed forms, which are lower bounds for uniform chains. `revolve` is
the published schedule, with one tape at a time; `binomial` tapes each stage in the last pass over
it; `log` chooses the number of slots from the length of the chain. *Slots* are kept states, ``x_0``
among them, beside one working state.

Source of all: Griewank and Walther, "Algorithm 799: revolve" (2000).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import comb

from recoup._arguments import check_whole
from recoup.schedules.actions import (
    Action,
    Advance,
    Drop,
    Keep,
    Load,
    Reverse,
    Schedule,
    Tape,
    actions_of,
)


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
    check_whole(n=n, slots=slots)
    actions = actions_of((0, n, slots), _pass_of_revolve)
    return Schedule(n, tuple(actions), name=f"revolve, {slots} slots")


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
    check_whole(n=n, slots=slots)
    actions = actions_of((0, n, slots), partial(_pass_of_binomial, n))
    return Schedule(n, tuple(actions), name=f"binomial, {slots} slots")


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
    check_whole(n=n)
    slots = 1
    while beta(slots, slots) < n:
        slots += 1
    return replace(binomial(n, slots), name="log")


# A part of the chain that is to be solved, whose input is the working state: its first stage, one
# past its last stage, and its slots.
_Part = tuple[int, int, int]


def _pass_of_revolve(part: _Part) -> list[Action | _Part]:
    """Return one pass through a part."""
    start, stop, slots = part
    if stop - start == 1:
        return [Tape(start), Reverse(start)]
    middle = start + best_split(stop - start, slots)
    later, earlier = (middle, stop, slots - 1), (start, middle, slots)
    return [Keep(start), Advance(start, middle), later, Load(start), Drop(start), earlier]


def _pass_of_binomial(n: int, part: _Part) -> list[Action | _Part]:
    """Return one pass through a part without tapes, which tapes its last stage.

    The part behind that stage is solved first, with one slot less, then the part before it.
    """
    start, stop, slots = part
    if start == stop:
        return []
    # A part that does not end with the chain counts one stage more: `best_split` splits a part that
    # ends with a stage that the pass before has taped, and that is reversed by now.
    length = stop - start + (stop < n)
    taped = start + (best_split(length, slots) if length > 1 else 1) - 1
    later, earlier = (taped + 1, stop, slots - 1), (start, taped, slots)
    if taped == start:
        return [Tape(start), later, Reverse(start)]
    tape = (Advance(start, taped), Tape(taped))
    return [Keep(start), *tape, later, Reverse(taped), Load(start), Drop(start), earlier]


# -- closed forms ----------------------------------------------------------------------------------


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
    check_whole(n=n, slots=slots)
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
    """Return the longest distance to the next state that is kept which minimizes the advances.

    Of several it leads to the least nesting of segments. There are at least two stages.

    Example:
        >>> from recoup.schedules._binomial import best_split
        >>> best_split(10, 1), best_split(10, 3), best_split(10, 9)
        (9, 4, 1)
    """
    sweeps = num_sweeps(n, slots)
    if slots == 1:
        return n - 1
    # The part behind the split has one slot less. Neither part may be longer than its bound (beta)
    # while the other one is shorter, or a stage is run once more than necessary.
    return min(beta(slots, sweeps - 1), n - beta(slots - 1, sweeps - 1))
