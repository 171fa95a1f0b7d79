"""Actions on the states and the tapes of a chain, and schedules, which consist of them.

A chain of ``n`` stages has the states ``x_0 ... x_n``; stage ``i`` makes ``x_{i+1}`` from
``x_i``. Its *tape* is everything that its backward needs. At any time there is one *working
state*. A kept state occupies memory until it is dropped, a tape until its stage is reversed. An
offloaded state occupies host memory instead.

NOTE [ The order of actions ]

Rule 1. A schedule begins with the working state ``x_0`` and runs forward until the working
        state is ``x_n``: that part is the *sweep*, executed while the model computes its output.
        A `Keep` of ``x_n`` that follows directly belongs to it.
Rule 2. The actions after the sweep are executed in backward, with one `Reverse` for each stage,
        from ``n - 1`` down to 0.
Rule 3. A stage must have a tape when it is reversed; a stage is taped only once.
Rule 4. A working state from which no stage is left to run or to invert is released: in backward,
        when a stage of a lower number is reversed.

NOTE [ Groups ]

Groups are neighbouring stages that a schedule always treats alike, as those of a segment of `sqrt`.
No state between them is ever kept, so one stage in the place of all of them runs as many forwards
and keeps as many bytes. It holds its input while it runs, so a group begins with a kept state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from textwrap import wrap
from typing import TypeVar

from recoup._arguments import check_type, check_whole


@dataclass(frozen=True, slots=True)
class _OnState:
    """Base class of the actions on one state."""

    index: int

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} x_{self.index}"


@dataclass(frozen=True, slots=True)
class _OnStage:
    """Base class of the actions on one stage."""

    index: int

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.index}"


class Keep(_OnState):
    """Keep the working state in memory, to run or to invert stages from it later.

    Kept: the tensors of ``x_index``, until a `Drop`; a tape that begins with the same state shares
    them.

    Args:
        index: number of the state, which must be the working state and not be kept already.

    Example:
        >>> from recoup.schedules import Keep, sqrt
        >>> [action.index for action in sqrt(10).actions if isinstance(action, Keep)]
        [0, 4, 7]
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Offload(_OnState):
    """Copy the working state to host memory or to a folder, to run stages from it later.

    Kept: ``x_index`` there, until a `Drop`, and nothing of it on the device once its copy has been
    made. Copies run behind the computation (See `simulate` for the bytes in flight), and backward
    takes states back before it needs them, the last one first.

    Args:
        index: number of the state, which must be the working state and be neither kept nor
            offloaded. The chain's last state cannot be offloaded.
        to: "host" or the path of a folder, as in `recoup.offloading`. States on the CPU are in
            host memory already.

    Example:
        >>> from recoup.schedules import Keep, Offload, Schedule, simulate, sqrt
        >>> offloads = [Offload(a.index) if isinstance(a, Keep) else a for a in sqrt(10).actions]
        >>> simulation = simulate(Schedule(10, tuple(offloads)))
        >>> simulation.peak_states, simulation.peak_offloaded_bytes
        (0, 3)
    """

    to: str = "host"

    def __str__(self) -> str:
        return f"offload x_{self.index}" + ("" if self.to == "host" else f" to {self.to}")


class Drop(_OnState):
    """Release a state that is kept or offloaded.

    Kept: nothing. If ``x_index`` is also the working state, the next action can still use it.

    Args:
        index: number of the state, which must be kept or offloaded.

    Example:
        >>> from recoup.schedules import Drop, sqrt
        >>> [action.index for action in sqrt(10).actions if isinstance(action, Drop)]
        [7, 4, 0]
    """

    __slots__ = ()


