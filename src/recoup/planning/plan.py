"""Plans: the fastest that keeps to a budget, and the model that follows it.

NOTE [ Few rehearsals ]

Rule 1. The fastest point that is predicted to fit is rehearsed first, and mostly fits. If not, the
        points below it are bisected. Every point that is returned has been rehearsed.
Rule 2. The point with the least bytes is always rehearsed, so its bytes succeed as a budget, and an
        error can name them. If it took more than the point that keeps everything is predicted to
        take (where blocks keep less than their recomputation needs), that one is rehearsed, too.
Rule 3. Where a slower plan is also less exact (inverses), the point that keeps everything is tried
        even if it is predicted to take somewhat more than the budget.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import nn

from recoup._core.tensors import check_modules
from recoup.errors import BudgetError, ChangedError, ReplayError
from recoup.memory import format_bytes
from recoup.memory.figures import path_of
from recoup.planning.following import PlanFollower, PlannedModel
from recoup.planning.forwards import Args, Follower, Kwargs, WrappedForwards, wrapped_forwards_in
from recoup.planning.options import Room
from recoup.planning.pending import PendingForwards, StepBound
from recoup.planning.priced_blocks import PricedBlocks
from recoup.planning.report import PlanReport, draw
from recoup.planning.step import (
    Rehearsed,
    is_sharded,
    largest_among_ranks,
    rehearse_planned,
    seconds_of,
)
from recoup.planning.verification import DifferentStepError

_logger = logging.getLogger(__name__)
_NEAR = 1.25  # budgets; what is predicted to take so much may take less
_NUM_ROUNDS = 3
_NOISE = 0.03  # a relative difference of times that says nothing
_MORE_REHEARSALS = 3  # of a plan whose ranks hold parts of the model


def applied_plans(model: nn.Module) -> list[Plan]:
    """Return the plans that modules of a model follow.

    Use it to find a plan again and remove it with `Plan.remove`.

    Args:
        model: any module.

    Returns:
        The plans of the model, of its submodules, and of other models that have one of its modules
        as a block, each once.

    Example:
        >>> import recoup, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> made = recoup.plan(model, torch.ones(2, 8), budget="1 MiB").apply()
        >>> recoup.applied_plans(model) == [made]
        True
        >>> made.remove()
        >>> recoup.applied_plans(model)
        []
    """
    check_modules(model=model)
    owners = [each.owner for each in wrapped_forwards_in(model)]
    return [owner for owner in owners if isinstance(owner, Plan)]


def own_forwards(model: nn.Module) -> list[WrappedForwards]:
    """Return the forwards that a plan for `model` itself has wrapped."""
    found = wrapped_forwards_in(model)
    return [each for each in found if getattr(each.owner, "model", None) is model]


class PlanFamily(Follower, Protocol):
    """The interface of plans for several shapes, which a plan is the first of; printable."""

    @property
    def plans(self) -> list[Plan]:
        """The plans."""
        ...

    def begin(self, group: WrappedForwards) -> None:
        """Wrap the forwards of the model and its blocks, and serve their calls until `end`."""
        ...

    def end(self) -> None:
        """Serve no more calls."""
        ...

    def serve(self, args: Args, kwargs: Kwargs) -> None:
        """Choose the plan for the next call, or make one."""
        ...


class Plan(PlanReport):
    """A plan: what each block of a model does with its residuals; made by `recoup.plan`.

    Attributes:
        model: the model.
        budget_bytes: the budget; `sys.maxsize` under a policy.
        policy: the policy that it follows; None if it was found for a budget.
        pending: how many forwards of a pipeline wait beside a step that follows it.
        baseline_bytes: the part of it that is alive before a step.
        headroom: the part of it that is left for fragmentation.
        num_blocks: the number of modules that are its blocks.
        num_seen: the number of blocks that the measured step called; others will be recomputed.
        schedule: the schedule of the blocks; its last stage is the code after the blocks.
        actions: the actions of `schedule`.
        predicted_peak_bytes: the peak of a step as predicted from the cost of each block.
        rehearsed_peak_bytes: the peak of the step that was run under the plan.
        least_bytes: the smallest budget known to suffice: for the rehearsal that took the least
            bytes.
        most_bytes: the predicted peak of a step that keeps every residual.
        step_seconds: the time of a step that followed the plan.
        costs: the costs of the calls of blocks, and of the code after them, in seconds.
        frontier: the plans that are best for some budget, from the least bytes to the most. The
            `seconds` of each are those of all runs of blocks in forward and again, approximately;
            what backward takes itself comes on top.
    """

    replanner: PlanFamily | None = None
    _forwards: WrappedForwards | None = None

    @functools.cached_property
    def _pending(self) -> PendingForwards:
        return PendingForwards()

    def __repr__(self) -> str:
        state = "applied" if self.is_applied else "not applied"
        return f"Plan({type(self.model).__name__}, {self.headline()}; {state})"

    def _notes(self) -> list[str]:
        family = [] if self.replanner is None else [str(self.replanner)]
        return [*super()._notes(), *family]

    @property
    def family(self) -> tuple[Plan, ...]:
        """The plans for the shapes that occurred, with ``replan=True``; otherwise this plan."""
        return tuple([self] if self.replanner is None else self.replanner.plans)

    # -- following -------------------------------------------------------------------------

    @property
    def is_applied(self) -> bool:
        """Whether the model follows it."""
        return self._forwards is not None and self._forwards.is_in_place

    def apply(self) -> Plan:
        """Let the model follow the plan in every forward with gradients, until `remove`.

        A plan that the model follows already is removed. The logger "recoup.planning.plan" has one
        line (INFO) of what the model follows from now on: the `repr` of the plan.

        Returns:
            The plan.

        Raises:
            ValueError: a block that another model shares follows the plan of that model.
        """
        if not self.is_applied:
            self._apply(is_held=True)
            if _logger.isEnabledFor(logging.INFO):
                _logger.info("%s", repr(self))  # as it is now, and not when a handler asks
        return self

    def apply_while_held(self) -> Plan:
        """Let the model follow the plan as `apply` does, as long as the plan object is alive."""
        return self._apply(is_held=False)

    def _apply(self, *, is_held: bool) -> Plan:
        if not self.is_applied:
            replaced = [each for each in applied_plans(self.model) if each.model is self.model]
            for each in replaced:
                each.remove()
            try:
                self._begin(is_held=is_held)
            except BaseException:
                self.remove()
                for each in replaced:
                    each._apply(is_held=True)
                raise
        return self

    def bound(self, pending: PendingForwards) -> StepBound:
        """Return the bound that it sets to steps, beside the forwards whose backward is pending."""
        num = self.planned.num_forwards  # together they hold what was measured
        held = [self._held_bytes // num] * (num if num > 1 else 1 + (self.pending or 0))
        return StepBound(
            self._room.of(self.budget_bytes), self._room, self._rehearsed_bytes, held,
            sum(p.nbytes for p in self.model.parameters() if p.requires_grad),
            () if self.planned.root is None else self.modes, pending,
        )  # fmt: skip

    def follower(self, bound: StepBound | None = None) -> PlanFollower:
        """Return a follower of the plan, with the bound of the plan or another one."""
        bound = self.bound(self._pending) if bound is None else bound
        return PlanFollower(self.planned, self.schedule, self.sizes, bound)

    def _begin(self, *, is_held: bool) -> None:
        family = self.replanner
        follower = self.follower() if family is None else family
        self._forwards = WrappedForwards(follower, self, is_held=is_held)
        if family is None:
            self._forwards.begin(self.planned.followed_modules)
        else:
            family.begin(self._forwards)

    def remove(self) -> None:
        """Restore the forwards of the model; existing graphs still follow the plan."""
        if self.replanner is not None:
            self.replanner.end()
        self._pending.unwatch()
        forwards, self._forwards = self._forwards, None
        if forwards is not None:
            forwards.end()

    @contextmanager
    def applied(self) -> Generator[Plan]:
        """Return a context in which the model follows the plan; it restores the previous plan."""
        before = [each for each in applied_plans(self.model) if each.model is self.model]
        self._apply(is_held=True)
        try:
            yield self
        finally:
            self.remove()
            for each in before:
                if each is not self:
                    each._apply(is_held=True)

    def figure(self, path: str | Path) -> Path:
        """Draw memory over a step before and after, and time against bytes of all plans.

        Args:
            path: the path of the picture, ending in .png, .svg or .pdf.

        Returns:
            The path.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: `path` is none, or has another ending.
        """
        return draw(self, path_of(path))


# -- the plan for priced blocks --------------------------------------------------------------------


def verified(kind: PricedBlocks, budget_bytes: int, room: Room) -> Plan:
    """Return a plan whose step gives the results of the plain one (See NOTE [ Compared steps ])."""
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
    """Return the plan for the fastest point whose rehearsal keeps to the budget."""
    step, budget = kind.step, room.of(budget_bytes)
    last: dict[int, Rehearsed] = {}  # of each point
    planned = PlannedModel.of(step, kind.blocks, kind.calls, kind.guard)

    def rehearse(index: int) -> int:
        point = kind.points[index]
        tolerance = kind.guard.tolerance if kind.guard and point.num_inverses else 0.0
        with planned.followed(point.schedule):
            found = rehearse_planned(step, tolerance)
            for _ in range(_MORE_REHEARSALS if is_sharded(step.model) else 0):
                if found.peak_bytes > budget:  # See Rule 3 of NOTE [ One decision on all ranks ]
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
    """A point by its index, None if no rehearsal kept to the budget; its peak; the least budget."""

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

    At most about ``log2(n) + 4`` of n points, from the slowest with the least bytes to the fastest,
    are rehearsed, and two if the predictions hold. The fastest point is rehearsed if its predicted
    peak is at most `fastest_within` budgets.
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
