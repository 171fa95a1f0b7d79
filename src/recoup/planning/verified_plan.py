"""The plan for priced blocks: the fastest that fits, and whose results are the plain step's."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from recoup.errors import BudgetError, ChangedError, ReplayError
from recoup.memory import format_bytes
from recoup.planning.advice import what_can_be_inverted
from recoup.planning.choosing import choose
from recoup.planning.following import PlannedModel
from recoup.planning.plan import Plan
from recoup.planning.priced_blocks import PricedBlocks, expect_again, expect_plain
from recoup.planning.ranks import is_sharded
from recoup.planning.sizes import ArgumentSizes
from recoup.planning.step import peak_of, seconds_of
from recoup.planning.verification import DifferentStepError

__all__ = ["seconds_under", "verified"]

_NEAR = 1.25  # budgets; what is predicted to take so much may take less
_MORE_REHEARSALS = 3  # of a plan whose ranks hold parts of the model


def verified(kind: PricedBlocks, device: torch.device, budget_bytes: int, standing: int) -> Plan:
    """Return a plan whose step gives the results of the plain one (See NOTE [ Compared steps ]).

    Raises:
        BudgetError: no plan keeps to the budget.
        DifferentStepError: the results of every plan that was tried differ.
    """

    def planned(kind: PricedBlocks) -> Plan:
        try:
            return _rehearsed(kind, device, budget_bytes, standing)
        except BudgetError as error:
            if kind.guard is None:
                raise
            too_small = error
        try:  # inverses may take more bytes than was predicted
            return _rehearsed(_without_inverses(kind), device, budget_bytes, standing)
        except BudgetError as error:
            raise min(error, too_small, key=lambda each: each.least_bytes) from None

    expect_plain(kind, device)
    try:
        return planned(kind)
    except DifferentStepError as error:
        difference = error
    expect_again(kind, device)
    with suppress(DifferentStepError):
        return planned(kind)
    for what, other in _simpler(kind):
        with suppress(DifferentStepError, BudgetError):
            plan = planned(other)
            warnings.warn(f"The plan {what}. With the one first chosen: {difference}", stacklevel=6)
            return plan
    raise difference


def _simpler(kind: PricedBlocks) -> Iterator[tuple[str, PricedBlocks]]:
    """Yield the same blocks with fewer ways, and what plans for them do."""
    if kind.guard is not None:
        kind = _without_inverses(kind)._replace(guard=None)
        yield "inverts nothing", kind
    costs = [replace(cost, variants=()) for cost in kind.costs]
    yield "keeps no results of products", kind.with_costs(costs)
    yield "keeps all residuals", kind._replace(points=kind.points[-1:])


def _without_inverses(kind: PricedBlocks) -> PricedBlocks:
    return kind.with_costs([replace(cost, is_invertible=False) for cost in kind.costs])


@contextmanager
def _as_differences() -> Generator[None]:
    """A context in which a block that does not repeat its first run is a step that differs."""
    try:
        yield
    except DifferentStepError:
        raise
    except (ChangedError, ReplayError) as error:
        raise DifferentStepError(str(error)) from error


def seconds_under(plan: Plan, kind: PricedBlocks) -> float:
    """Return the seconds of a step of `kind` that follows a plan which was rehearsed."""
    with plan.planned.followed(plan.schedule):
        return seconds_of(kind.step)


def _rehearsed(kind: PricedBlocks, device: torch.device, budget_bytes: int, standing: int) -> Plan:
    """Return the plan for the fastest point whose rehearsal keeps to the budget.

    Raises:
        BudgetError: no rehearsal keeps to the budget.
        DifferentStepError: the results of a rehearsal differ from those of the plain step.
    """
    step, budget = kind.step, budget_bytes - standing
    held: dict[int, int] = {}  # by each rehearsal, when its backward began
    planned = PlannedModel.of(step, kind.blocks, kind.calls, kind.guard)
    is_partly_estimated = any(call.is_estimated for call in kind.calls)

    def rehearse(index: int) -> int:
        point = kind.points[index]
        tolerance = kind.guard.tolerance if kind.guard and point.num_inverses else 0.0
        with planned.followed(point.schedule), _as_differences():
            peak_bytes = peak_of(step, device, tolerance)
            for _ in range(_MORE_REHEARSALS if is_sharded(step.model) else 0):
                if peak_bytes > budget:  # See Rule 3 of ranks.py
                    peak_bytes = min(peak_bytes, peak_of(step, device, tolerance))
        held[index] = step.seen.held_bytes
        # Other forwards call more blocks than the rehearsal did.
        return max(peak_bytes, point.peak_bytes) if is_partly_estimated else peak_bytes

    # What inverts nothing is exact, so it is tried where inverses were predicted to be needed, if
    # the plain step has shown that there is room for it.
    within = _NEAR if kind.guard is not None and step.verification.is_plain else 1.0
    peaks = [point.peak_bytes for point in kind.points]
    choice = choose(peaks, budget, rehearse, fastest_within=within)
    if choice.point_index is None:
        advice = [] if kind.guard else what_can_be_inverted(step.model, kind.calls)
        least = standing + choice.least_bytes
        raise _too_small(kind, budget_bytes, standing, least, advice)
    point = kind.points[choice.point_index]
    with planned.followed(point.schedule):
        step_seconds = seconds_of(step)
    return Plan(
        planned, kind.costs, kind.points, point,
        rehearsed_bytes=choice.peak_bytes, least_bytes=choice.least_bytes,
        budget_bytes=budget_bytes, standing_bytes=standing,
        step_seconds=step_seconds, kept_seconds=kind.kept_seconds,
        sizes=ArgumentSizes(step.args, step.kwargs), held_bytes=held[choice.point_index],
    )  # fmt: skip


def _too_small(
    kind: PricedBlocks, budget_bytes: int, standing: int, least: int, advice: Sequence[str]
) -> BudgetError:
    after = kind.costs[-1].tape_run_bytes
    tiling = ""
    if not kind.may_tile and 2 * after > least - standing:
        tiling = (
            f" {format_bytes(after)} are for the code after the blocks: `tiles=True` takes a part "
            "of that if it is a linear output layer and its cross entropy."
        )
    alive = f", {format_bytes(standing)} of which are alive before a step" if standing else ""
    inverting = "".join(f" {line}" for line in advice)
    return BudgetError(
        f"`budget` is {format_bytes(budget_bytes)} ({budget_bytes} bytes), but the least that a "
        f"step of this model was seen to take is {format_bytes(least)} ({least} bytes{alive}). "
        f"Give that much, a smaller batch, or smaller `blocks`.{tiling}{inverting}",
        least,
    )