class Load(_OnState):
    """Make a state the working state, copying it back to the device if it is offloaded.

    The state stays kept, or offloaded, so that it can be loaded again. Only backward loads states.

    Args:
        index: number of the state, which must be kept or offloaded.

    Example:
        >>> from recoup.schedules import Load, revolve
        >>> [action.index for action in revolve(3, 1).actions if isinstance(action, Load)]
        [0, 0]
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Advance:
    """Run stages ``start ... stop - 1`` without their tapes, from ``x_start`` to ``x_stop``.

    Kept: the new working state, ``x_stop``, and the results that are asked for. Autograd holds an
    empty slot for each residual of these stages, and a later `Tape` or `Invert` of the stage fills
    it.

    Args:
        start: number of the first stage, whose input must be the working state.
        stop: number of the last stage plus one.
        results: which results of operators a run of one stage in the sweep keeps: 0 for none, ``r``
            for ``results[r - 1]`` of the stage's `Cost`. The next run of the stage uses them up.

    Example:
        >>> from recoup.schedules import Advance, sqrt
        >>> [str(action) for action in sqrt(10).actions if isinstance(action, Advance)]
        ['run 0 to 3', 'run 4 to 6', 'run 7 to 8']
    """

    start: int
    stop: int
    results: int = 0

    def __str__(self) -> str:
        last, kept = self.stop - 1, f" (results {self.results})" if self.results else ""
        return f"run {self.start}" + (f" to {last}" if self.start < last else "") + kept


@dataclass(frozen=True, slots=True)
class Tape:
    """Run one stage with its tape, from ``x_index`` to ``x_{index+1}``.

    Kept: the residuals of the stage, until its `Reverse`. In the sweep autograd keeps them as
    usual; in backward the run fills the empty slots that an `Advance` left.

    Args:
        index: number of the stage, whose input must be the working state.
        variant: which tape is made in the sweep: 0 is the whole tape, ``v`` is ``variants[v - 1]``
            of the stage's `Cost`. A tape made in backward is always whole.

    Example:
        >>> from recoup.schedules import Reverse, Schedule, Tape, simulate
        >>> simulate(Schedule(2, (Tape(0), Tape(1), Reverse(1), Reverse(0)))).peak_tapes
        2
    """

    index: int
    variant: int = 0

    def __str__(self) -> str:
        return f"tape {self.index}" + (f" (variant {self.variant})" if self.variant else "")


class Invert(_OnStage):
    """Invert one stage in backward, from ``x_{index+1}`` to ``x_index``, and make its tape.

    The inverse and the tape share the runs of the stage's networks. Kept: the residuals of the
    stage, until its `Reverse`; ``x_{index+1}`` is released, unless it is kept.

    Args:
        index: number of the stage, which must be invertible and whose output must be the working
            state.

    Example:
        >>> from recoup.schedules import Invert, constant
        >>> [str(action) for action in constant(3).actions if isinstance(action, Invert)]
        ['invert 2', 'invert 1', 'invert 0']
    """

    __slots__ = ()


class Reverse(_OnStage):
    """Run the backward of one stage, and release its tape.

    Autograd runs it, not the executor: a schedule names it so that the bytes can be counted. Kept:
    nothing.

    Args:
        index: number of the stage, which must have a tape and be the last stage that is not
            reversed.

    Example:
        >>> from recoup.schedules import Reverse, linear
        >>> [action.index for action in linear(3).actions if isinstance(action, Reverse)]
        [2, 1, 0]
    """

    __slots__ = ()


Action = Keep | Offload | Drop | Load | Advance | Tape | Invert | Reverse
_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: the actions that run a chain forward and restore its tapes in backward.

    Args:
        num_stages: number of stages of the chain.
        actions: the actions of the sweep, then of backward; see NOTE [ The order of actions ].
        name: the name in reports.

    Raises:
        ValueError: there is no stage, or `actions` is no tuple or list. `simulate` looks at each.

    Example:
        >>> from recoup.schedules import Keep, Reverse, Schedule, Tape
        >>> schedule = Schedule(2, (Tape(0), Tape(1), Reverse(1), Reverse(0)), name="by hand")
        >>> print(schedule)
        by hand, 2 stages
        sweep: tape 0, tape 1
        backward: reverse 1, reverse 0
    """

    num_stages: int
    actions: tuple[Action, ...]
    name: str = "schedule"

    def __post_init__(self) -> None:
        check_whole(num_stages=self.num_stages)
        check_type((tuple, list), "a tuple of actions", actions=self.actions)

    def __str__(self) -> str:
        stages = "stage" if self.num_stages == 1 else "stages"
        lines = [f"{self.name}, {self.num_stages} {stages}"]
        end = self.sweep_end
        for title, part in (("sweep", self.actions[:end]), ("backward", self.actions[end:])):
            words = f"{title}: " + ", ".join(map(str, part))
            lines += wrap(words, width=100, subsequent_indent=" " * (len(title) + 2))
        return "\n".join(lines)

    @property
    def sweep_end(self) -> int:
        """The number of actions of the sweep; those after them are executed in backward."""
        for position, action in enumerate(self.actions, start=1):
            match action:
                case Tape(index):
                    reached = index + 1
                case Advance(_, stop):
                    reached = stop
                case _:
                    continue
            if reached == self.num_stages:
                keeps_output = self.actions[position : position + 1] == (Keep(reached),)
                return position + keeps_output
        return len(self.actions)


def actions_of(part: _Part, expand: Callable[[_Part], Sequence[Action | _Part]]) -> list[Action]:
    """Return the actions that solve a part of a chain, which expands to actions and further parts.

    A state that is dropped where it would be kept next stays kept, and runs in a row become one.

    Example:
        >>> from recoup.schedules.actions import Advance, Tape, actions_of
        >>> actions_of(2, lambda stop: [Advance(0, 1), Advance(1, stop), Tape(stop)])
        [Advance(start=0, stop=2, results=0), Tape(index=2, variant=0)]
    """
    actions: list[Action] = []
    # Not recursive, because a chain of 1000 stages nests deeper than Python allows.
    waiting: list[Action | _Part] = [part]
    while waiting:
        item = waiting.pop()
        if not isinstance(item, Action):
            waiting += reversed(expand(item))
            continue
        match (actions[-1] if actions else None), item:
            case Drop(index), Keep(same) if index == same:
                actions.pop()
            case Advance(start, _, 0), Advance(_, stop, 0):
                actions[-1] = Advance(start, stop)
            case _:
                actions.append(item)
    return actions


# -- groups (See NOTE [ Groups ]) ------------------------------------------------------------------


def groups_of(schedule: Schedule) -> list[range]:
    """Return the groups of a schedule, as ranges of stages in order.

    Two neighbours are in one group if the sweep advances over both from a kept state, each action
    on one of them is next to the same action on the other, and none concerns the state in between.

    Example:
        >>> from recoup.schedules import sqrt
        >>> from recoup.schedules.actions import groups_of
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

    Example:
        >>> from recoup.schedules import sqrt
        >>> from recoup.schedules.actions import groups_of, on_groups
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
