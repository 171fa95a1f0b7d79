"""The cost of a schedule without running it: its totals, and its memory moment by moment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from recoup._arguments import check_real, check_type
from recoup.errors import ScheduleError
from recoup.schedules.actions import (
    Action,
    Advance,
    Reverse,
    Schedule,
    Tape,
)
from recoup.schedules.costs import Cost, require_costs, require_size
from recoup.schedules.walk import Impossible, Sizes, Walk

# Time of backward in forwards: the backward of a product is two products.
_BACKWARD = 2.0


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of `simulate`.

    Args:
        num_forwards: number of forward runs of stages, with or without a tape, including partial
            runs for selective tapes.
        num_inverses: number of inverse runs of stages.
        peak_bytes: the most bytes held at any time, counted as in `simulate`.
        peak_states: the most states kept at any time, without the working state.
        peak_tapes: the most tapes held at any time.
        forwards_per_stage: `num_forwards` for each stage.
        seconds: time of all runs, inverses, selective tapes and offloading; 0 without costs.
        peak_offloaded_bytes: the most bytes in host memory and in folders at any time.

    Example:
        >>> from recoup.schedules import linear, simulate
        >>> simulate(linear(3)).forwards_per_stage
        (1, 1, 1)
    """

    num_forwards: int
    num_inverses: int
    peak_bytes: int
    peak_states: int
    peak_tapes: int
    forwards_per_stage: tuple[int, ...]
    seconds: float = 0.0
    peak_offloaded_bytes: int = 0


def simulate(
    schedule: Schedule,
    state_bytes: int | Sequence[int] = 1,
    tape_bytes: int | Sequence[int] = 1,
    *,
    costs: Sequence[Cost] | None = None,
    in_flight_bytes: int = 0,
) -> Simulation:
    """Walk through a schedule: check every action, count the runs and the bytes.

    The bytes held are counted after every action, and after every stage of an `Advance`. They are:

    - every tape, with the stage's input in it;
    - every state that is kept or is the working state, once, unless it is the input of a tape
      that is held (then it is counted in that tape).

    With `costs`, these bytes are counted too, at the worst moment within each run:

    - temporary memory of a run beyond the stage's input, of an inverse beyond its input, and of
      backward beyond the tape;
    - memory of code between the stages that the sweep has passed, until each of them is reversed,
      and memory that the backward of each stage leaves.

    Not counted are parameters and, if `costs` are given, the chain's last state, which belongs to
    the caller. Without `costs`, temporary memory of a stage, its input while it makes its output,
    and gradients are not counted either. The working state is released where backward begins. A
    schedule that needs it in backward must keep it with the last action of the sweep.

    Args:
        schedule: the schedule.
        state_bytes: bytes of every state; or of ``x_0 ... x_n``, ``n + 1`` numbers.
        tape_bytes: bytes of every tape, the stage's input included; or of each tape, ``n`` numbers.
        costs: the cost of each stage, used instead of the sizes; actions that they rule out raise.
        in_flight_bytes: the bytes of states that are leaving, or have come back before they are
            loaded. The executor's bound is twice the largest offloaded state; the peak counts as
            many of them as are offloaded.

    Returns:
        The counts. With the default sizes `peak_bytes` is in units of one state or tape.

    Raises:
        ScheduleError: an action is impossible at its position, or the schedule is incomplete; the
            message names the action, its position and the reason.
        ValueError: a sequence has the wrong length, or a size is negative.

    Example:
        >>> from recoup.schedules import Cost, binomial, linear, simulate
        >>> simulate(binomial(10, 3)).num_forwards
        16
        >>> simulate(linear(2), costs=[Cost(1.0, 1, 3, reverse_bytes=4)] * 2).peak_bytes
        10
    """
    check_type(Schedule, "a Schedule", schedule=schedule)
    require_size("in_flight_bytes", in_flight_bytes)
    if costs is not None:
        require_costs(costs)
        _require_length("costs", len(costs), schedule.num_stages)
        walk = Walk(costs)
    else:
        *states, last = _sizes("state_bytes", state_bytes, schedule.num_stages + 1)
        tapes = _sizes("tape_bytes", tape_bytes, schedule.num_stages)
        sizes = zip(states, tapes, strict=True)
        walk = Walk([Sizes.of(state, tape) for state, tape in sizes], last)
    for position, action in enumerate(schedule.actions):
        _step(walk, action, schedule, f"action {position}, ")
    if walk.remaining:
        missing = "the sweep ends before x_" if not walk.swept else "it never reverses stage "
        number = walk.num_stages if not walk.swept else walk.remaining - 1
        raise ScheduleError(f"`{schedule.name}` is incomplete: {missing}{number}")
    return Simulation(
        num_forwards=sum(walk.forwards),
        num_inverses=walk.num_inverses,
        peak_bytes=walk.peak + min(in_flight_bytes, walk.peak_host),
        peak_states=walk.peak_states,
        peak_tapes=walk.peak_tapes,
        forwards_per_stage=tuple(walk.forwards),
        seconds=walk.seconds,
        peak_offloaded_bytes=walk.peak_host,
    )


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


