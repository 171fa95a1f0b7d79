"""A plan in numbers and pictures: a line, a table, what it does not choose, and its figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from recoup._core.devices import Peaks
from recoup._core.drift_guard import DriftGuard
from recoup.memory import format_bytes
from recoup.memory.figures import COLORS, INK, QUIET, finish, rendered
from recoup.memory.size import aligned, shown_beside
from recoup.planning.arguments import PlannedArguments
from recoup.planning.blocks import kind_of, modules_of
from recoup.planning.following import PlannedModel
from recoup.planning.options import Room
from recoup.planning.priced_blocks import PricedBlocks
from recoup.planning.pricing import MeasuredCall, selections
from recoup.planning.step import Rehearsed
from recoup.schedules import (
    Advance,
    Cost,
    Invert,
    Keep,
    Offload,
    Point,
    Schedule,
    Tape,
    simulate,
    trace,
)


class BlockPlan(NamedTuple):
    """The planned treatment of one call of a block.

    Args:
        name: the qualified name of the block.
        kind: its class.
        way: "keep", "keep products" (the results of products and attention; the rest is
            recomputed), "recompute", "recompute, offload" (its input waits in host memory) or
            "invert". In a plan over compiled blocks, the code that the block runs by follows:
            "compiled" with the share of its residuals that the compiler keeps, or "eager".
        num_forwards: the number of runs of its forward in a step, partial runs included.
        keeps_bytes: the bytes that it holds from forward to backward.
        saves_bytes: the bytes that it saves compared with keeping every residual.
        seconds: the approximate time that backward pays.
    """

    name: str
    kind: str
    way: str
    num_forwards: int
    keeps_bytes: int
    saves_bytes: int
    seconds: float


class PlanReport:
    """A plan in numbers, and how it prints: a point of a kind of blocks, and its rehearsal."""

    def __init__(
        self,
        kind: PricedBlocks,
        planned: PlannedModel,
        point: Point,
        rehearsed: Rehearsed,
        *,
        step_seconds: float,
        least_bytes: int,
        budget_bytes: int,
        room: Room,
    ) -> None:
        self.model = planned.model
        self.planned = planned
        self.num_blocks = len(planned.blocks)
        self.num_seen = len({id(call.module) for call in planned.calls})
        self.point, self.schedule, self.actions = point, point.schedule, point.schedule.actions
        self.policy, self.pending = kind.policy, kind.pending
        self.costs = tuple(kind.costs)
        self.frontier = tuple(kind.points)
        self.kept_seconds, self.plain_seconds = kind.seconds, kind.plain_seconds
        self.budget_bytes = budget_bytes
        self.baseline_bytes, self.headroom = room.baseline_bytes, room.headroom
        self.step_seconds = step_seconds
        blocks = [module for _, block in planned.blocks for module in modules_of(block)]
        self.modes = [(module, module.training) for module in (planned.model, *blocks)]
        self._rehearsed_bytes, self._held_bytes, _, self._rehearsed_peaks = rehearsed
        self.predicted_peak_bytes = self.baseline_bytes + point.peak_bytes
        self.rehearsed_peak_bytes = self.baseline_bytes + self._rehearsed_bytes
        self.most_bytes = self.baseline_bytes + self.frontier[-1].peak_bytes
        self.least_bytes, self._room = room.budget_for(least_bytes), room
        spare = self.usable_bytes / max(self.rehearsed_peak_bytes, 1)
        spare = math.inf if self.policy is not None else spare
        step = kind.step
        self.sizes = PlannedArguments(planned.model, step.args, step.kwargs, spare)
        self.held_by_others = tuple(_held_by_others(planned.model, planned.calls))

    @property
    def drift(self) -> DriftGuard | None:
        """The drift guard of the blocks that it inverts; None if it inverts none.

        Where blocks that are no chain together are inverted, it is that of the first of them.
        """
        return self.planned.guard if self.point.num_inverses else None

    @property
    def predicted_time_ratio(self) -> float:
        """The predicted time of a step, where 1 is the plain step."""
        seconds = self.kept_seconds + self.point.seconds - self.frontier[-1].seconds
        return seconds / self.plain_seconds if self.plain_seconds else 1.0

    @property
    def rehearsed_peaks(self) -> Peaks:
        """The rehearsed peak as it was `requested`, `allocated`, and `reserved` by the allocator.

        What is reserved has the memory in it that the allocator had cached before the step. It is
        None on the CPU, which caches nothing.
        """
        requested, allocated, reserved = self._rehearsed_peaks
        reserved = None if reserved is None else self.baseline_bytes + reserved
        return Peaks(self.baseline_bytes + requested, self.baseline_bytes + allocated, reserved)

    @property
    def usable_bytes(self) -> int:
        """The bytes that the plan keeps to: the budget without its headroom."""
        return self.baseline_bytes + self._room.of(self.budget_bytes)

    @property
    def blocks(self) -> tuple[BlockPlan, ...]:
        """The planned treatment of each block, in the order of forward."""
        return _rows_of(self.planned.calls, self.costs, self.schedule)

    def most_lost(self, share: float) -> float:
        """Return the most relative time lost to other plans if all took `share` of its bytes."""
        budget = (self.usable_bytes - self.baseline_bytes) / max(share, 1e-9)
        fitting = [point.seconds for point in self.frontier if point.peak_bytes <= budget]
        least = min([self.point.seconds, *fitting])
        seconds = self.kept_seconds + least - self.frontier[-1].seconds
        return (self.point.seconds - least) / seconds if seconds > 0 else 0.0

    def __str__(self) -> str:
        table = aligned(self._table(), left=range(3))
        return "\n".join([self._title(), self._peaks(), "", *table, *self._notes()])

    def headline(self) -> str:
        """Return the plan in one line, without the class of the model."""
        ways = Counter(row.way for row in self.blocks)
        counts = "; ".join(f"{ways[way]} {way}" for way in sorted(ways, key=_place))
        return f"{self._size()}: {counts}; rehearsed peak {format_bytes(self.rehearsed_peak_bytes)}"

    def _title(self) -> str:
        return f"Plan for {type(self.model).__name__}: {self._size()}"

    def _size(self) -> str:
        num, budget = len(self.planned.calls), "total" if self.baseline_bytes else "step"
        if self.policy is not None:
            return f'{num} blocks, policy "{self.policy}" ({budget})'
        return f"{num} blocks in {format_bytes(self.budget_bytes)} ({budget})"

    def _peaks(self) -> str:
        beside = shown_beside(self.rehearsed_peaks)
        least = f"least feasible {format_bytes(self.least_bytes)} ({self.least_bytes} bytes)"
        return (
            f"predicted peak {format_bytes(self.predicted_peak_bytes)}, rehearsed "
            f"{format_bytes(self.rehearsed_peak_bytes)}{beside}; everything kept "
            f"{format_bytes(self.most_bytes)}" + (f", {least}" if self.policy is None else "")
        )

    def _table(self) -> list[tuple[str, ...]]:
        table: list[tuple[str, ...]] = [
            ("block", "class", "way", "forwards", "keeps", "saves", "pays")
        ]
        for name, row in _merged(self.blocks):
            table.append((
                name, row.kind, row.way, str(row.num_forwards), format_bytes(row.keeps_bytes),
                format_bytes(row.saves_bytes), _shown(row.seconds),
            ))  # fmt: skip
        return table

    def _notes(self) -> list[str]:
        notes: list[str] = []
        if self.num_seen < self.num_blocks:
            notes.append(
                f"seen {self.num_seen} of {self.num_blocks} blocks: the others were not called, "
                "and would be recomputed"
            )
        if self.planned.tiled is not None:
            notes.append(self.planned.tiled.described)
        if self.drift is not None:
            notes.append(
                f"inverted blocks round: gradients are equal to {self.drift.tolerance:g} of their "
                "norm, of which the drift guard takes care (`plan.drift`)"
            )
        notes += self.held_by_others
        if self.headroom:
            notes.append(f"left for fragmentation: {self.headroom:.3g} of the budget")
        if self.baseline_bytes:
            notes.append(f"alive before a step: {format_bytes(self.baseline_bytes)}")
        return notes


def _rows_of(
    calls: Sequence[MeasuredCall], costs: Sequence[Cost], schedule: Schedule
) -> tuple[BlockPlan, ...]:
    """Return a row for each call."""
    runs = simulate(schedule, costs=costs).forwards_per_stage
    sweep = schedule.actions[: schedule.sweep_end]
    taped = {a.index: a.variant for a in sweep if isinstance(a, Tape)}
    kept = {a.index for a in sweep if isinstance(a, Keep)}
    results = {a.start: a.results for a in sweep if isinstance(a, Advance) and a.results}
    moved = {a.index for a in schedule.actions if isinstance(a, Offload)}
    inverted = {a.index for a in schedule.actions if isinstance(a, Invert)}
    rows: list[BlockPlan] = []
    for index, call in enumerate(calls):
        cost = costs[index]
        again = runs[index] - 1
        if index in taped:
            tape = cost.tape(taped[index])
            way = "keep" + (f", {call.codes[taped[index]].name}" if call.codes else "")
            keeps, work = tape.tape_bytes, tape.seconds
        elif index in results:
            found = cost.kept(results[index])
            has_products = selections(call)[results[index] - 1].num_products > 0
            way = "keep products" if has_products else "recompute"
            keeps = found.num_bytes + (cost.state_bytes if index in kept else 0)
            work = found.seconds
        else:
            way = "recompute, offload" if index in moved else "recompute"
            way = "invert" if index in inverted else way
            way += f", {call.code_again.name}" if call.code_again else ""
            keeps = cost.state_bytes if index in kept else 0
            work = again * cost.seconds + (cost.invert_seconds if index in inverted else 0.0)
        saves = cost.tape_bytes - keeps
        kind = kind_of(call.module)
        rows.append(BlockPlan(call.name, kind, way, runs[index], keeps, saves, work))
    return tuple(rows)


def _place(way: str) -> int:
    """Return the place of a way in the order in which ways are always named."""
    order = ("keep", "recompute", "regenerate", "invert", "offload", "tile")
    return next((place for place, name in enumerate(order) if way.startswith(name)), len(order))


def _shown(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _merged(rows: Sequence[BlockPlan]) -> Iterator[tuple[str, BlockPlan]]:
    """Merge equal consecutive rows into one with the mean of their seconds, and their names."""
    for _, alike in groupby(rows, key=lambda row: row._replace(name="", seconds=0.0)):
        group = list(alike)
        names = [each.name for each in (group[:1] + group[1:][-1:])]
        seconds = sum(row.seconds for row in group) / len(group)
        yield " ... ".join(names), group[0]._replace(seconds=seconds)


def _held_by_others(model: nn.Module, calls: Sequence[MeasuredCall]) -> Iterator[str]:
    """Yield a line for each kind of code that holds residuals, which no plan frees."""
    holding = [call for call in calls if call.alive_bytes > 0]
    if holding:
        num_bytes = sum(call.alive_bytes for call in holding)
        advice = (
            "a cache, a list or an attribute that the blocks write to: leave it out in training"
        )
        if getattr(getattr(model, "config", None), "use_cache", False):
            advice = "`use_cache` is on: pass use_cache=False"
        yield (
            f"held by others: {format_bytes(num_bytes)} of the residuals of {len(holding)} blocks "
            f"(`{holding[0].name}` first), which no plan frees; {advice}"
        )
    names = list(dict.fromkeys(name for call in calls for name in call.holders))
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"held by attributes: `{names[0]}`{more}, a tensor with its graph, which holds its "
            "step until the next one; return it instead, or store `.detach()` of it"
        )
    if model.training and any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    ):
        yield (
            "`gradient_checkpointing` is on: the model runs its layers again itself, and the plan "
            "leaves them to it; call `gradient_checkpointing_disable()` and plan again"
        )


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
