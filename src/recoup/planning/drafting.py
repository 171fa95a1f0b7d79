"""Drafting: turns a schedule into a follower that makes a model execute it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from recoup._core.executor import Executor
from recoup.planning.blocks import Block
from recoup.planning.following import Follow, Part, PlannedStage
from recoup.planning.measuring import MeasuredCall
from recoup.planning.pricing import chosen_products
from recoup.schedules import Action, Advance, Invert, Schedule, Tape

__all__ = ["follow_schedule"]


def follow_schedule(
    model: nn.Module | None,
    blocks: Sequence[Block],
    calls: Sequence[MeasuredCall],
    schedule: Schedule,
) -> Follow:
    """Return a follower that executes `schedule`, whose last stage is the code after the last call.

    Args:
        model: the model, whose forward is one pass; None if the step does not call it itself.
        blocks: its blocks, whether or not they are called.
        calls: the calls of its blocks, in order.
        schedule: a schedule with one stage more than there are calls.
    """
    sections = list(_sections(calls))
    chosen = {
        action.index: frozenset(chosen_products(calls[action.index])[action.variant - 1])
        for action in schedule.actions
        if isinstance(action, Tape) and action.variant
    }
    parts = [_part(schedule, start, stop) for start, stop in sections]
    stages: list[PlannedStage] = []
    for number, (start, stop) in enumerate(sections):
        executor = parts[number].executor
        for place in range(start, stop):
            is_kept = executor is None or executor.prepared.steps[place - start].is_taped
            call = calls[place]
            stages.append(
                PlannedStage(
                    call.name, call.module, number, place - start, is_kept, chosen.get(place)
                )
            )
    return Follow(model, stages, parts, blocks)


def _sections(calls: Sequence[MeasuredCall]) -> Iterator[tuple[int, int]]:
    """Yield the start and the stop of each chain."""
    starts = [place for place, call in enumerate(calls) if place == 0 or not call.is_linked]
    yield from zip(starts, [*starts[1:], len(calls)], strict=True)


def _part(schedule: Schedule, start: int, stop: int) -> Part:
    actions = tuple(_within(schedule.actions, start, stop))
    runs_again = any(isinstance(action, Advance | Invert) for action in actions)
    section = Schedule(stop - start, actions, name=schedule.name)
    return Part(stop - start, Executor(section) if runs_again else None)


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
