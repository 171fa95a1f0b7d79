"""The picture of a plan: memory over a step before and after, and time against bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recoup.memory.figures import check_format, require_matplotlib
from recoup.schedules import Moment, trace

if TYPE_CHECKING:
    from recoup.checkpoint.planning.plan import Plan

__all__ = ["draw"]

_INK, _QUIET = "#222222", "#8a8a8a"
_BEFORE, _AFTER = "#d55e00", "#0072b2"  # as "linear" and "sqrt" have in a curve


def draw(plan: Plan, path: Path) -> Path:
    """Draw `plan` into a file, and return its path."""
    check_format(path.suffix)
    require_matplotlib()
    # Objects of our own instead of pyplot: no window, no global state, whatever the backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.06)
    figure: Any = Figure((11.0, 4.2), 200, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    unit, name = _unit(plan.most_bytes)
    _over_a_step(left, plan, unit, name)
    _frontier(right, plan, unit, name)
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.lower().removeprefix("."))
    path.write_bytes(content.getvalue())
    return path


def _unit(num_bytes: int) -> tuple[int, str]:
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= 2 * size:
            return size, name
    return 1, "bytes"


def _over_a_step(axes: Any, plan: Plan, unit: int, name: str) -> None:
    before = trace(plan.frontier[-1].schedule, plan.costs)
    after = trace(plan.schedule, plan.costs)
    whole = before[-1].seconds or 1.0
    top = plan.most_bytes / unit
    for moments, color, text, width in (
        (before, _BEFORE, "everything kept", 1.6),
        (after, _AFTER, "this plan", 2.2),
    ):
        times, levels = _line(moments, whole, plan.standing_bytes, unit)
        axes.plot(times, levels, color=color, linewidth=width, label=text, solid_joinstyle="round")
    axes.axhline(plan.budget_bytes / unit, color=_INK, linewidth=1.0, linestyle=(0, (5, 3)))
    if plan.budget_bytes / unit < 1.15 * top:
        axes.annotate(
            "budget", (1.0, plan.budget_bytes / unit), xycoords=("axes fraction", "data"),
            xytext=(-2, 3), textcoords="offset points", ha="right", fontsize=9, color=_INK,
        )  # fmt: skip
    axes.set_ylim(0, 1.15 * top)
    axes.set_xlim(0, None)
    axes.legend(loc="upper left", frameon=False, fontsize=9.5, ncols=2)
    _finish(axes, f"Memory over a step ({name})", "Time (1: a step with everything kept)")


def _line(
    moments: tuple[Moment, ...], whole: float, standing: int, unit: int
) -> tuple[list[float], list[float]]:
    """Each action as its peak in its middle, and what is held after it."""
    times, levels, last = [0.0], [standing / unit], 0.0
    for moment in moments:
        now = moment.seconds / whole
        times += [(last + now) / 2, now]
        levels += [(standing + moment.peak_bytes) / unit, (standing + moment.held_bytes) / unit]
        last = now
    return times, levels


def _frontier(axes: Any, plan: Plan, unit: int, name: str) -> None:
    points = plan.frontier
    least = points[-1].seconds or 1.0
    sizes = [(plan.standing_bytes + point.peak_bytes) / unit for point in points]
    # Backward takes twice a forward, so a step with everything kept takes three.
    times = [(point.seconds + 2 * least) / (3 * least) for point in points]
    axes.step(sizes, times, where="post", color=_AFTER, linewidth=2.2)
    chosen = (plan.schedule == point.schedule for point in points)
    place = next((index for index, found in enumerate(chosen) if found), len(points) - 1)
    axes.plot(
        sizes[place], times[place], "o", color=_AFTER, markersize=9, markeredgecolor="white",
        zorder=5, clip_on=False,
    )  # fmt: skip
    axes.annotate(
        "this plan", (sizes[place], times[place]), xytext=(8, 7), textcoords="offset points",
        fontsize=9.5, color=_AFTER, fontweight="bold",
    )  # fmt: skip
    axes.axvline(sizes[0], color=_QUIET, linewidth=1.0, linestyle=(0, (1.5, 2)))
    axes.annotate(
        "least", (sizes[0], 1.0), xycoords=("data", "axes fraction"), xytext=(4, -10),
        textcoords="offset points", fontsize=9, color=_QUIET,
    )  # fmt: skip
    axes.set_ylim(min(0.99, *times), max(times) + 0.03 + 0.08 * (max(times) - 1.0))
    axes.set_xlim(0, 1.06 * sizes[-1])
    _finish(axes, "Time of a step, by the work it does", f"Peak of a step ({name})")


def _finish(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=_INK, pad=12)
    axes.set_xlabel(below, fontsize=10, color=_INK)
    axes.tick_params(colors=_QUIET, labelcolor=_INK, labelsize=9, length=3)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