def trace(schedule: Schedule, costs: Sequence[Cost], first: float = 1.0) -> tuple[Moment, ...]:
    """Return the memory at each moment of a schedule; the highest peak is that of `simulate`.

    Args:
        schedule: the schedule.
        costs: the cost of each stage.
        first: the time of a stage's first run, and half of that of its backward, where 1 is what it
            pays to run again, which may take more.

    Returns:
        A moment for each action; an `Advance` has one for each of its stages.

    Raises:
        ScheduleError: an action is impossible at its position.
        ValueError: `costs` has the wrong length.

    Example:
        >>> from recoup.schedules import Cost, linear, trace
        >>> [moment.held_bytes for moment in trace(linear(2), [Cost(1.0, 1, 3)] * 2)]
        [4, 6, 3, 0]
    """
    check_type(Schedule, "a Schedule", schedule=schedule)
    require_costs(costs)
    check_real(first=first)
    if not 0 <= first < math.inf:
        raise ValueError(f"`first` is {first}, but must be at least 0 and finite.")
    _require_length("costs", len(costs), schedule.num_stages)
    walk = Walk(costs)
    moments: list[Moment] = []
    owed = [0.0] * len(costs)  # time that backward pays for the tape of each stage
    clock = 0.0
    for action in _singly(schedule.actions):
        walk.peak, before = 0, walk.seconds
        _step(walk, action, schedule)
        spent = walk.seconds - before
        if isinstance(action, Tape):
            cost = costs[action.index]
            tape = cost.tape_again if walk.in_backward else cost.tape(action.variant)
            owed[action.index] = tape.seconds
            spent -= owed[action.index]
        elif isinstance(action, Reverse):
            spent += first * _BACKWARD * costs[action.index].seconds + owed[action.index]
        clock += spent if walk.in_backward else first * spent
        moments.append(Moment(action, clock, walk.peak, walk.held, walk.in_backward))
    return tuple(moments)


def _step(walk: Walk, action: Action, schedule: Schedule, place: str = "") -> None:
    try:
        walk.step(action)
    except Impossible as reason:
        message = f"`{schedule.name}` cannot do {place}{action!r}: {reason}"
        raise ScheduleError(message) from None


def _singly(actions: Sequence[Action]) -> Iterator[Action]:
    for action in actions:
        if isinstance(action, Advance):
            stages = range(action.start, action.stop)
            yield from (replace(action, start=index, stop=index + 1) for index in stages)
        else:
            yield action


def _require_length(name: str, length: int, needed: int, way_out: str = "") -> None:
    if length != needed:
        raise ValueError(
            f"`{name}` has {length} numbers, but this schedule needs {needed}{way_out}"
        )


def _sizes(name: str, sizes: int | Sequence[int], length: int) -> Sequence[int]:
    sizes = sizes if isinstance(sizes, Sequence) else [sizes] * length
    for size in sizes:
        require_size(name, size)
    _require_length(name, len(sizes), length, ", or one for all")
    return sizes
