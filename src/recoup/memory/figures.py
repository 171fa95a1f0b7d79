"""Pictures: the style of all, the one of a curve, and files that are written whole or not."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recoup._arguments import check_type

FORMATS = (".png", ".svg", ".pdf")

INK, QUIET = "#222222", "#8a8a8a"
# Colours that readers with colour blindness can distinguish (after Okabe and Ito). A mode has the
# same colour in every picture.
COLORS = {"linear": "#d55e00", "sqrt": "#0072b2", "constant": "#009e73", "log": "#cc79a7"}
_OTHERS = ("#e69f00", "#56b4e9", "#6a3d9a")
_MARKERS = ("o", "s", "D", "^", "v", "P")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


def require_matplotlib() -> None:
    """Raise an ImportError with a remedy if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ImportError(
            "Drawing a figure needs matplotlib, which is not installed. Run: "
            "pip install 'recoup[plots]'"
        ) from error


def check_format(suffix: str) -> None:
    """Raise a ValueError if `suffix` is not that of a supported picture format."""
    if suffix.lower() not in FORMATS:
        raise ValueError(
            f'`path` of the figure ends in "{suffix}", but must end in one of {", ".join(FORMATS)}.'
        )


_Points = Mapping[str | int, Sequence[Any]]  # of a curve, by memory mode, in order of depth


def render(points: _Points, suffix: str) -> bytes:
    """Draw a curve, and return the content of a file that ends in `suffix`."""
    seconds = [point.seconds for each in points.values() for point in each]
    timed = None not in seconds
    scale, unit = (1.0, "s") if timed and max(seconds, default=0.0) >= 1 else (1e3, "ms")

    def draw(panels: Sequence[Any]) -> None:
        title = "Peak memory of a step (MiB)"
        _panel(panels[0], points, lambda at: at.peak_bytes / 2**20, title)
        if timed:
            _panel(panels[1], points, lambda at: scale * at.seconds, f"Time of a step ({unit})")

    size = (11.0, 4.0) if timed else (6.0, 4.0)
    return rendered(draw, suffix, size, num_panels=2 if timed else 1)


def rendered(
    draw: Callable[[Sequence[Any]], None],
    suffix: str,
    size: tuple[float, float],
    *,
    num_panels: int,
) -> bytes:
    """Return the content of a picture file, of a size in inches, that ends in `suffix`.

    `draw` is given a sequence of axes, one for each panel, side by side.
    """
    check_format(suffix)
    require_matplotlib()
    # Separate objects instead of pyplot: no window and no global state, with any backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.05)
    figure = Figure(size, 200, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    draw(figure.subplots(1, num_panels, squeeze=False)[0])
    content = io.BytesIO()
    figure.savefig(content, format=suffix.lower().removeprefix("."))
    return content.getvalue()


def finish(axes: Any, title: str, below: str) -> None:
    """Give `axes` a title, a label of the x axis, and the common style of all pictures."""
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=12)
    axes.set_xlabel(below, fontsize=10, color=INK)
    axes.tick_params(colors=QUIET, labelcolor=INK, labelsize=9, length=3)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)


def _panel(axes: Any, points: _Points, value: Callable[[Any], float], title: str) -> None:
    others = iter(_OTHERS)
    top, deepest = 0.0, 0
    for index, (memory, line) in enumerate(points.items()):
        values = [value(point) for point in line]
        top, deepest = max(top, *values), max(deepest, line[-1].depth)
        name = f"{memory} slots" if isinstance(memory, int) else memory
        # Later lines are thinner and dashed, so that a line beneath another one is visible.
        axes.plot(
            [point.depth for point in line],
            values,
            color=COLORS.get(str(memory)) or next(others, QUIET),
            linestyle=_DASHES[index % len(_DASHES)],
            linewidth=max(3.0 - 0.6 * index, 1.2),
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=max(8.0 - 1.2 * index, 4.0),
            markeredgecolor="white",
            markeredgewidth=0.8,
            clip_on=False,
            zorder=3 + index,
            label=f"{name}  {values[-1]:.4g}",
        )
    axes.set_ylim(0, 1.06 * top or 1.0)
    axes.set_xlim(0, 1.02 * deepest)
    axes.xaxis.get_major_locator().set_params(integer=True)
    # The numbers are those of the last point of each line.
    legend = axes.legend(
        loc="upper left", frameon=False, fontsize=9.5, title="at its largest depth",
        alignment="left",
    )  # fmt: skip
    legend.get_title().set(color=QUIET, fontsize=9)
    finish(axes, title, "Depth (blocks)")


# -- files -----------------------------------------------------------------------------------------


def path_of(path: Any) -> Path:
    """Return the path of a file, or raise a ValueError if it is none."""
    check_type((str, os.PathLike), "the path of a file", path=path)
    if not Path(path).name:
        raise ValueError(f"`path` is {path!r}, but must be the path of a file.")
    return Path(path)


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file atomically; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
