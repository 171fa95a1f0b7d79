"""Pictures: their style, those of curves, the page of a step, and files that are written whole.

NOTE [ What is drawn is what was measured ]

Rule 1. The heights of a line are in KiB, since browsers cut off what is drawn at coordinates beyond
        some billions. So they are exact, and the script reads them back from the picture: there is
        one copy.
Rule 2. Forward and backward are equally wide for all lines, one unit for each event of the longest;
        those of the others are spread evenly. So what is above each other is about the same code.
Rule 3. All text is escaped, that of the script's data as well. The page forbids itself to load
        anything.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from recoup._arguments import check_type
from recoup.memory.size import format_bytes
from recoup.memory.step_recorder import PHASES, StepLine

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


# -- the page of a step ----------------------------------------------------------------------------

_ROOM_ABOVE = 1.14  # the peak, for its number
_UNIT = 1024  # bytes (See Rule 1)
_FAR = 1.5  # times the peak: a budget above that is not drawn


def check_page(suffix: str) -> None:
    """Raise a ValueError if `suffix` is not that of a page."""
    if suffix.lower() not in (".html", ".htm"):
        raise ValueError(f'`path` of the page ends in "{suffix}", but must end in .html.')


def page_of(
    title: str, summary: str, lines: Sequence[StepLine], budget_bytes: int | None, plan: str
) -> str:
    """Return the page as HTML, of one line or two; the second one is the planned step."""
    picture = _Picture(lines, budget_bytes or 0)
    top = _drawn(picture.height)
    template = files("recoup.memory").joinpath("timeline_page.html").read_text("utf-8")
    return Template(template).substitute(
        title=escape(title),
        summary=escape(summary),
        described=escape(f"{title}. {summary} The table below has the peaks."),
        width=picture.width,
        height=picture.height,
        unit=_UNIT,
        top=top,
        band=f"M{picture.widths[0]} 0H{picture.width}V{top}H{picture.widths[0]}Z",
        grid="".join(f"M0 {_drawn(tick)}H{picture.width}" for tick in picture.ticks),
        paths="\n".join(picture.paths()),
        labels="\n".join(picture.labels()),
        start=max(picture.lines, key=lambda each: each.line.peak_bytes).peak_place,
        table=_table(lines),
        plan=f'<h2>The plan</h2>\n<pre tabindex="0">{escape(plan)}</pre>' if plan else "",
        data=_data(picture.lines),
    )


class _Drawn:
    """A line as it is drawn, in the widths of forward and of backward, in events (See Rule 2)."""

    def __init__(self, line: StepLine, widths: Sequence[int]) -> None:
        self.line = line
        self.causes: dict[tuple[str, str, str], int] = {}
        self.starts: list[int] = []
        self.cause: list[int] = []
        self.points: list[tuple[int, int]] = []
        offset = 0
        for phase, width in zip(PHASES, widths, strict=True):
            levels = line.levels(phase)
            num = max(len(levels), 1)
            self.points += [(offset + k * width // num, y) for k, y in enumerate(levels)]
            for start, stretch in line.starts(phase):
                told = (stretch.what, stretch.module, stretch.way)
                self.starts.append(offset + start * width // num)
                self.cause.append(self.causes.setdefault(told, len(self.causes)))
            offset += width
        peak_bytes = line.peak_bytes
        self.peak_place = next((x for x, y in self.points if y == peak_bytes), 0)


class _Picture:
    """The lines in one picture, and the budget, if it is not far above them."""

    def __init__(self, lines: Sequence[StepLine], budget_bytes: int) -> None:
        self.widths = [max(1, *(len(line.levels(phase)) for line in lines)) for phase in PHASES]
        self.width = sum(self.widths)
        self.lines = [_Drawn(line, self.widths) for line in lines]
        most = max(line.peak_bytes for line in lines)
        self.budget_bytes = budget_bytes if budget_bytes <= _FAR * most else 0
        self.height = max(int(_ROOM_ABOVE * max(most, self.budget_bytes)), 1)
        step = 1 << max(int(0.3 * self.height).bit_length() - 1, 0)
        self.ticks = range(step, self.height, step)

    def paths(self) -> list[str]:
        """Return the budget and the lines: the bytes after each event, until the next one."""
        found = []
        if self.budget_bytes:
            found = [f'<path class="budget" d="M0 {_drawn(self.budget_bytes)}H{self.width}"/>']
        for place, each in enumerate(self.lines):
            steps = "".join(f"H{x}V{_drawn(y)}" for x, y in each.points)
            path = f"M0 {_drawn(each.line.baseline_bytes)}{steps}H{self.width}"
            found.append(f'<path class="memory line{place}" id="line{place}" d="{path}"/>')
        return found

    def labels(self) -> list[str]:
        """Return the numbers of the grid and the budget, the phases, and the peaks."""
        found = [self._label("tick halo", 0, tick, format_bytes(tick)) for tick in self.ticks]
        for phase, x in zip(PHASES, (0, self.widths[0]), strict=True):
            left = f"left: {100 * x / self.width:.3f}%"
            found.append(f'<span class="phase" style="{left}">{phase}</span>')
        if self.budget_bytes:
            text = f"budget {format_bytes(self.budget_bytes)}"
            found.append(self._label("bound halo", self.width, self.budget_bytes, text))
        for place, each in enumerate(self.lines):
            x, line = each.peak_place, each.line
            at = self._place(x, line.peak_bytes)
            found.append(f'<i class="point line{place}" style="{at}"></i>')
            # Above the point of the first line, below that of the second, towards the middle.
            shift = f"translate({-100 if x > self.width / 2 else 0}%, {100 * place}%)"
            text = f"{line.name} {format_bytes(line.peak_bytes)}"
            kind = f"peak halo line{place}"
            found.append(self._label(kind, x, line.peak_bytes, text, f"; transform: {shift}"))
        return found

    def _label(self, kind: str, x: int, y: int, text: str, more: str = "") -> str:
        style = f"{self._place(x, y)}{more}"
        return f'<span class="{kind}" style="{style}">{escape(text)}</span>'

    def _place(self, x: int, y: int) -> str:
        return f"left: {100 * x / self.width:.3f}%; bottom: {100 * y / self.height:.3f}%"


def _drawn(num_bytes: int) -> str:
    """Return bytes as a coordinate (See Rule 1)."""
    size = num_bytes / _UNIT
    return str(int(size)) if size.is_integer() else repr(size)


def _table(lines: Sequence[StepLine]) -> str:
    head = "".join(f'<th scope="col">{escape(line.name)}</th>' for line in lines)
    rows = [f'<tr><th scope="col">phase</th>{head}</tr>']
    for phase in PHASES:
        peaks = [line.peak(phase) for line in lines]
        texts = [f"{escape(str(p))}<br>{p.num_bytes:,} bytes" if p else "-" for p in peaks]
        columns = "".join(f"<td>{text}</td>" for text in texts)
        rows.append(f'<tr><th scope="row">{phase}</th>{columns}</tr>')
    return "\n".join(rows)


def _data(drawn: Sequence[_Drawn]) -> str:
    """Return what ran at each event, for the script (See Rule 3)."""
    found = [
        {"name": each.line.name, "before": each.line.baseline_bytes, "causes": list(each.causes),
         "starts": each.starts, "cause": each.cause}
        for each in drawn
    ]  # fmt: skip
    text = json.dumps(found, separators=(",", ":"))  # ASCII alone
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


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
