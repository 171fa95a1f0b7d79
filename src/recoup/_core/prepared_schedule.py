"""A prepared schedule: the facts that the executor needs, read once from the actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from recoup.schedules import Action, Advance, Invert, Keep, Load, Offload, Schedule, Tape, simulate


class Step(NamedTuple):
    """The work of the sweep at one stage.

    Args:
        before: the actions that keep, offload or drop states before it runs.
        is_taped: whether it keeps its residuals.
        is_run_again: whether it may run again, even if it is taped.
    """

    before: tuple[Action, ...]
    is_taped: bool
    is_run_again: bool


class Prepared:
    """A schedule prepared for the executor, which may run it many times.

    It `restarts` if the states that backward has dropped can be made again from the first one.

    Args:
        schedule: the schedule.
    """

    def __init__(self, schedule: Schedule) -> None:
        simulate(schedule)  # raises on a schedule that cannot be executed
        self.num_stages = schedule.num_stages
        self.actions = schedule.actions
        self.sweep_end = schedule.sweep_end
        backward = range(self.sweep_end, len(self.actions))
        self.tape_at = {
            action.index: place
            for place in backward
            if isinstance(action := self.actions[place], Tape | Invert)
        }
        # The second runs whose output a later action needs.
        self.tapes_that_go_on = {
            action.index
            for place in backward
            if isinstance(action := self.actions[place], Tape) and _is_taken(self.actions, place)
        }
        self.inverted = {a.index for a in self.actions if isinstance(a, Invert)}
        self.last_keep = max(
            (
                place
                for place, action in enumerate(self.actions[: self.sweep_end])
                if isinstance(action, Keep | Offload) and action.index < self.num_stages
            ),
            default=-1,
        )
        sweep = self.actions[: self.sweep_end]
        # A run that only inverts begins from the last state and may have no first one.
        self.restarts = not self.inverted or Keep(0) in sweep or Offload(0) in sweep
        # States that inverses got wrong are computed again from kept ones, over taped stages too.
        self.last_again = self.last_keep
        if self.inverted and self.restarts:
            last = max(
                place
                for place, action in enumerate(sweep)
                if isinstance(action, Advance) and action.start <= max(self.inverted)
            )
            self.last_again = max(last, self.last_keep)
        self.steps = tuple(self._steps())
        if not self.inverted and self.last_keep >= 0:  # the sweep keeps the source of a restart
            first = self.steps[0]
            self.steps = (first._replace(before=(Keep(0), *first.before)), *self.steps[1:])
        self.keeps_output = Keep(self.num_stages) in self.actions[: self.sweep_end]

    def _steps(self) -> Iterator[Step]:
        before: list[Action] = []
        for position, action in enumerate(self.actions[: self.sweep_end]):
            match action:
                case Advance(start, stop):
                    for _ in range(start, stop):
                        yield Step(tuple(before), is_taped=False, is_run_again=True)
                        before.clear()
                case Tape():
                    yield Step(tuple(before), True, is_run_again=position < self.last_again)
                    before.clear()
                case _:
                    before.append(action)  # a Keep, Offload or Drop: `simulate` refuses others


def _is_taken(actions: Sequence[Action], place: int) -> bool:
    """Whether a later action starts from the working state after the one at `place`."""
    for action in actions[place + 1 :]:
        if isinstance(action, Keep | Advance | Tape | Invert | Load):
            return not isinstance(action, Load)
    return False
