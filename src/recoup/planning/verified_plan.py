"""The plan for priced blocks: the fastest that fits, and whose results are the plain step's.

NOTE [ Few rehearsals ]

Rule 1. The fastest point that is predicted to fit is rehearsed first, and mostly fits. If it does
        not, the points below it are bisected. A rehearsal may take more or less than predicted, so
        every point that is returned has been rehearsed.
Rule 2. The point with the least bytes is always rehearsed, even if it is predicted not to fit. So
        its bytes always succeed as a budget, and an error can name them. If it took more than the
        point that keeps everything is predicted to take (where blocks keep less than their
        recomputation needs), that point is rehearsed, too.
Rule 3. Where a slower plan is also less exact (inverses), the point that keeps everything is tried
        even if it is predicted to take somewhat more than the budget.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

from recoup.errors import BudgetError, ChangedError, ReplayError
from recoup.memory import format_bytes
from recoup.planning.following import PlannedModel
from recoup.planning.options import Room
from recoup.planning.plan import Plan
from recoup.planning.priced_blocks import PricedBlocks
from recoup.planning.ranks import is_sharded, largest_among_ranks
from recoup.planning.step import Rehearsed, rehearse_planned, seconds_of
from recoup.planning.verification import DifferentStepError

_NEAR = 1.25  # budgets; what is predicted to take so much may take less
_NUM_ROUNDS = 3
_NOISE = 0.03  # a relative difference of times that says nothing
_MORE_REHEARSALS = 3  # of a plan whose ranks hold parts of the model


def verified(kind: PricedBlocks, budget_bytes: int, room: Room) -> Plan:
    """Return a plan whose step gives the results of the plain one (See NOTE [ Compared steps ]).

    Raises:
        BudgetError: no plan keeps to the budget.
        DifferentStepError: the results of every plan that was tried differ.
    """
    kind.expect_plain()
    try:
        return _planned(kind, budget_bytes, room)
    except (ChangedError, ReplayError) as error:  # steps differ, or runs of a block
        difference = error
    kind.expect_again()
    with suppress(ChangedError, ReplayError):
        return _planned(kind, budget_bytes, room)
    for what, other in _simpler(kind):
        with suppress(ChangedError, ReplayError, BudgetError):
            plan = _rehearsed(other, budget_bytes, room)
            warnings.warn(f"The plan {what}. With the one first chosen: {difference}", stacklevel=6)
            return plan
    if isinstance(difference, DifferentStepError):
        raise difference
    raise DifferentStepError(str(difference)) from difference


def _planned(kind: PricedBlocks, budget_bytes: int, room: Room) -> Plan:
    """Return the plan, with fewer ways where these take more bytes than was predicted."""
    errors: list[BudgetError] = []
    for each in _with_fewer_ways(kind):
        try:
            return _rehearsed(each, budget_bytes, room)
        except BudgetError as error:
            errors.append(error)
    raise min(errors, key=lambda error: error.least_bytes)


def _with_fewer_ways(kind: PricedBlocks) -> Iterator[PricedBlocks]:
    """Yield the blocks, then without inverses, then without results that are kept, either."""
    yield kind
    if kind.policy is not None:
        return
    if kind.guard is not None:
        yield (kind := _without_inverses(kind))
    if any(cost.results for cost in kind.costs):
        yield _without_results(kind)


def _simpler(kind: PricedBlocks) -> Iterator[tuple[str, PricedBlocks]]:
    """Yield the same blocks with fewer ways, and what plans for them do."""
    if kind.policy is not None:
        return
    if kind.guard is not None:
        kind = _without_inverses(kind)._replace(guard=None)
        yield "inverts nothing", kind
    yield "keeps no results of products", _without_results(kind)
    yield "keeps all residuals", kind._replace(points=kind.points[-1:])


def _without_results(kind: PricedBlocks) -> PricedBlocks:
    return kind.with_costs([replace(cost, results=()) for cost in kind.costs])


def _without_inverses(kind: PricedBlocks) -> PricedBlocks:
    return kind.with_costs([replace(cost, is_invertible=False) for cost in kind.costs])


def _seconds_under(plan: Plan, kind: PricedBlocks) -> float:
    """Return the seconds of a step of `kind` that follows a plan which was rehearsed."""
    with plan.planned.followed(plan.schedule):
        return seconds_of(kind.step)


def faster_of(found: Sequence[tuple[Plan, PricedBlocks]]) -> Plan:
    """Return the plan whose steps, run in turn, are fastest; the smallest of those close to it."""
    if len(found) == 1:
        return found[0][0]
    model = found[0][0].model
    rounds = [[_seconds_under(*one) for one in found] for _ in range(_NUM_ROUNDS)]
    seconds = largest_among_ranks(model, list(map(min, zip(*rounds, strict=True))))
    quick = (1 + _NOISE) * min(seconds)
    plans = [plan for (plan, _), taken in zip(found, seconds, strict=True) if taken <= quick]
    return min(plans, key=lambda plan: plan.rehearsed_peak_bytes)


def _rehearsed(kind: PricedBlocks, budget_bytes: int, room: Room) -> Plan:
    """Return the plan for the fastest point whose rehearsal keeps to the budget.

    Raises:
        BudgetError: no rehearsal keeps to the budget.
        ChangedError: a block does not repeat its first run.
        ReplayError: likewise, or the results of a rehearsal differ from those of the plain step.
    """
    step, budget = kind.step, room.of(budget_bytes)
    last: dict[int, Rehearsed] = {}  # of each point
    planned = PlannedModel.of(step, kind.blocks, kind.calls, kind.guard)

    def rehearse(index: int) -> int:
        point = kind.points[index]
        tolerance = kind.guard.tolerance if kind.guard and point.num_inverses else 0.0
        with planned.followed(point.schedule):
            found = rehearse_planned(step, tolerance)
            for _ in range(_MORE_REHEARSALS if is_sharded(step.model) else 0):
                if found.peak_bytes > budget:  # See Rule 3 of ranks.py
                    found = min(found, rehearse_planned(step, tolerance), key=itemgetter(0))
        last[index] = found
        return kind.bytes_beside(found.peak_bytes, found.held_bytes)

    # The plain step has shown that there is room for it (See Rule 3).
    within = _NEAR if kind.guard is not None and step.verification.is_plain else 1.0
    points = kind.points if kind.policy is None else kind.points[:1]
    peaks = [point.peak_bytes for point in points]
    choice = choose(peaks, budget, rehearse, fastest_within=within)
    if choice.point_index is None:
        raise _too_small(kind, budget_bytes, room, choice.least_bytes)
    point = kind.points[choice.point_index]
    with planned.followed(point.schedule):
        step_seconds = seconds_of(step)  # where a block may repeat its first run by turns
    return Plan(
        kind, planned, point, last[choice.point_index]._replace(peak_bytes=choice.peak_bytes),
        step_seconds=step_seconds, least_bytes=choice.least_bytes, budget_bytes=budget_bytes,
        room=room,
    )  # fmt: skip


def _too_small(kind: PricedBlocks, budget_bytes: int, room: Room, step_bytes: int) -> BudgetError:
    tail, tiling, baseline = kind.costs[-1], "", room.baseline_bytes
    after = max(tail.tape_run_bytes, tail.reverse_bytes)
    least = room.budget_for(step_bytes)
    if not kind.may_tile and 2 * after > step_bytes:
        tiling = (
            f" {format_bytes(after)} are for the code after the blocks: `tiles=True` takes a part "
            "of that if it is a linear output layer and its cross entropy."
        )
    alive = f", {format_bytes(baseline)} of which are alive before a step" if baseline else ""
    alive += f", with a headroom of {room.headroom:.3g} of it" if room.headroom else ""
    return BudgetError(
        f"`budget` is {format_bytes(budget_bytes)} ({budget_bytes} bytes), but the least that a "
        f"step of this model was seen to take is {format_bytes(least)} ({least} bytes{alive}). "
        f"Give that much, a smaller batch, or smaller `blocks`.{tiling}",
        least,
    )


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

    At most about ``log2(n) + 4`` of n points are rehearsed, and two if the predictions hold.

    Args:
        predicted_bytes: the peak of each point, from the slowest with the least bytes to the
            fastest.
        budget_bytes: the most that a rehearsal may take.
        rehearse: a function from the index of a point to the peak of its rehearsal.
        fastest_within: the fastest point is rehearsed if its predicted peak is at most so many
            budgets.

    Example:
        >>> from recoup.planning.verified_plan import choose
        >>> choose([10, 20, 30], 25, rehearse=lambda index: [11, 21, 31][index])
        Choice(point_index=1, peak_bytes=21, least_bytes=11)
    """
    peaks: dict[int, int] = {}

    def fits(index: int) -> bool:
        if index not in peaks:
            peaks[index] = rehearse(index)
        return peaks[index] <= budget_bytes

    found: int | None = None
    last = len(predicted_bytes) - 1
    low, high = 0, sum(peak <= budget_bytes for peak in predicted_bytes)
    is_near = predicted_bytes[last] <= fastest_within * budget_bytes
    if high <= last and is_near and fits(last):  # See Rule 3
        found, low = last, high
    index = high - 1
    while low < high:
        if fits(index):
            found, low = index, index + 1
        else:
            high = index
        index = (low + high) // 2
    if fits(0) and found is None:  # See Rule 2
        found = 0
    least = peaks[0]
    if predicted_bytes[last] < least:
        found = last if fits(last) else found
        least = min(least, peaks[last])
    return Choice(found, least if found is None else peaks[found], least)
