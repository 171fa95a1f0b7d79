"""The picture of a plan: memory over a step before and after, and time against bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recoup.memory.figures import COLORS, INK, QUIET, finish, rendered
from recoup.planning.report import PlanReport
from recoup.schedules import Moment, trace

__all__ = ["Line", "draw", "draw_frontier"]

_BEFORE, _AFTER = COLORS["linear"], COLORS["sqrt"]


class Line(NamedTuple):
    """The plans over one kind of blocks.

    Args:
        name: the name of the kind.
        sizes: the peaks of steps, in bytes.
        times: the times of steps, where 1 is a step with everything kept.
    """

    name: str
    sizes: Sequence[int]
    times: Sequence[float]


def draw_frontier(lines: Sequence[Line], path: Path) -> Path:
    """Draw the plans over each kind of blocks into a file, and return the path."""
    unit, name = _unit(max(max(line.sizes) for line in lines))

    def draw_panel(panels: Sequence[Any]) -> None:
        axes = panels[0]
        colors = (_AFTER, _BEFORE, *(QUIET for _ in lines))
        for line, color in zip(lines, colors, strict=False):
            sizes = [size / unit for size in line.sizes]
            axes.step(sizes, line.times, where="post", color=color, linewidth=2.2, label=line.name)
            axes.plot(sizes[-1:], line.times[-1:], "o", color=color, markersize=5)
        axes.set_xlim(0, None)
        axes.legend(loc="upper right", frameon=False, fontsize=9.5)
        finish(axes, "Predicted time of a step (1: everything kept)", f"Peak of a step ({name})")

    path.write_bytes(rendered(draw_panel, path.suffix, (6.0, 4.2), num_panels=1))
    return path


def draw(plan: PlanReport, path: Path) -> Path:
    """Draw a plan into a file, and return the path."""
    unit, name = _unit(plan.most_bytes)

    def draw_panels(panels: Sequence[Any]) -> None:
        _over_a_step(panels[0], plan, unit, name)
        _frontier(panels[1], plan, unit, name)

    path.write_bytes(rendered(draw_panels, path.suffix, (11.0, 4.2), num_panels=2))
    return path


def _unit(num_bytes: int) -> tuple[int, str]:
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= 2 * size:
            return size, name
    return 1, "bytes"


def _over_a_step(axes: Any, plan: PlanReport, unit: int, name: str) -> None:
    again = trace(plan.frontier[-1].schedule, plan.costs)[-1].seconds
    first = plan.kept_seconds / again if again else 1.0  # that everything kept takes as measured
    whole = plan.kept_seconds or 1.0
    top = plan.most_bytes / unit
    for point, color, text, width in (
        (plan.frontier[-1], _BEFORE, "everything kept", 1.6),
        (plan.point, _AFTER, "this plan", 2.2),
    ):
        moments = trace(point.schedule, plan.costs, first)
        times, levels = _line(moments, whole, plan.baseline_bytes)
        # The costs bound a peak from above; the point has what was measured.
        most = plan.baseline_bytes + point.peak_bytes
        levels = [min(level, most) / unit for level in levels]
        axes.plot(times, levels, color=color, linewidth=width, label=text, solid_joinstyle="round")
    axes.axhline(plan.budget_bytes / unit, color=INK, linewidth=1.0, linestyle=(0, (5, 3)))
    if plan.budget_bytes / unit < 1.15 * top:
        axes.annotate(
            "budget", (1.0, plan.budget_bytes / unit), xycoords=("axes fraction", "data"),
            xytext=(-2, 3), textcoords="offset points", ha="right", fontsize=9, color=INK,
        )  # fmt: skip
    axes.set_ylim(0, 1.15 * top)
    axes.set_xlim(0, None)
    axes.legend(loc="upper left", frameon=False, fontsize=9.5, ncols=2)
    finish(axes, f"Memory over a step ({name})", "Time (1: a step with everything kept)")


def _line(
    moments: tuple[Moment, ...], whole: float, baseline: int
) -> tuple[list[float], list[int]]:
    """Return the points of a line: each action's peak at its middle, held bytes at its end."""
    times, levels, last = [0.0], [baseline], 0.0
    for moment in moments:
        now = moment.seconds / whole
        times += [(last + now) / 2, now]
        levels += [baseline + moment.peak_bytes, baseline + moment.held_bytes]
        last = now
    return times, levels


def _frontier(axes: Any, plan: PlanReport, unit: int, name: str) -> None:
    points = plan.frontier
    least, whole = points[-1].seconds, plan.kept_seconds or 1.0
    sizes = [(plan.baseline_bytes + point.peak_bytes) / unit for point in points]
    times = [1 + (point.seconds - least) / whole for point in points]
    axes.step(sizes, times, where="post", color=_AFTER, linewidth=2.2)
    place = points.index(plan.point)
    axes.plot(
        sizes[place], times[place], "o", color=_AFTER, markersize=9, markeredgecolor="white",
        zorder=5, clip_on=False,
    )  # fmt: skip
    axes.annotate(
        "this plan", (sizes[place], times[place]), xytext=(8, 7), textcoords="offset points",
        fontsize=9.5, color=_AFTER, fontweight="bold",
    )  # fmt: skip
    axes.axvline(sizes[0], color=QUIET, linewidth=1.0, linestyle=(0, (1.5, 2)))
    axes.annotate(
        "least", (sizes[0], 1.0), xycoords=("data", "axes fraction"), xytext=(4, -10),
        textcoords="offset points", fontsize=9, color=QUIET,
    )  # fmt: skip
    axes.set_ylim(min(0.99, *times), max(times) + 0.03 + 0.08 * (max(times) - 1.0))
    axes.set_xlim(0, 1.06 * sizes[-1])
    finish(axes, "Predicted time of a step (1: everything kept)", f"Peak of a step ({name})")
