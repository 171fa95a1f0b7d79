"""The page that shows the bytes in memory over a training step: HTML with all that it needs.

NOTE [ What is drawn is what was measured ]

Rule 1. The coordinates of a line are the numbers themselves: events to the right, bytes upwards,
        both whole. The script reads them back from the picture, so that there is one copy.
Rule 2. Forward and backward begin at the same place for all lines: the longest forward decides
        where backward begins. A line whose forward has fewer events stays level until then.
Rule 3. A long line is thinned: of as many events as there are pixels, more or less, the first, the
        last, the lowest and the highest are drawn. So the picture is the same, and peaks are exact.
Rule 4. All text is escaped, that of the script's data as well. The page forbids itself to load
        anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise
from string import Template
from typing import Any, NamedTuple

from recoup.memory.size import format_bytes
from recoup.memory.step_line import PHASES, StepLine

__all__ = ["Page", "check_page", "page_of"]

_MOST_EVENTS = 4000  # of a phase, that are all drawn
_NUM_PARTS = 1000  # of a phase that has more
_ROOM_ABOVE = 1.14  # the peak, for its number
_NUM_TICKS = 5


class Page(NamedTuple):
    """What a page shows.

    Args:
        title: the title.
        summary: the sentence beneath it.
        lines: the lines, one or two; the second one is the planned step.
        budget_bytes: the budget; None for none.
        plan: the text of the plan; "" for none.
    """

    title: str
    summary: str
    lines: Sequence[StepLine]
    budget_bytes: int | None
    plan: str


def check_page(suffix: str) -> None:
    """Raise a ValueError if `suffix` is not that of a page."""
    if suffix.lower() not in (".html", ".htm"):
        raise ValueError(f'`path` of the page ends in "{suffix}", but must end in .html.')


def page_of(page: Page) -> str:
    """Return the page as HTML."""
    drawn = [_Drawn(line, _boundary(page.lines)) for line in page.lines]
    width, height = max([1, *(each.end for each in drawn)]), _height(page)
    boundary = _boundary(page.lines)
    highest = max(page.lines, key=lambda line: line.peak_bytes)
    frame = _Frame(width, height)
    ticks = _ticks(height)
    template = files("recoup.memory").joinpath("timeline_page.html").read_text("utf-8")
    return Template(template).substitute(
        title=escape(page.title),
        summary=escape(page.summary),
        described=escape(f"{page.title}. {page.summary} The table below has the peaks."),
        width=width,
        height=height,
        boundary=boundary,
        backward=width - boundary,
        grid="".join(f"M0 {tick}H{width}" for tick in ticks),
        paths="\n".join([*_budget_path(page, width, height), *_paths(drawn)]),
        labels="\n".join(_labels(page, drawn, frame, ticks)),
        start=next(each.peak_place for each in drawn if each.line is highest),
        table=_table(page.lines),
        plan=f'<h2>The plan</h2>\n<pre tabindex="0">{escape(page.plan)}</pre>' if page.plan else "",
        data=_data(drawn),
    )


class _Frame(NamedTuple):
    """The size of the picture, in events and bytes."""

    width: int
    height: int

    def place(self, x: int, y: int) -> str:
        """Return the style of what is at a point."""
        return f"left: {100 * x / self.width:.3f}%; bottom: {100 * y / self.height:.3f}%"


class _Drawn:
    """A line as it is drawn (See Rules 1 and 2).

    Args:
        line: the line.
        boundary: where backward begins.
    """

    def __init__(self, line: StepLine, boundary: int) -> None:
        self.line = line
        self.causes: dict[tuple[str, str, str], int] = {}
        self.starts: list[int] = []
        self.cause: list[int] = []
        self.points: list[tuple[int, int]] = []
        for phase, offset in zip(PHASES, (0, boundary), strict=True):
            levels = line.levels(phase)
            self.points += [(offset + k, levels[k]) for k in _thinned(levels)]
            for start, stretch in line.starts(phase):
                told = (stretch.what, stretch.module, stretch.way)
                self.starts.append(offset + start)
                self.cause.append(self.causes.setdefault(told, len(self.causes)))
        self.end = boundary + len(line.levels("backward"))
        self.peak_place = next((x for x, y in self.points if y == line.peak_bytes), 0)

    @property
    def path(self) -> str:
        """The path of the line: the bytes after each event, until the next one."""
        steps = "".join(f"H{x}V{y}" for x, y in self.points)
        return f"M0 {self.line.standing_bytes}{steps}H{self.end}"


def _boundary(lines: Sequence[StepLine]) -> int:
    return max((len(line.levels("forward")) for line in lines), default=0)


def _thinned(levels: Sequence[int]) -> list[int]:
    """Return the indices of the events that are drawn (See Rule 3)."""
    if len(levels) <= _MOST_EVENTS:
        return list(range(len(levels)))
    edges = [part * len(levels) // _NUM_PARTS for part in range(_NUM_PARTS + 1)]
    found: set[int] = set()
    for start, stop in pairwise(edges):
        part = range(start, stop)
        found |= {start, stop - 1, min(part, key=levels.__getitem__)}
        found.add(max(part, key=levels.__getitem__))
    return sorted(found)


def _height(page: Page) -> int:
    """Return the bytes at the top: room for all peaks, and for a budget that is not far above."""
    most = max((line.peak_bytes for line in page.lines), default=0)
    budget = page.budget_bytes or 0
    return max(int(_ROOM_ABOVE * max(most, budget if budget <= 1.5 * most else 0)), 1)


def _ticks(height: int) -> list[int]:
    """Return round numbers of bytes for the lines of a grid, without 0."""
    unit = 1
    while height // unit >= 1024:
        unit *= 1024
    wanted = height / unit / _NUM_TICKS
    step = 1
    while step < wanted:
        step *= 2
    size = step * unit if wanted >= 0.5 or unit == 1 else unit // 2
    return list(range(size, height, size))


def _budget_path(page: Page, width: int, height: int) -> list[str]:
    if page.budget_bytes is None or page.budget_bytes > height:
        return []
    return [f'<path class="budget" d="M0 {page.budget_bytes}H{width}"/>']


def _paths(drawn: Sequence[_Drawn]) -> list[str]:
    return [
        f'<path class="memory line{place}" id="line{place}" d="{each.path}"/>'
        for place, each in enumerate(drawn)
    ]


def _labels(page: Page, drawn: Sequence[_Drawn], frame: _Frame, ticks: Sequence[int]) -> list[str]:
    boundary = _boundary(page.lines)
    found = [
        f'<span class="tick" style="bottom: {100 * tick / frame.height:.3f}%">'
        f"{format_bytes(tick)}</span>"
        for tick in ticks
    ]
    for phase, x in zip(PHASES, (0, boundary), strict=True):
        left = f"left: {100 * x / frame.width:.3f}%"
        found.append(f'<span class="phase" style="{left}">{phase}</span>')
    budget = page.budget_bytes
    if budget is not None and budget <= frame.height:
        text = f"budget {format_bytes(budget)}"
        bottom = f"bottom: {100 * budget / frame.height:.3f}%"
        found.append(f'<span class="bound halo" style="{bottom}">{text}</span>')
    for place, each in enumerate(drawn):
        found += _peak_labels(each, place, frame)
    return found


def _peak_labels(drawn: _Drawn, place: int, frame: _Frame) -> list[str]:
    """Return a point at a peak, and its number: above the first line, beneath the second one."""
    line, x = drawn.line, drawn.peak_place
    text = escape(f"{line.name} {format_bytes(line.peak_bytes)}")
    side = -100 if x > frame.width / 2 else 0
    shift = f"transform: translate({side}%, {100 if place else 0}%)"
    where = frame.place(x, line.peak_bytes)
    return [
        f'<i class="point line{place}" style="{where}"></i>',
        f'<span class="peak halo line{place}" style="{where}; {shift}">{text}</span>',
    ]


def _table(lines: Sequence[StepLine]) -> str:
    head = "".join(f'<th scope="col">{escape(line.name)}</th>' for line in lines)
    rows = [f'<tr><th scope="col">phase</th>{head}</tr>']
    for phase in PHASES:
        peaks = [line.peak(phase) for line in lines]
        cells = "".join(
            "<td>-</td>"
            if peak is None
            else f"<td>{escape(str(peak))}<br>{peak.num_bytes:,} bytes</td>"
            for peak in peaks
        )
        rows.append(f'<tr><th scope="row">{phase}</th>{cells}</tr>')
    return "\n".join(rows)


def _data(drawn: Sequence[_Drawn]) -> str:
    """Return what ran at each event, for the script (See Rule 4)."""
    found: list[dict[str, Any]] = [
        {
            "name": each.line.name,
            "before": each.line.standing_bytes,
            "end": each.end,
            "causes": list(each.causes),
            "starts": each.starts,
            "cause": each.cause,
        }
        for each in drawn
    ]
    text = json.dumps(found, separators=(",", ":"))  # ASCII alone
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")
