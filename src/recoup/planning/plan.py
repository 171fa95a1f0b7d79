"""Plans: what each block of a model does, the model that follows it, and the picture of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from recoup._core.tensors import check_modules
from recoup.memory.figures import COLORS, INK, QUIET, finish, path_of, rendered
from recoup.planning.following import PlanFollower
from recoup.planning.forwards import Args, Follower, Kwargs, WrappedForwards, wrapped_forwards_in
from recoup.planning.pending import PendingForwards, StepBound
from recoup.planning.report import PlanReport
from recoup.schedules import trace

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
        num = self.planned.num_forwards  # together they hold what was measured
        held = [self._held_bytes // num] * (num if num > 1 else 1 + (self.pending or 0))
        return StepBound(
            self._room.of(self.budget_bytes), self._room, self._rehearsed_bytes, held,
            sum(p.nbytes for p in self.model.parameters() if p.requires_grad),
            () if self.planned.root is None else self.modes, pending,
        )  # fmt: skip

    def follower(self, bound: StepBound | None = None) -> PlanFollower:
        """Return a follower of the plan, which warns once of larger arguments.

        Args:
            bound: the bound that it sets to steps; None for its own.
        """
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


# -- pictures --------------------------------------------------------------------------------------

_BEFORE, _AFTER = COLORS["linear"], COLORS["sqrt"]


# The plans over one kind of blocks: its name, and for each plan the peak of a step, in bytes, and
# its time, where 1 is a step with everything kept.
Line = tuple[str, Sequence[tuple[int, float]]]


def draw_frontier(lines: Sequence[Line], path: Path) -> Path:
    """Draw the plans over each kind of blocks into a file, and return the path."""
    unit, name = _unit(max(size for _, points in lines for size, _ in points))

    def draw_panel(panels: Sequence[Any]) -> None:
        _frontier(panels[0], lines, unit, name)

    path.write_bytes(rendered(draw_panel, path.suffix, (6.0, 4.2), num_panels=1))
    return path


def draw(plan: PlanReport, path: Path) -> Path:
    """Draw a plan into a file, and return the path."""
    unit, name = _unit(plan.most_bytes)

    def draw_panels(panels: Sequence[Any]) -> None:
        _over_a_step(panels[0], plan, unit, name)
        least, whole = plan.frontier[-1].seconds, plan.kept_seconds or 1.0
        points = [
            (plan.baseline_bytes + each.peak_bytes, 1 + (each.seconds - least) / whole)
            for each in plan.frontier
        ]
        _frontier(panels[1], [("all plans", points)], unit, name)
        size, time = points[plan.frontier.index(plan.point)]
        panels[1].plot(
            size / unit, time, "o", color=_AFTER, markersize=9,
            markeredgecolor="white", zorder=5, clip_on=False, label="this plan",
        )  # fmt: skip
        panels[1].legend(loc="upper right", frameon=False, fontsize=9.5)

    path.write_bytes(rendered(draw_panels, path.suffix, (11.0, 4.2), num_panels=2))
    return path


def _unit(num_bytes: int) -> tuple[int, str]:
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= 2 * size:
            return size, name
    return 1, "bytes"


def _frontier(axes: Any, lines: Sequence[Line], unit: int, unit_name: str) -> None:
    colors = (_AFTER, _BEFORE, *(QUIET for _ in lines))
    for (name, points), color in zip(lines, colors, strict=False):
        sizes, times = [size / unit for size, _ in points], [time for _, time in points]
        mark = "o" if len(sizes) == 1 else None  # one plan is a point
        axes.step(sizes, times, where="post", color=color, linewidth=2.2, label=name, marker=mark)
    times = [time for _, points in lines for _, time in points]
    low, high = min(times), max(times)
    height = (high - low) or 0.1
    axes.set_ylim(low - 0.05 * height, high + 0.25 * height)  # room for the legend
    axes.set_xlim(0, None)
    axes.legend(loc="upper right", frameon=False, fontsize=9.5)
    finish(axes, "Predicted time of a step (1: everything kept)", f"Peak of a step ({unit_name})")


def _over_a_step(axes: Any, plan: PlanReport, unit: int, name: str) -> None:
    again = trace(plan.frontier[-1].schedule, plan.costs)[-1].seconds
    first = plan.kept_seconds / again if again else 1.0  # that everything kept takes as measured
    whole = plan.kept_seconds or 1.0
    for point, color, text in (
        (plan.frontier[-1], _BEFORE, "everything kept"),
        (plan.point, _AFTER, "this plan"),
    ):
        # The costs bound a peak from above; the point has what was measured.
        most = plan.baseline_bytes + point.peak_bytes
        times, levels, last = [0.0], [plan.baseline_bytes], 0.0
        for moment in trace(point.schedule, plan.costs, first):  # its peak is at its middle
            now = moment.seconds / whole
            times += [(last + now) / 2, now]
            levels += [plan.baseline_bytes + b for b in (moment.peak_bytes, moment.held_bytes)]
            last = now
        axes.plot(times, [min(b, most) / unit for b in levels], color=color, label=text)
    budget = plan.budget_bytes / unit
    if plan.policy is None:
        axes.axhline(budget, color=INK, linewidth=1.0, linestyle=(0, (5, 3)), label="budget")
    axes.set_ylim(0, 1.15 * plan.most_bytes / unit)
    axes.set_xlim(0, None)
    axes.legend(loc="upper left", frameon=False, fontsize=9.5, ncols=3)
    finish(axes, f"Memory over a step ({name})", "Time (1: a step with everything kept)")
