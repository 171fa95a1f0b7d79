"""Which point of a frontier a plan takes: the fastest whose rehearsal keeps to the budget.

NOTE [ Few rehearsals ]

Rule 1. First comes the fastest point that is predicted to fit, which mostly does. If it does not,
        the points below it are bisected. A rehearsal may be off the prediction in both directions,
        so whatever is returned has been rehearsed.
Rule 2. The bisection halves the whole frontier and passes over what is not below the first point,
        so that it meets the same points for every budget as long as nothing fits. Therefore a
        budget of what one of them took in a search without success finds this one or a faster one.
Rule 3. The least point is rehearsed always, also if it is predicted not to fit. So every search
        ends with it, and its bytes as a budget succeed. If it took more than everything kept is
        predicted to take (where blocks keep less than what running them again needs), then that
        one is rehearsed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Choice", "choose"]


class Choice(NamedTuple):
    """A point of a frontier.

    Args:
        place: of the point; None if no rehearsal kept to the budget.
        peak_bytes: of its rehearsal.
        least_bytes: a budget that is known to suffice, the least that was seen.
    """

    place: int | None
    peak_bytes: int
    least_bytes: int


def choose(
    predicted_bytes: Sequence[int], budget_bytes: int, rehearse: Callable[[int], int]
) -> Choice:
    """Return the fastest point whose rehearsal keeps to the budget.

    About ``log2(n) + 3`` points of n are rehearsed at most, and two if predictions hold.

    Args:
        predicted_bytes: the peak of each point, from the slowest with the least bytes to the
            fastest.
        budget_bytes: the most that a rehearsal may take.
        rehearse: from the place of a point to the peak of its rehearsal.

    Example:
        >>> choose([10, 20, 30], 25, rehearse=lambda place: [11, 21, 31][place])
        Choice(place=1, peak_bytes=21, least_bytes=11)
    """
    peaks: dict[int, int] = {}

    def fits(place: int) -> bool:
        if place not in peaks:
            peaks[place] = rehearse(place)
        return peaks[place] <= budget_bytes

    num_fitting = sum(peak <= budget_bytes for peak in predicted_bytes)
    found = num_fitting - 1 if num_fitting and fits(num_fitting - 1) else None
    met: list[int] = []
    if found is None:
        low, high = 0, len(predicted_bytes)
        while low < high:
            middle = (low + high) // 2
            if middle and middle >= num_fitting:  # See Rule 2
                high = middle
                continue
            met.append(middle)
            if fits(middle):
                found, low = middle, middle + 1
            else:
                high = middle
    # See Rule 3
    fits(0)
    ends, last = [0], len(predicted_bytes) - 1
    if predicted_bytes[last] < peaks[0]:
        ends.append(last)
        found = last if fits(last) else found
    if found is None:
        least = min(peaks[place] for place in (*met, *ends))
        return Choice(None, least, least)
    return Choice(found, peaks[found], min(peaks[place] for place in ends))
