"""Traces: the memory of a schedule over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recoup.errors import ScheduleError
from recoup.schedules.actions import Action, Advance, Reverse, Schedule, Tape
from recoup.schedules.costs import Cost
from recoup.schedules.walk import Walk

__all__ = ["Moment", "trace"]

# Time of backward in forwards: the backward of a product is two products.
_BACKWARD = 2.0


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a trace: an action on one stage.

    Args:
        action: the action.
        seconds: the time of its end, if the backward of a stage takes twice its forward.
        peak_bytes: the most bytes held during it, as `simulate` counts them.
        held_bytes: the bytes held after it.
        is_backward: whether it belongs to backward.

    Example:
        >>> from recoup.schedules import Cost, linear, trace
        >>> trace(linear(2), [Cost(1.0, 1, 3)] * 2)[0].action
        Tape(index=0, variant=0)
    """

    action: Action
    seconds: float
    peak_bytes: int
    held_bytes: int
    is_backward: bool


def trace(schedule: Schedule, costs: Sequence[Cost]) -> tuple[Moment, ...]:
    """Return the memory at each moment of a schedule; the highest peak is that of `simulate`.

    Args:
        schedule: the schedule.
        costs: the cost of each stage.

    Returns:
        A moment for each action; an `Advance` has one for each of its stages.

    Raises:
        ScheduleError: an action is impossible at its position.

    Example:
        >>> from recoup.schedules import Cost, linear, trace
        >>> [moment.held_bytes for moment in trace(linear(2), [Cost(1.0, 1, 3)] * 2)]
        [4, 6, 3, 0]
    """
    walk = Walk.of(costs)
    moments: list[Moment] = []
    thin = dict.fromkeys(range(len(costs)), 0.0)  # time that backward pays for the tape of a stage
    clock = 0.0
    for action in _singly(schedule.actions):
        walk.peak, before = 0, walk.seconds
        reason = walk.step(action)
        if reason is not None:
            raise ScheduleError(f"`{schedule.name}` cannot do {action!r}: {reason}")
        clock += walk.seconds - before
        if isinstance(action, Tape):
            thin[action.index] = costs[action.index].tape(action.variant).seconds
            clock -= thin[action.index]
        elif isinstance(action, Reverse):
            clock += _BACKWARD * costs[action.index].seconds + thin[action.index]
        moments.append(Moment(action, clock, walk.peak, walk.held, walk.in_backward))
    return tuple(moments)


def _singly(actions: Sequence[Action]) -> Iterator[Action]:
    for action in actions:
        if isinstance(action, Advance):
            yield from (Advance(i, i + 1) for i in range(action.start, action.stop))
        else:
            yield action
