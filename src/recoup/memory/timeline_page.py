"""The page that shows the bytes in memory over a training step: HTML with all that it needs.

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

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from recoup.memory.size import format_bytes
from recoup.memory.step_recorder import PHASES, StepLine

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
