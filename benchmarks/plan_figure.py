"""docs/images/plans.png and compiled.png: time of a step against its peak.

Our plans are a line, other ways are marks; hollow marks are steps whose gradients are wrong.
"""

import math
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PATH = Path(__file__).parent.parent / "docs" / "images" / "plans.png"
INK, QUIET = "#222222", "#8a8a8a"
# Told apart by readers who do not see red or green (after Okabe and Ito), and by their marks.
OURS = {"recoup": ("#009e73", "-"), "recoup, blocks compiled": ("#0072b2", (0, (5, 2)))}
RIVALS = {
    "no checkpointing": ("#222222", "o"),
    "torch checkpoint, each block": ("#d55e00", "s"),
    "checkpoint_sequential": ("#cc79a7", "D"),
    "torch selective, matmuls kept": ("#e69f00", "^"),
    "torch.compile": ("#56b4e9", "v"),
    "transformers": ("#6a3d9a", "P"),
    "torch_remat": ("#7f7f7f", "X"),
}
BENEATH = ("1.0", "0.6", "0.4", "0.0")
WRONG = 1e-2  # relative error of gradients
SIZES = {"s": 10.0, "P": 7.0, "X": 4.5}  # these three may lie on each other


def write(rows: list[dict], path: Path = PATH) -> None:
    models = list(dict.fromkeys(row["model"] for row in rows))
    num_lines = math.ceil(len(models) / 2)
    num_columns = math.ceil(len(models) / num_lines)
    height = 0.8 + 4.2 * num_lines
    figure = Figure((5.6 * num_columns, height), 200, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_lines, num_columns, squeeze=False).flat
    named: dict[str, object] = {}
    for axes, model in zip(panels, models, strict=False):
        named |= _panel(axes, [row for row in rows if row["model"] == model], model)
    names = [name for name in (*OURS, *RIVALS) if name in named]
    figure.legend(
        [named[name] for name in names],
        ["recoup.plan" + name.removeprefix("recoup") if name in OURS else name for name in names],
        loc="lower center",
        ncols=math.ceil(len(names) / 2) if num_columns > 1 else 3,
        frameon=False,
        fontsize=9.5 if num_columns > 1 else 7.5,
        labelcolor=INK,
    )
    figure.subplots_adjust(
        left=0.12 / num_columns,
        right=0.98,
        top=1 - 0.5 / height,
        bottom=1.25 / height,
        wspace=0.16,
        hspace=0.35,
    )
    figure.savefig(path)


def _panel(axes, rows: list[dict], title: str) -> dict:
    named: dict[str, object] = {}
    for name, (color, dashes) in OURS.items():
        points = _best(row for row in rows if row["name"] == name)
        if points:
            (named[name],) = axes.plot(
                *zip(*points, strict=True),
                color=color,
                linestyle=dashes,
                linewidth=2.4,
                marker="o",
                markersize=4.0,
                markeredgecolor="white",
                markeredgewidth=0.6,
                zorder=5,
            )
    for name, (color, marker) in RIVALS.items():
        for row in rows:
            family, _, setting = row["name"].partition(", ")
            if name not in (row["name"], family):
                continue
            place = row["peak_bytes"] / 2**20, row["seconds"]
            (named[name],) = axes.plot(
                *place,
                color=color,
                linestyle="none",
                marker=marker,
                markersize=SIZES.get(marker, 7.0),
                markerfacecolor="white" if row["gradient_error"] > WRONG else color,
                markeredgecolor=color if row["gradient_error"] > WRONG else "white",
                markeredgewidth=1.2 if row["gradient_error"] > WRONG else 0.8,
                zorder=4,
            )
            if name != row["name"]:
                # The compiler's are beneath in turn, since its marks lie close to each other.
                is_beneath = name == "torch.compile" and setting in BENEATH
                _label(axes, place, setting, color, -13 if is_beneath else 6)
    seconds = [row["seconds"] for row in rows]
    axes.set_ylim(0.9 * min(seconds), 1.04 * max(seconds))  # all lie within a factor of two
    axes.set_xlim(0, 1.05 * max(row["peak_bytes"] for row in rows) / 2**20)
    axes.set_title(f"{title}: time of a step (s)", loc="left", fontsize=12, color=INK, pad=12)
    axes.set_xlabel("Peak of the step (MiB)", fontsize=10, color=INK)
    axes.tick_params(colors=QUIET, labelcolor=INK, labelsize=9, length=3)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    return named


def _best(rows) -> list[tuple[float, float]]:
    """Return the points that no other point beats in both bytes and time."""
    points: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: (row["peak_bytes"], row["seconds"])):
        if not points or row["seconds"] < points[-1][1]:
            points.append((row["peak_bytes"] / 2**20, row["seconds"]))
    return points


def _label(axes, place: tuple[float, float], text: str, color: str, above: int) -> None:
    """Return the label of a mark: segments, what is kept, or a budget of the compiler."""
    axes.annotate(
        text,
        xy=place,
        xytext=(0, above),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color=color,
        zorder=6,
    )
