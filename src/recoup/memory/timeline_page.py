"""The page that shows the bytes in memory over a training step: HTML with all that it needs.

NOTE [ What is drawn is what was measured ]

Rule 1. The heights of a line are the bytes, divided by a power of two, since browsers cut off what
        is drawn at coordinates beyond some gigabytes. So they are exact, and the script reads them
        back from the picture: there is one copy.
Rule 2. Forward and backward are equally wide for all lines, one unit for each event of the longest;
        those of the others are spread evenly. So what is above each other is about the same code.
Rule 3. All text is escaped, that of the script's data as well. The page forbids itself to load
        anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple

from recoup.memory.size import format_bytes
from recoup.memory.step_recorder import PHASES, StepLine

_ROOM_ABOVE = 1.14  # the peak, for its number
_MOST_BITS = 24  # of a coordinate
_FAR = 1.5  # times the peak: a budget above that is not drawn
_NEAR = 0.09  # of the height: labels would meet


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
    frame = _frame(page)
    drawn = [_Drawn(line, frame) for line in page.lines]
    highest = max(drawn, key=lambda each: each.line.peak_bytes)
    ticks = _ticks(frame.height)
    template = files("recoup.memory").joinpath("timeline_page.html").read_text("utf-8")
    return Template(template).substitute(
        title=escape(page.title),
        summary=escape(page.summary),
        described=escape(f"{page.title}. {page.summary} The table below has the peaks."),
        width=frame.width,
        height=frame.height,
        unit=frame.unit,
        top=frame.drawn(frame.height),
        band=f"M{frame.widths[0]} 0H{frame.width}V{frame.drawn(frame.height)}H{frame.widths[0]}Z",
        grid="".join(f"M0 {frame.drawn(tick)}H{frame.width}" for tick in ticks),
        paths="\n".join(_paths(page, drawn, frame)),
        labels="\n".join(_labels(page, drawn, frame, ticks)),
        start=highest.peak_place,
        table=_table(page.lines),
        plan=f'<h2>The plan</h2>\n<pre tabindex="0">{escape(page.plan)}</pre>' if page.plan else "",
        data=_data(drawn),
    )


class _Frame(NamedTuple):
    """The size of the picture.

    Args:
        widths: of forward and of backward, in events.
        height: in bytes.
    """

    widths: tuple[int, int]
    height: int

    @property
    def width(self) -> int:
        """The width of both."""
        return sum(self.widths)

    @property
    def unit(self) -> int:
        """The bytes of a unit of the picture (See Rule 1)."""
        return 1 << max(self.height.bit_length() - _MOST_BITS, 0)

    def drawn(self, num_bytes: int) -> str:
        """Return bytes as a coordinate."""
        size = num_bytes / self.unit
        return str(int(size)) if size.is_integer() else repr(size)

    def place(self, x: int, y: int) -> str:
        """Return the style of what is at a point."""
        return f"left: {100 * x / self.width:.3f}%; bottom: {100 * y / self.height:.3f}%"


class _Drawn:
    """A line as it is drawn (See Rules 1 and 2).

    Args:
        line: the line.
        frame: the size of the picture.
    """

    def __init__(self, line: StepLine, frame: _Frame) -> None:
        self.line = line
        self.causes: dict[tuple[str, str, str], int] = {}
        self.starts: list[int] = []
        self.cause: list[int] = []
        self.points: list[tuple[int, int]] = []
        offset = 0
        for phase, width in zip(PHASES, frame.widths, strict=True):
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

    def path(self, frame: _Frame) -> str:
        """Return the path of the line: the bytes after each event, until the next one."""
        steps = "".join(f"H{x}V{frame.drawn(y)}" for x, y in self.points)
        return f"M0 {frame.drawn(self.line.baseline_bytes)}{steps}H{frame.width}"


def _frame(page: Page) -> _Frame:
    forward, backward = (
        max([1, *(len(line.levels(phase)) for line in page.lines)]) for phase in PHASES
    )
    # Room for all peaks, and for a budget that is not far above them.
    most = max((line.peak_bytes for line in page.lines), default=0)
    budget = page.budget_bytes or 0
    top = max(most, budget if budget <= _FAR * most else 0)
    return _Frame((forward, backward), max(int(_ROOM_ABOVE * top), 1))


def _ticks(height: int) -> list[int]:
    """Return round numbers of bytes for the lines of a grid, three to six, without 0."""
    step = 1
    while 2 * step <= 0.3 * height:
        step *= 2
    return list(range(step, int((1 - _NEAR / 2) * height), step))


def _paths(page: Page, drawn: Sequence[_Drawn], frame: _Frame) -> list[str]:
    paths = [
        f'<path class="memory line{place}" id="line{place}" d="{each.path(frame)}"/>'
        for place, each in enumerate(drawn)
    ]
    if 0 < (budget := page.budget_bytes or 0) <= frame.height:
        paths.insert(0, f'<path class="budget" d="M0 {frame.drawn(budget)}H{frame.width}"/>')
    return paths


def _labels(page: Page, drawn: Sequence[_Drawn], frame: _Frame, ticks: Sequence[int]) -> list[str]:
    budget = page.budget_bytes or 0
    found = [
        f'<span class="tick halo" style="{frame.place(0, tick)}">{format_bytes(tick)}</span>'
        for tick in ticks
        if not 0 <= budget - tick < _NEAR / 2 * frame.height  # the budget would cross it
    ]
    for phase, x in zip(PHASES, (0, frame.widths[0]), strict=True):
        left = f"left: {100 * x / frame.width:.3f}%"
        found.append(f'<span class="phase" style="{left}">{phase}</span>')
    if 0 < budget <= frame.height:
        bottom = f"bottom: {100 * budget / frame.height:.3f}%"
        text = f"budget {format_bytes(budget)}"
        found.append(f'<span class="bound halo" style="{bottom}">{text}</span>')
    for place in range(len(drawn)):
        found += _peak_labels(drawn, place, budget, frame)
    return found


def _peak_labels(
    drawn: Sequence[_Drawn], place: int, budget_bytes: int, frame: _Frame
) -> list[str]:
    """Return a point at a peak, and its number above it, clear of the budget and other numbers."""
    line, x = drawn[place].line, drawn[place].peak_place
    peak, near = line.peak_bytes, _NEAR * frame.height
    is_beneath = place > 0 and abs(peak - drawn[0].line.peak_bytes) < near
    at = budget_bytes if not is_beneath and 0 <= budget_bytes - peak < near else peak
    text = escape(f"{line.name} {format_bytes(peak)}")
    shift = f"translate({-100 if x > frame.width / 2 else 0}%, {100 if is_beneath else 0}%)"
    label = f"{frame.place(x, at)}; transform: {shift}"
    return [
        f'<i class="point line{place}" style="{frame.place(x, peak)}"></i>',
        f'<span class="peak halo line{place}" style="{label}">{text}</span>',
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
    """Return what ran at each event, for the script (See Rule 3)."""
    found: list[dict[str, Any]] = [
        {
            "name": each.line.name,
            "before": each.line.baseline_bytes,
            "causes": list(each.causes),
            "starts": each.starts,
            "cause": each.cause,
        }
        for each in drawn
    ]
    text = json.dumps(found, separators=(",", ":"))  # ASCII alone
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")
