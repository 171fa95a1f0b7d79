"""Schedules that tape one segment of the chain at a time: `linear` (the whole chain) and `sqrt`."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import isqrt

from recoup.schedules.actions import Action, Advance, Drop, Keep, Load, Reverse, Schedule, Tape
from recoup.schedules.bounds import require_positive

__all__ = ["linear", "segment_lengths", "sqrt"]


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
    return Schedule(n, tuple(_tape_and_reverse(0, n)), name="linear")


def sqrt(n: int) -> Schedule:
    """Cut the chain into segments of ``k, k - 1, ...`` stages and tape one segment at a time.

    When a segment is taped, the inputs of all segments before it are kept, so later segments are
    shorter: each segment then has the same peak, 29 % below that of segments of equal length. The
    last segment is taped in the sweep and never run again.

    Kept: the input of each segment but the last, and the tapes of one segment; with states and
    tapes of one unit each, at most ``k + 1`` units with the working state, where ``k`` is the
    least number with ``k (k + 1) / 2 >= n``. Backward pays one forward run of each stage outside
    the last segment: at most ``2 n - 1`` forward runs in all.

    Args:
        n: number of stages.

    Returns:
        The schedule.

    Raises:
        ValueError: `n` is below one.

    Example:
        >>> from recoup.schedules import simulate, sqrt
        >>> simulation = simulate(sqrt(100))
        >>> simulation.num_forwards, simulation.peak_bytes
        (197, 15)

    Source: the two-sweep point of Griewank and Walther, "Algorithm 799: revolve" (2000); equal
    segments are Chen et al., "Training deep nets with sublinear memory cost" (2016).
    """
    require_positive("n", n)
    *earlier, last = pairwise((0, *accumulate(segment_lengths(n))))
    actions: list[Action] = []
    for start, stop in earlier:
        actions += [Keep(start), Advance(start, stop)]
    actions += _tape_and_reverse(*last)
    for start, stop in reversed(earlier):
        actions += [Load(start), Drop(start), *_tape_and_reverse(start, stop)]
    return Schedule(n, tuple(actions), name="sqrt")


def segment_lengths(n: int) -> list[int]:
    """Return the segment lengths: the fewest of ``k, k - 1, ...`` that reach `n`, the first cut."""
    longest = (isqrt(8 * n - 7) + 1) // 2
    segments: list[int] = []
    while sum(segments) < n:
        segments.append(longest - len(segments))
    # The excess is cut from the first segment: the last one is run only once, so it should be as
    # long as the peak allows.
    segments[0] -= sum(segments) - n
    return segments


def _tape_and_reverse(start: int, stop: int) -> list[Action]:
    tapes: list[Action] = [Tape(index) for index in range(start, stop)]
    return tapes + [Reverse(index) for index in reversed(range(start, stop))]
