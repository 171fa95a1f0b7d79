"""The choice of a point of the frontier: the fastest whose rehearsal keeps to the budget.

NOTE [ Few rehearsals ]

Rule 1. The fastest point that is predicted to fit is rehearsed first, and mostly fits. If it does
        not, the points below it are bisected. A rehearsal may take more or less than predicted, so
        every point that is returned has been rehearsed.
Rule 2. The bisection halves the whole frontier and skips points that are not below the first one,
        so that it visits the same points for every budget as long as none fits. Therefore, if a
        search fails, the bytes that one of its rehearsals took succeed as a budget: a search with
        them finds that point or a faster one.
Rule 3. The point with the least bytes is always rehearsed, even if it is predicted not to fit, so
        its bytes always succeed as a budget. If it took more than the point that keeps everything
        is predicted to take (where blocks keep less than their recomputation needs), that point is
        rehearsed, too.
Rule 4. Where a slower plan is also less exact (inverses), the point that keeps everything is tried
        even if it is predicted to take somewhat more than the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Choice", "choose"]


class Choice(NamedTuple):
    """A point of a frontier.

    Args:
        point_index: the index of the point; None if no rehearsal kept to the budget.
        peak_bytes: the peak of its rehearsal.
        least_bytes: the smallest budget that is known to suffice.
    """

    point_index: int | None
    peak_bytes: int
    least_bytes: int


def choose(
    predicted_bytes: Sequence[int],
    budget_bytes: int,
    rehearse: Callable[[int], int],
    *,
    fastest_within: float = 1.0,
) -> Choice:
    """Return the fastest point whose rehearsal keeps to the budget.

    At most about ``log2(n) + 3`` of n points are rehearsed, and two if the predictions hold.

    Args:
        predicted_bytes: the peak of each point, from the slowest with the least bytes to the
            fastest.
        budget_bytes: the most that a rehearsal may take.
        rehearse: a function from the index of a point to the peak of its rehearsal.
        fastest_within: the fastest point is rehearsed if its predicted peak is at most so many
            budgets.

    Example:
        >>> from recoup.planning.choosing import choose
        >>> choose([10, 20, 30], 25, rehearse=lambda index: [11, 21, 31][index])
        Choice(point_index=1, peak_bytes=21, least_bytes=11)
    """
    peaks: dict[int, int] = {}

    def fits(index: int) -> bool:
        if index not in peaks:
            peaks[index] = rehearse(index)
        return peaks[index] <= budget_bytes

    num_fitting = sum(peak <= budget_bytes for peak in predicted_bytes)
    found = num_fitting - 1 if num_fitting and fits(num_fitting - 1) else None
    fastest = len(predicted_bytes) - 1
    is_near = predicted_bytes[fastest] <= fastest_within * budget_bytes
    if fastest >= num_fitting and is_near and fits(fastest):  # See Rule 4
        found = fastest
    visited: list[int] = []
    if found is None:
        low, high = 0, len(predicted_bytes)
        while low < high:
            middle = (low + high) // 2
            if middle and middle >= num_fitting:  # See Rule 2
                high = middle
                continue
            visited.append(middle)
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
        least = min(peaks[index] for index in (*visited, *ends))
        return Choice(None, least, least)
    return Choice(found, peaks[found], min(peaks[index] for index in ends))
