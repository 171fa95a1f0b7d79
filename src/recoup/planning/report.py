"""The report of a plan: a table of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from recoup.memory import format_bytes
from recoup.memory.tables import aligned
from recoup.planning.measuring import MeasuredCall
from recoup.schedules import Advance, Cost, Invert, Keep, Offload, Schedule, Tape, simulate

__all__ = ["BlockPlan", "Summary", "described", "rows_of"]


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
    calls: Sequence[MeasuredCall],
    costs: Sequence[Cost],
    schedule: Schedule,
    seconds_of_work: float,
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
        kind = type(call.module).__name__
        rows.append(
            BlockPlan(call.name, kind, way, runs[index], keeps, saves, work * seconds_of_work)
        )
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


def described(plan: Summary) -> str:
    """Return the text that a plan prints."""
    budget = "total" if plan.standing_bytes else "step"
    title = (
        f"Plan for {plan.model}: {len(plan.rows)} blocks in "
        f"{format_bytes(plan.budget_bytes)} ({budget})"
    )
    peaks = (
        f"predicted peak {format_bytes(plan.predicted_bytes)}, rehearsed "
        f"{format_bytes(plan.rehearsed_bytes)}; everything kept "
        f"{format_bytes(plan.most_bytes)}, least feasible {format_bytes(plan.least_bytes)} "
        f"({plan.least_bytes} bytes)"
    )
    lines = [title, peaks, ""]
    table = [("block", "class", "way", "forwards", "keeps", "saves", "pays")]
    for first, last, row in _merged(plan.rows):
        name = first.name if first is last else f"{first.name} ... {last.name}"
        table.append((
            name, row.kind, row.way, str(row.num_forwards), format_bytes(row.keeps_bytes),
            format_bytes(row.saves_bytes), _shown(row.seconds),
        ))  # fmt: skip
    lines += aligned(table, left=range(3))
    if plan.num_seen < plan.num_blocks:
        lines.append(
            f"seen {plan.num_seen} of {plan.num_blocks} blocks: the others were not called, and "
            "would be recomputed"
        )
    lines += [*([] if plan.tiled is None else [plan.tiled]), *plan.advice]
    if plan.standing_bytes:
        lines.append(f"alive before a step: {format_bytes(plan.standing_bytes)}")
    return "\n".join(lines)


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
