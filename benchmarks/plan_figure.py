"""docs/images/plans.png and compiled.png: time of a step against its peak, from the results.

Our plans are a line, other ways are marks; hollow marks are steps whose gradients are wrong.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

from recoup.memory.figures import INK, finish

PATH = Path(__file__).parent.parent / "docs" / "images" / "plans.png"
# Told apart by readers who do not see red or green (after Okabe and Ito), and by their marks.
OURS = {"recoup": ("#009e73", "-"), "recoup, blocks compiled": ("#0072b2", (0, (5, 2)))}
FAMILIES = {
    "no checkpointing": ("#222222", "o"),
    "each block a checkpoint": ("#d55e00", "s"),
    "some parts kept": ("#7f7f7f", "X"),
    "checkpoint_sequential": ("#cc79a7", "D"),
    "torch selective, matmuls kept": ("#b8860b", "^"),
    "torch.compile, at its budgets": ("#3a9bd5", "v"),
    "loss in pieces": ("#6a3d9a", "*"),
    "loss in pieces, each block a checkpoint": ("#6a3d9a", "P"),
}
EACH_BLOCK = "torch checkpoint", "transformers", "accelerate", "Unsloth's style", "torch_remat"
WRONG = 1e-2  # relative error of gradients
HOLLOW = "hollow: other gradients than the model's"
LEAST_POINTS = 4  # of a line: one through fewer would claim plans that nobody measured
# Where a label may be beside its mark, in points: the first that nothing else is in.
PLACES = [
    (distance * x, distance * y)
    for distance in (7, 13, 20)
    for x, y in ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
]


class Mark(NamedTuple):
    """How a way is drawn: the name of its kind, and what tells it from others of the kind."""

    family: str
    label: str


def mark_of(name: str) -> Mark:
    """Return how a way is drawn, by its name."""
    first, _, setting = name.partition(", ")
    if first in EACH_BLOCK:
        if setting.startswith("every") or setting.endswith("kept"):
            return Mark("some parts kept", setting)
        return Mark("each block a checkpoint", "")
    if first == "torch.compile":
        return Mark("torch.compile, at its budgets", setting)
    if first.startswith("loss") or first.endswith("loss"):
        family = "loss in pieces" + (", each block a checkpoint" if setting else "")
        return Mark(family, first.removeprefix("loss in ").removesuffix("'s loss"))
    return Mark(
        first if first == "checkpoint_sequential" else name, setting if "_" in first else ""
    )


def write(found: dict, table: str, path: Path = PATH) -> None:
    """Draw a panel for each model.

    Args:
        found: the results of a suite, with their conditions.
        table: the key of the rows in them.
        path: the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = found[table]
    models = list(dict.fromkeys(row["model"] for row in rows))
    num_columns = min(2, len(models))
    num_lines = math.ceil(len(models) / num_columns)
    has_place = num_lines * num_columns > len(models)  # for the legend
    beneath = 0.0 if has_place else 0.9
    height = 3.7 * num_lines + beneath
    figure = Figure((4.7 * num_columns, height), 200, facecolor="white")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(num_lines, num_columns, squeeze=False).flat)
    figure.subplots_adjust(
        left=0.15 / num_columns, right=0.985, top=1 - 0.45 / height,
        bottom=(0.6 + beneath) / height, wspace=0.23, hspace=0.36,
    )  # fmt: skip
    named: dict[str, Any] = {}
    for axes, model in zip(panels, models, strict=False):
        conditions = found.get("conditions_of", {}).get(model, found)
        clock = "Processor time" if conditions["num_threads"] == 1 else "Time"
        found_here = _panel(axes, [row for row in rows if row["model"] == model], model, clock)
        for name, drawn in found_here.items():
            if name not in named or _says_more(drawn, named[name]):
                named[name] = drawn
    names = [name for name in (*OURS, *FAMILIES, HOLLOW) if name in named]
    texts = ["recoup.plan" + n.removeprefix("recoup") if n in OURS else n for n in names]
    style = {"frameon": False, "labelcolor": INK, "fontsize": 10}
    if has_place:
        panels[-1].axis("off")
        panels[-1].legend([named[n] for n in names], texts, loc="center left", **style)
    else:
        columns = 3 if num_columns > 1 else 2
        handles = [named[n] for n in names]
        figure.legend(handles, texts, loc="lower center", ncols=columns, **style)
    figure.savefig(path)


