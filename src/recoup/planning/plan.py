"""Plans: what each block of a model does with its residuals, and the model that follows it."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from recoup._core.drift_guard import DriftGuard
from recoup._core.tensor_arguments import check_modules
from recoup.planning.advice import held_by_others, what_can_be_inverted
from recoup.planning.following import PlanFollower, PlannedModel
from recoup.planning.forwards import Follower, WrappedForwards, wrapped_forwards_in
from recoup.planning.module_groups import modules_of
from recoup.planning.pending import PendingForwards, StepBound
from recoup.planning.report import (
    BlockPlan,
    Summary,
    described,
    described_in_html,
    headline,
    rows_of,
)
from recoup.planning.sizes import ArgumentSizes
from recoup.schedules import Action, Cost, Point, Schedule

__all__ = ["Plan", "applied_plans", "own_forwards"]

_logger = logging.getLogger(__name__)


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
    """The interface of plans for several shapes, which a plan is the first of."""

    @property
    def plans(self) -> list[Plan]:
        """The plans."""
        ...

    @property
    def summary(self) -> str:
        """A line on the shapes that have a plan."""
        ...

    @property
    def followed_modules(self) -> list[nn.Module]:
        """The modules whose forwards go through the plans."""
        ...

    def begin(self, group: WrappedForwards) -> None:
        """Serve the calls of the model until `end`."""
        ...

    def end(self) -> None:
        """Serve no more calls."""
        ...

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose the plan for the next call, or make one."""
        ...

    def plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
        """Return the plan that serves a call with these arguments; None if there is none."""
        ...


