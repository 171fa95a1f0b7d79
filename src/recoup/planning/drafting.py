"""Turns a schedule into a follower that makes a model execute it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from recoup._core.executor import Executor
from recoup.planning.blocks import Block
from recoup.planning.following import PlanFollower, PlannedChain, PlannedStage
from recoup.planning.measuring import MeasuredCall
from recoup.planning.pricing import chosen_products
from recoup.planning.sizes import ArgumentSizes
from recoup.schedules import Action, Advance, Invert, Schedule, Tape

__all__ = ["follower_of"]


def follower_of(
    schedule: Schedule,
    model: nn.Module | None,
    blocks: Sequence[Block],
    calls: Sequence[MeasuredCall],
    sizes: ArgumentSizes | None = None,
) -> PlanFollower:
    """Return a follower that executes `schedule`, whose last stage is the code after the last call.

    Args:
        schedule: a schedule with one stage more than there are calls.
        model: the model, whose forward is one pass; None if the step does not call it itself.
        blocks: its blocks, whether or not they are called.
        calls: the calls of its blocks, in order.
        sizes: the sizes of the planned arguments, to warn of larger ones.
    """
    chosen = {
        action.index: frozenset(chosen_products(calls[action.index])[action.variant - 1])
        for action in schedule.actions
        if isinstance(action, Tape) and action.variant
    }
    stages: list[PlannedStage] = []
    for start, stop in _chains(calls):
        chain = _planned_chain(schedule, start, stop)
        executor = chain.executor
        for index in range(start, stop):
            step, call = index - start, calls[index]
            is_kept = executor is None or executor.prepared.steps[step].is_taped
            stages.append(
                PlannedStage(call.name, call.module, chain, step, is_kept, chosen.get(index))
            )
    return PlanFollower(model, stages, blocks, sizes)


def _chains(calls: Sequence[MeasuredCall]) -> Iterator[tuple[int, int]]:
    """Yield the start and the stop of each chain."""
    starts = [index for index, call in enumerate(calls) if index == 0 or not call.is_linked]
    yield from zip(starts, [*starts[1:], len(calls)], strict=True)


def _planned_chain(schedule: Schedule, start: int, stop: int) -> PlannedChain:
    actions = tuple(_within(schedule.actions, start, stop))
    runs_again = any(isinstance(action, Advance | Invert) for action in actions)
    part = Schedule(stop - start, actions, name=schedule.name)
    return PlannedChain(stop - start, Executor(part) if runs_again else None)


def _within(actions: Sequence[Action], start: int, stop: int) -> Iterator[Action]:
    """Yield the actions on the stages of one chain, with the stages numbered from 0."""
    for action in actions:
        if isinstance(action, Advance):
            first, last = max(action.start, start), min(action.stop, stop)
            if first < last:
                yield Advance(first - start, last - start)
        elif start <= action.index < stop:
            # The variant of the tape is known to the stage (`PlannedStage.chosen`).
            of_stage = Tape(action.index) if isinstance(action, Tape) else action
            yield replace(of_stage, index=action.index - start)
