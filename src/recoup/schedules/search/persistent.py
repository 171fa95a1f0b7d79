"""Persistent schedules, built from a choice for each segment.

A schedule is persistent if it keeps each state and tape until it has served its purpose: a stage is
taped when it is passed and stays taped until it is reversed, or the input of a segment is kept, the
segment is run without tapes, and later it is solved in the same way.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory" (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

from recoup.schedules.actions import (
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
from recoup.schedules.search.choices import Choice

__all__ = ["persistent"]

# A function from the start, stop and level of a segment to the choice that begins it and the level
# of its later part. The earlier part is solved with the level of the segment.
_Choose = Callable[[int, int, int], tuple[Choice, int]]


class _Part(NamedTuple):
    """A segment that is to be solved, whose input is the working state.

    Args:
        start: its first stage.
        stop: one past its last stage.
        level: its level of memory, for the choice.
        is_kept: whether its input is kept.
        stays: whether its input, if it is kept, stays kept.
        returns: whether its input is to be the working state again after it is reversed.
    """

    start: int
    stop: int
    level: int
    is_kept: bool = False
    stays: bool = False
    returns: bool = False


def persistent(num_stages: int, level: int, choose: _Choose) -> Schedule:
    """Build a persistent schedule from a choice for each segment."""
    actions: list[Action] = []
    waiting: list[Action | _Part] = [_Part(0, num_stages, level)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Part):
            waiting += reversed(_begin(item, num_stages, choose))
        elif _is_plain(item) and actions and _is_plain(before := actions[-1]):
            actions[-1] = Advance(before.start, item.stop)
        else:
            actions.append(item)
    return Schedule(num_stages, tuple(actions), name="optimal")


def _is_plain(action: Action) -> TypeGuard[Advance]:
    """Whether an action runs stages and keeps none of their results."""
    return isinstance(action, Advance) and not action.results


def _begin(part: _Part, num_stages: int, choose: _Choose) -> list[Action | _Part]:
    start = part.start
    back: list[Action | _Part] = [Load(start), Drop(start)] if part.returns else []
    if start == part.stop:
        return [Keep(start), *back] if part.returns else []
    choice, level = choose(start, part.stop, part.level)
    later = _Part(choice.middle, part.stop, level)
    drop: list[Action | _Part] = [Drop(start)] if part.is_kept else []
    keep: list[Action | _Part] = [] if part.is_kept else [Keep(start)]
    match choice.kind:
        case "invert":
            inverse = (Invert(start), Reverse(start))
            return [Advance(start, start + 1), later._replace(returns=True), *inverse]
        case "tape":
            tapes = [Tape(index, variant) for index, variant in choice.of_stages(start)]
            reverses = [Reverse(tape.index) for tape in reversed(tapes)]
            if part.returns:
                return [*keep, *tapes, later, *reverses, *back]
            return [*([] if part.stays else drop), *tapes, later, *reverses]
        case "results":
            runs = [Advance(index, index + 1, kept) for index, kept in choice.of_stages(start)]
            tapes = [Tape(run.start) for run in runs]
            reverses = [Reverse(run.start) for run in reversed(runs)]
            stays = part.stays or part.returns
            loaded = [Load(start), *([] if stays else [Drop(start)])]
            return [*keep, *runs, later, *loaded, *tapes, *reverses, *back]
        case "keep":
            earlier = _Part(start, choice.middle, part.level, True, part.stays or part.returns)
            return [*keep, Advance(start, choice.middle), later, Load(start), earlier, *back]
        case "offload":
            stays = part.stays or part.returns
            again: list[Action | _Part] = [Keep(start)] if stays else []
            earlier = _Part(start, choice.middle, part.level, stays, stays)
            away = (Offload(start), Advance(start, choice.middle))
            return [*drop, *away, later, Load(start), Drop(start), *again, earlier, *back]