class Plan:
    """A plan: what each block of a model does with its residuals; made by `recoup.plan`.

    Args:
        planned: the model and its blocks.
        costs: the costs of the calls of blocks, and of the code after them, in seconds.
        points: the plans that are best for some budget, from the least bytes to the most.
        point: the one of them that the model follows.
        rehearsed_bytes: the peak of a step that followed it.
        least_bytes: the smallest budget that is known to suffice, without `standing_bytes`.
        budget_bytes: the budget.
        standing_bytes: the part of it that is alive before a step; 0 for a budget of "step".
        step_seconds: the time of a step that follows it.
        kept_seconds: the time of the step that keeps all residuals.
        sizes: the sizes of the arguments of the step that was planned.
        held_bytes: the bytes that the forwards of the step held when its backward began.

    Attributes:
        model: the model.
        budget_bytes: the budget.
        standing_bytes: the part of it that is alive before a step.
        step_seconds: the time of a step that followed the plan.
        costs: the costs of the calls of blocks, and of the code after them, in seconds.
        frontier: the plans that are best for some budget, from the least bytes to the most. The
            `seconds` of each are those of all runs of blocks in forward and again, approximately;
            what backward takes itself comes on top.
    """

    def __init__(
        self,
        planned: PlannedModel,
        costs: Sequence[Cost],
        points: Sequence[Point],
        point: Point,
        *,
        rehearsed_bytes: int,
        least_bytes: int,
        budget_bytes: int,
        standing_bytes: int,
        step_seconds: float,
        kept_seconds: float,
        sizes: ArgumentSizes,
        held_bytes: int,
    ) -> None:
        self.model = planned.model
        self.budget_bytes = budget_bytes
        self.standing_bytes = standing_bytes
        self.step_seconds = step_seconds
        self.costs = tuple(costs)
        self.frontier = tuple(points)
        self.held_by_others = tuple(held_by_others(planned.model, planned.calls))
        self._advice = list(self.held_by_others)
        if planned.guard is None:
            self._advice[:0] = what_can_be_inverted(planned.model, planned.calls)
        elif point.num_inverses:
            tolerance = f"{planned.guard.tolerance:g} of their norm"
            self._advice.insert(
                0,
                f"inverted blocks round: gradients are equal to {tolerance}, of which the drift "
                "guard takes care (`plan.drift`)",
            )
        self.planned = planned
        self.replanner: PlanFamily | None = None
        self._held_bytes = held_bytes
        blocks = [module for _, block in planned.blocks for module in modules_of(block)]
        modules = [planned.model, *blocks]
        self._modes = [(module, module.training) for module in modules]
        self._point = point
        self._rehearsed_bytes = rehearsed_bytes
        self._least_bytes = least_bytes
        self._kept_seconds = kept_seconds
        self.sizes = sizes
        self._forwards: WrappedForwards | None = None
        self._pending = PendingForwards()

    # -- properties ------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """The number of modules that are its blocks."""
        return len(self.planned.blocks)

    @property
    def num_seen(self) -> int:
        """The number of blocks that were called during planning; others will be recomputed."""
        return len({id(call.module) for call in self.planned.calls})

    @property
    def drift(self) -> DriftGuard | None:
        """The drift guard of the blocks that it inverts; None if it inverts none.

        Where blocks that are no chain together are inverted, it is that of the first of them.
        """
        return self.planned.guard if self._point.num_inverses else None

    @property
    def schedule(self) -> Schedule:
        """The schedule of the blocks; its last stage is the code after the blocks."""
        return self._point.schedule

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of `schedule`."""
        return self.schedule.actions

    @property
    def predicted_peak_bytes(self) -> int:
        """The peak of a step as predicted from the cost of each block."""
        return self.standing_bytes + self._point.peak_bytes

    @property
    def predicted_time_ratio(self) -> float:
        """The predicted time of a step, where 1 is the plain step."""
        seconds = self._kept_seconds + self._point.seconds - self.frontier[-1].seconds
        return seconds / self._kept_seconds if self._kept_seconds else 1.0

    @property
    def rehearsed_peak_bytes(self) -> int:
        """The peak of the step that was run under the plan.

        If none of the forwards that were tried called all blocks (LayerDrop), it is at least the
        predicted peak of a step that does.
        """
        return self.standing_bytes + self._rehearsed_bytes

    @property
    def least_bytes(self) -> int:
        """The smallest budget known to suffice: the peak of a rehearsal with the least bytes."""
        return self.standing_bytes + self._least_bytes

    @property
    def most_bytes(self) -> int:
        """The predicted peak of a step that keeps every residual."""
        return self.standing_bytes + self.frontier[-1].peak_bytes

    @property
    def blocks(self) -> tuple[BlockPlan, ...]:
        """The planned treatment of each block, in the order of forward."""
        return rows_of(self.planned.calls, self.costs, self.schedule)

    def __str__(self) -> str:
        return described(self._summary())

    def __repr__(self) -> str:
        state = "applied" if self.is_applied else "not applied"
        return f"Plan({type(self.model).__name__}, {headline(self._summary())}; {state})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the table that ``print`` shows as text."""
        return described_in_html(self._summary())

    def _summary(self) -> Summary:
        return Summary(
            model=type(self.model).__name__,
            rows=self.blocks,
            num_blocks=self.num_blocks,
            num_seen=self.num_seen,
            budget_bytes=self.budget_bytes,
            standing_bytes=self.standing_bytes,
            predicted_bytes=self.predicted_peak_bytes,
            rehearsed_bytes=self.rehearsed_peak_bytes,
            least_bytes=self.least_bytes,
            most_bytes=self.most_bytes,
            tiled=None if self.planned.tiled is None else self.planned.tiled.described,
            advice=[
                *self._advice,
                *([] if self.replanner is None else [self.replanner.summary]),
            ],
        )

    @property
    def family(self) -> tuple[Plan, ...]:
        """The plans for the shapes that occurred, with ``replan=True``; otherwise this plan."""
        return tuple([self] if self.replanner is None else self.replanner.plans)

    def most_lost(self, share: float) -> float:
        """Return how much slower it is at most than other plans, if all took less bytes.

        Args:
            share: the bytes that every plan would take, relative to those that it takes.

        Returns:
            The time lost, relative to that of a step.
        """
        budget = (self.budget_bytes - self.standing_bytes) / max(share, 1e-9)
        fitting = [point.seconds for point in self.frontier if point.peak_bytes <= budget]
        least = min([self._point.seconds, *fitting])
        seconds = self._kept_seconds + least - self.frontier[-1].seconds
        return (self._point.seconds - least) / seconds if seconds > 0 else 0.0

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
        """Let the model follow the plan as `apply` does, as long as the plan object is alive.

        Returns:
            The plan.
        """
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
        """Return the bound that it sets to steps.

        Args:
            pending: the forwards of the model whose backward is pending.
        """
        return StepBound(
            self.budget_bytes - self.standing_bytes, self._rehearsed_bytes, self._held_bytes,
            sum(p.nbytes for p in self.model.parameters() if p.requires_grad),
            self.planned.num_forwards, self._modes if self.planned.root else (), pending,
        )  # fmt: skip

    def follower(self, bound: StepBound | None = None) -> PlanFollower:
        """Return a follower of the plan, which warns once of larger arguments.

        Args:
            bound: the bound that it sets to steps; None for its own.
        """
        bound = self.bound(self._pending) if bound is None else bound
        return self.planned.follower(self.schedule, self.sizes, bound=bound)

    def _begin(self, *, is_held: bool) -> None:
        family = self.replanner
        if family is None:
            self._forwards = WrappedForwards(self.follower(), self, is_held=is_held)
            self._forwards.begin(self.planned.followed_modules)
        else:
            self._forwards = WrappedForwards(family, self, is_held=is_held)
            self._forwards.begin(family.followed_modules)
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
            ValueError: `path` has another ending.
        """
        from recoup.planning.figure import Plans, draw

        bounds = (self.budget_bytes, self.standing_bytes)
        plans = Plans(self.costs, self.frontier, self._point, self._kept_seconds, *bounds)
        return draw(plans, Path(path))
