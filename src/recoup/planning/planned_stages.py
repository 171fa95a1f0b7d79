"""The stages of a plan: what its schedule makes of each call of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from recoup._core.drift_guard import DriftGuard
from recoup._core.executor import Executor
from recoup._core.kept_products import Products
from recoup.planning.compiling import BlockCode
from recoup.planning.pricing import MeasuredCall, selections
from recoup.schedules import (
    Action,
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Offload,
    Reverse,
    Schedule,
    Tape,
)


class PlannedStage(NamedTuple):
    """The part of a plan for one call of a block.

    Args:
        name: the qualified name of the block.
        module: the block.
        executor: runs the schedule of its chain; None if all stages of that keep their residuals.
        step: its index in that chain.
        chosen: the operators whose results it keeps for its second run; None if it keeps none.
        code: the code that it runs by.
    """

    name: str
    module: nn.Module
    executor: Executor | None
    step: int
    chosen: Products | None
    code: BlockCode


def planned_stages(
    schedule: Schedule, calls: Sequence[MeasuredCall], guard: DriftGuard | None = None
) -> list[PlannedStage]:
    """Return a stage for each call.

    Args:
        schedule: a schedule of the calls, in order, and of one more stage: the code after them.
        calls: the calls of blocks.
        guard: the drift guard of the first chain that inverts, with the settings of all others.
    """
    variants = {a.index: a.variant for a in schedule.actions if isinstance(a, Tape)}
    results = {a.start: a.results for a in schedule.actions if isinstance(a, Advance) and a.results}
    stages: list[PlannedStage] = []
    for start, stop in chains_of(calls):
        executor = _executor_of(schedule, start, stop, guard)
        if guard is not None and executor is not None and executor.guard is guard:
            guard = guard.anew()
        for index in range(start, stop):
            step, call = index - start, calls[index]
            is_kept = executor is None or executor.steps[step].is_taped
            chosen, code = None, BlockCode()
            if call.codes:
                variant = variants.get(index, 0)
                code = call.codes[variant] if is_kept else call.code_again or call.codes[0]
            elif index in results:
                chosen = selections(call)[results[index] - 1].products
            stages.append(PlannedStage(call.name, call.module, executor, step, chosen, code))
    return stages


def each_alone(results: Sequence[int | None]) -> Schedule:
    """Return a schedule in which each call is treated alone, and the code after them is taped.

    Args:
        results: the number of the results that each call keeps with its input, 0 for none; None for
            a call that keeps its residuals.
    """
    actions: list[Action] = [Tape(len(results)), Reverse(len(results))]
    for index, kept in reversed(list(enumerate(results))):
        if kept is None:
            actions = [Tape(index), *actions, Reverse(index)]
        else:
            first = (Keep(index), Advance(index, index + 1, kept))
            actions = [*first, *actions, Load(index), Drop(index), Tape(index), Reverse(index)]
    return Schedule(len(results) + 1, tuple(actions))


def chains_of(calls: Sequence[MeasuredCall]) -> Iterator[tuple[int, int]]:
    """Yield the start and the stop of each chain."""
    starts = [index for index, call in enumerate(calls) if index == 0 or not call.is_linked]
    yield from pairwise([*starts, len(calls)])


def _executor_of(
    schedule: Schedule, start: int, stop: int, guard: DriftGuard | None
) -> Executor | None:
    """Return the executor of a chain; None if all of its stages keep their residuals."""
    actions = tuple(_within(schedule.actions, start, stop))
    runs_again = any(isinstance(action, Advance | Invert) for action in actions)
    part = Schedule(stop - start, actions, name=schedule.name)
    sweep = actions[: part.sweep_end]
    inverts = any(isinstance(action, Invert) for action in actions)
    if inverts and Keep(0) not in sweep and Offload(0) not in sweep:
        # What an inverse gets wrong is computed again from the first state.
        part = replace(part, actions=(Keep(0), *actions))
    return Executor(part, guard=guard) if runs_again else None


def _within(actions: Sequence[Action], start: int, stop: int) -> Iterator[Action]:
    """Yield the actions on the stages of one chain, with the stages numbered from 0.

    The last state of a chain counts where a stage is inverted from it: then only code follows that
    is no block.
    """
    is_inverted_from = Invert(stop - 1) in actions
    for action in actions:
        if isinstance(action, Advance):
            first, last = max(action.start, start), min(action.stop, stop)
            if first < last:
                yield Advance(first - start, last - start)
        elif is_inverted_from and action.index == stop and isinstance(action, Keep | Load | Drop):
            yield replace(action, index=stop - start)
        elif start <= action.index < stop:
            # The variant of the tape is known to the stage (`PlannedStage.code`).
            of_stage = Tape(action.index) if isinstance(action, Tape) else action
            yield replace(of_stage, index=action.index - start)
