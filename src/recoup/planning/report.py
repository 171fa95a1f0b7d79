"""The report of a plan: a line, a table as text or for a notebook, and what it does not choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from torch import nn

from recoup.memory import format_bytes
from recoup.memory.tables import aligned
from recoup.planning.blocks import find_links, kind_of
from recoup.planning.pricing import MeasuredCall
from recoup.schedules import Advance, Cost, Invert, Keep, Offload, Schedule, Tape, simulate

__all__ = [
    "BlockPlan",
    "Summary",
    "described",
    "described_in_html",
    "headline",
    "held_by_others",
    "rows_of",
    "what_can_be_inverted",
]


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


class Summary(NamedTuple):
    """The numbers that a plan prints.

    Args:
        model: the class of the model.
        rows: one for each call of a block.
        num_blocks: the number of modules that are blocks.
        num_seen: the number of blocks that were called.
        budget_bytes: the budget.
        standing_bytes: the part of it that is alive before a step; 0 for a budget of "step".
        predicted_bytes: the predicted peak.
        rehearsed_bytes: the peak of the step that was run.
        least_bytes: the smallest budget known to suffice.
        most_bytes: the predicted peak of a step that keeps everything.
        tiled: a line about parts that run in tiles, if any do.
        advice: further lines.
    """

    model: str
    rows: Sequence[BlockPlan]
    num_blocks: int
    num_seen: int
    budget_bytes: int
    standing_bytes: int
    predicted_bytes: int
    rehearsed_bytes: int
    least_bytes: int
    most_bytes: int
    tiled: str | None
    advice: Sequence[str]


def rows_of(
    calls: Sequence[MeasuredCall], costs: Sequence[Cost], schedule: Schedule
) -> tuple[BlockPlan, ...]:
    """Return a row for each call."""
    runs = simulate(schedule, costs=costs).forwards_per_stage
    taped = {a.index: a.variant for a in _sweep(schedule) if isinstance(a, Tape)}
    kept = {a.index for a in _sweep(schedule) if isinstance(a, Keep)}
    moved = {a.index for a in schedule.actions if isinstance(a, Offload)}
    inverted = {a.index for a in schedule.actions if isinstance(a, Invert)}
    rows: list[BlockPlan] = []
    for index, call in enumerate(calls):
        cost = costs[index]
        again = runs[index] - 1
        if index in taped:
            thin = cost.tape(taped[index])
            way = "keep products" if taped[index] and not call.codes else "keep"
            way += f", {call.codes[taped[index]].name}" if call.codes else ""
            keeps, work = thin.tape_bytes, thin.seconds
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


def _sweep(schedule: Schedule) -> list[Keep | Tape | Advance]:
    """Return the keeps, tapes and advances of forward."""
    found: list[Keep | Tape | Advance] = []
    for action in schedule.actions:
        if isinstance(action, (Keep, Tape, Advance)):
            found.append(action)
        if isinstance(action, Tape) and action.index == schedule.num_stages - 1:
            break
    return found


def headline(plan: Summary) -> str:
    """Return a plan in one line, without the class of the model."""
    ways = Counter(row.way for row in plan.rows)
    counts = "; ".join(f"{ways[way]} {way}" for way in sorted(ways, key=_place))
    peak = format_bytes(plan.rehearsed_bytes)
    return f"{_size(plan)}: {counts}; rehearsed peak {peak}"


def _place(way: str) -> int:
    """Return the place of a way in the order in which ways are always named."""
    order = ("keep", "recompute", "regenerate", "invert", "offload", "tile")
    return next((place for place, name in enumerate(order) if way.startswith(name)), len(order))


def described(plan: Summary) -> str:
    """Return the text that a plan prints."""
    lines = [_title(plan), _peaks(plan), "", *aligned(_table(plan), left=_WORDS), *_notes(plan)]
    return "\n".join(lines)


def described_in_html(plan: Summary) -> str:
    """Return what a notebook shows for a plan."""
    head, *rows = _table(plan)
    body = "\n".join(_html_row("td", row) for row in rows)
    notes = "".join(f"\n<p>{escape(note)}</p>" for note in _notes(plan))
    return (
        f"<div>\n<p><b>{escape(_title(plan))}</b><br/>{escape(_peaks(plan))}</p>\n"
        f"<table>\n<thead>{_html_row('th', head)}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        f"{notes}\n</div>"
    )


_WORDS = range(3)  # the columns of the table that are no numbers


def _html_row(tag: str, row: Sequence[str]) -> str:
    sides = ["left" if column in _WORDS else "right" for column in range(len(row))]
    cells = (
        f'<{tag} style="text-align: {side}">{escape(text)}</{tag}>'
        for side, text in zip(sides, row, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"


def _title(plan: Summary) -> str:
    return f"Plan for {plan.model}: {_size(plan)}"


def _size(plan: Summary) -> str:
    budget = "total" if plan.standing_bytes else "step"
    return f"{len(plan.rows)} blocks in {format_bytes(plan.budget_bytes)} ({budget})"


def _peaks(plan: Summary) -> str:
    return (
        f"predicted peak {format_bytes(plan.predicted_bytes)}, rehearsed "
        f"{format_bytes(plan.rehearsed_bytes)}; everything kept "
        f"{format_bytes(plan.most_bytes)}, least feasible {format_bytes(plan.least_bytes)} "
        f"({plan.least_bytes} bytes)"
    )


def _table(plan: Summary) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("block", "class", "way", "forwards", "keeps", "saves", "pays"),
    ]
    for first, last, row in _merged(plan.rows):
        name = first.name if first is last else f"{first.name} ... {last.name}"
        table.append((
            name, row.kind, row.way, str(row.num_forwards), format_bytes(row.keeps_bytes),
            format_bytes(row.saves_bytes), _shown(row.seconds),
        ))  # fmt: skip
    return table


def _notes(plan: Summary) -> list[str]:
    notes: list[str] = []
    if plan.num_seen < plan.num_blocks:
        notes.append(
            f"seen {plan.num_seen} of {plan.num_blocks} blocks: the others were not called, and "
            "would be recomputed"
        )
    notes += [*([] if plan.tiled is None else [plan.tiled]), *plan.advice]
    if plan.standing_bytes:
        notes.append(f"alive before a step: {format_bytes(plan.standing_bytes)}")
    return notes


def _shown(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _merged(rows: Sequence[BlockPlan]) -> list[tuple[BlockPlan, BlockPlan, BlockPlan]]:
    """Merge equal consecutive rows into (first, last, row with the mean of their seconds)."""
    groups: list[list[BlockPlan]] = []
    for row in rows:
        if groups and _says(groups[-1][-1]) == _says(row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [
        (group[0], group[-1], group[0]._replace(seconds=sum(r.seconds for r in group) / len(group)))
        for group in groups
    ]


def _says(row: BlockPlan) -> tuple[object, ...]:
    return row.kind, row.way, row.num_forwards, row.keeps_bytes, row.saves_bytes


def held_by_others(model: nn.Module, calls: Sequence[MeasuredCall]) -> list[str]:
    """Return a line for each kind of code that holds residuals, which no plan frees.

    Args:
        model: the model.
        calls: the measured calls of its blocks.
    """
    return [*_caches(model, calls), *_attributes(calls), *_checkpoints(model)]


def _caches(model: nn.Module, calls: Sequence[MeasuredCall]) -> Iterator[str]:
    holding = [call for call in calls if call.alive_bytes > 0]
    if not holding:
        return
    num_bytes = sum(call.alive_bytes for call in holding)
    advice = "a cache, a list or an attribute that the blocks write to: leave it out in training"
    if getattr(getattr(model, "config", None), "use_cache", False):
        advice = "`use_cache` is on: pass use_cache=False"
    yield (
        f"held by others: {format_bytes(num_bytes)} of the residuals of {len(holding)} blocks "
        f"(`{holding[0].name}` first), which no plan frees; {advice}"
    )


def _attributes(calls: Sequence[MeasuredCall]) -> Iterator[str]:
    names = list(dict.fromkeys(name for call in calls for name in call.holders))
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"held by attributes: `{names[0]}`{more}, a tensor with its graph, which holds its "
            "step until the next one; return it instead, or store `.detach()` of it"
        )


def _checkpoints(model: nn.Module) -> Iterator[str]:
    if model.training and any(
        getattr(module, "gradient_checkpointing", False) is True for module in model.modules()
    ):
        yield (
            "`gradient_checkpointing` is on: the model runs its layers again itself, and the plan "
            "leaves them to it; call `gradient_checkpointing_disable()` and plan again"
        )


def what_can_be_inverted(model: nn.Module, calls: Sequence[MeasuredCall]) -> list[str]:
    """Return a sentence that names the modules which a plan could invert if it may round.

    Args:
        model: the model.
        calls: the measured calls of its blocks.
    """
    constant = {
        id(part)
        for module in model.modules()
        if getattr(module, "memory", None) == "constant"
        for part in module.modules()
    }
    names = [name for name, link in find_links(model) if id(link) not in constant]
    names = names or [call.name for call in calls if call.is_invertible]
    if not names:
        return []
    sentence = (
        f"This plan inverts nothing, and {len(names)} blocks have an inverse (`{names[0]}` first): "
        "a plan with exact=False may take less, and rounds."
    )
    return [sentence]