def _panel(axes: Any, rows: list[dict], model: str, clock: str) -> dict[str, Any]:
    """Draw all ways of one model, and return what the legend shows of each kind."""
    seconds = [row["seconds"] for row in rows]
    room = 0.1 * (max(seconds) - min(seconds))
    axes.set_ylim(min(seconds) - room, max(seconds) + 1.6 * room)
    axes.set_xlim(0, 1.06 * max(row["peak_bytes"] for row in rows) / 2**20)
    finish(axes, model, "Peak of a step (MiB)")
    axes.set_ylabel(f"{clock} of a step (s)", fontsize=10, color=INK)

    named: dict[str, Any] = {}
    taken = []
    for name, (color, dashes) in OURS.items():
        points = _best(row for row in rows if row["name"] == name)
        if points:
            is_line = len(points) >= LEAST_POINTS
            (drawn,) = axes.plot(
                *zip(*points, strict=True), color=color, linestyle=dashes if is_line else "none",
                linewidth=2.4, marker=">", markersize=6.0 if is_line else 7.0,
                markeredgecolor="white", markeredgewidth=0.6, zorder=5,
            )  # fmt: skip
            named[name] = drawn
            taken += _along(axes, points) if is_line else [_box(axes, point, 4) for point in points]
    labels = []
    for row in rows:
        if row["name"] in OURS:
            continue
        family, text = mark_of(row["name"])
        color, marker = FAMILIES[family]
        is_wrong = row["gradient_error"] > WRONG
        place = row["peak_bytes"] / 2**20, row["seconds"]
        (drawn,) = axes.plot(
            *place, color=color, linestyle="none", marker=marker,
            markersize=9.0 if marker == "*" else 6.5,
            markerfacecolor="white" if is_wrong else color,
            markeredgecolor=color if is_wrong else "white",
            markeredgewidth=1.2 if is_wrong else 0.7, zorder=4,
        )  # fmt: skip
        if is_wrong:
            named[HOLLOW] = drawn
        if family not in named or _says_more(drawn, named[family]):
            named[family] = drawn
        taken.append(_box(axes, place, 4))
        if text:
            labels.append((place, text, color))
    for place, text, color in labels:
        taken.append(_label(axes, place, text, color, taken))
    return named


def _says_more(drawn: Any, other: Any) -> bool:
    """Whether a legend should show `drawn`: lines come before marks, full marks before hollow."""
    is_line, is_full = drawn.get_linestyle() != "None", drawn.get_markerfacecolor() != "white"
    shown = other.get_linestyle() != "None", other.get_markerfacecolor() != "white"
    return (is_line, is_full) > shown


def _best(rows: Any) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both bytes and time."""
    points: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: (row["peak_bytes"], row["seconds"])):
        if not points or row["seconds"] < points[-1][1]:
            points.append((row["peak_bytes"] / 2**20, row["seconds"]))
    return points


# -- labels ----------------------------------------------------------------------------------------


def _box(axes: Any, place: tuple[float, float], radius: float) -> Any:
    """Return the square around a place, in pixels; `radius` is in points."""
    from matplotlib.transforms import Bbox

    (x, y), by = axes.transData.transform(place), radius * axes.figure.dpi / 72
    return Bbox([[x - by, y - by], [x + by, y + by]])


def _along(axes: Any, points: list[tuple[float, float]]) -> list[Any]:
    """Return small squares along a line."""
    found = []
    for (x, y), (to_x, to_y) in itertools.pairwise(points):
        steps = [index / 40 for index in range(41)]
        found += [_box(axes, (x + t * (to_x - x), y + t * (to_y - y)), 1.5) for t in steps]
    return found


def _label(axes: Any, place: tuple[float, float], text: str, color: str, taken: list[Any]) -> Any:
    """Write the label of a mark where it hides the least, and return its box in pixels."""
    label = axes.annotate(
        text, xy=place, xytext=PLACES[0], textcoords="offset points", ha="center", va="center",
        fontsize=8, color=color, zorder=6,
    )  # fmt: skip
    boxes = {}
    for x, y in PLACES:
        label.set_ha("left" if x > 0 else "right" if x < 0 else "center")
        label.set_position((x, y))
        box = label.get_window_extent(axes.figure.canvas.get_renderer())
        hidden = sum(_shared(box, other) for other in taken)
        outside = box.width * box.height - _shared(box, axes.bbox)
        boxes[x, y] = hidden + outside, box
    x, y = min(PLACES, key=lambda at: boxes[at][0])
    label.set_ha("left" if x > 0 else "right" if x < 0 else "center")
    label.set_position((x, y))
    return boxes[x, y][1]


def _shared(one: Any, other: Any) -> float:
    """Return the area that two boxes share."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(width, 0.0) * max(height, 0.0)
