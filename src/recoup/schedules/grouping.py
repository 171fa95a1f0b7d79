"""Groups: neighbouring stages that a schedule always treats alike, so that they can run as one.

The stages of a segment of `sqrt` run one after the other in the sweep, and are taped one after the
other in backward. No state between them is ever kept, so one stage in the place of all of them
runs as many forwards and keeps as many bytes. It holds its input while it runs, so a group begins
with a state that is kept anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from recoup.schedules.actions import Action, Advance, Invert, Keep, Reverse, Schedule, Tape


def groups_of(schedule: Schedule) -> list[range]:
    """Return the groups of a schedule, as ranges of stages in order.

    Two neighbours are in one group if the sweep advances over both from a kept state, each action
    on one of them is next to the same action on the other, and none concerns the state in between.

    Args:
        schedule: the schedule.

    Example:
        >>> from recoup.schedules import sqrt
        >>> from recoup.schedules.grouping import groups_of
        >>> groups_of(sqrt(10))
        [range(0, 4), range(4, 7), range(7, 9), range(9, 10)]
    """
    actions = schedule.actions
    cuts = set(range(schedule.num_stages + 1))
    for before, action in pairwise(actions[: schedule.sweep_end]):
        if isinstance(action, Advance) and before == Keep(action.start):
            cuts.difference_update(range(action.start + 1, action.stop))
    for before, action, after in zip((None, *actions), actions, (*actions[1:], None), strict=False):
        match action:
            case Advance(start, stop):
                cuts.update((start, stop))
            case Tape(index, 0):
                cuts.update(() if before == Tape(index - 1) else (index,))
                cuts.update(() if after == Tape(index + 1) else (index + 1,))
            case Reverse(index):
                cuts.update(() if before == Reverse(index + 1) else (index + 1,))
                cuts.update(() if after == Reverse(index - 1) else (index,))
            case Tape(index, _) | Invert(index):
                cuts.update((index, index + 1))
            case _:
                cuts.add(action.index)  # of a state
    return [range(start, stop) for start, stop in pairwise(sorted(cuts))]


def on_groups(schedule: Schedule, groups: Sequence[range]) -> Schedule:
    """Return the schedule in which each group is one stage.

    Args:
        schedule: the schedule.
        groups: its groups, as `groups_of` returns them.

    Example:
        >>> from recoup.schedules import sqrt
        >>> from recoup.schedules.grouping import groups_of, on_groups
        >>> print(on_groups(sqrt(3), groups_of(sqrt(3))))
        sqrt, 2 stages
        sweep: keep x_0, run 0, tape 1
        backward: reverse 1, load x_0, drop x_0, tape 0, reverse 0
    """
    places = {group.start: place for place, group in enumerate(groups)}
    places[schedule.num_stages] = len(groups)
    actions: list[Action] = []
    for action in schedule.actions:
        match action:
            case Advance(start, stop, results):
                actions.append(Advance(places[start], places[stop], results))
            case Tape(index, variant) if index in places:
                actions.append(Tape(places[index], variant))
            case Tape():
                pass  # of a group whose first stage was taped before
            case _ if action.index in places:
                actions.append(replace(action, index=places[action.index]))
            case _:
                pass  # the reverse of a group is that of its first stage, the last in backward
    return Schedule(len(groups), tuple(actions), name=schedule.name)
