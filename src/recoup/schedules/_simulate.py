"""The cost of a schedule without running it: its totals, and its memory moment by moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from recoup._arguments import check_real, check_type
from recoup.errors import ScheduleError
from recoup.schedules.actions import (
    Action,
    Advance,
    Drop,
    Invert,
    Load,
    Offload,
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
        waiting_seconds: the time that the computation waits for copies, if the speed of each place
            is given.

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
    waiting_seconds: float = 0.0


def simulate(
    schedule: Schedule,
    state_bytes: int | Sequence[int] = 1,
    tape_bytes: int | Sequence[int] = 1,
    *,
    costs: Sequence[Cost] | None = None,
    in_flight_bytes: int = 0,
    bytes_per_second: Mapping[str, float] | None = None,
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
        bytes_per_second: the speed of each place that states are offloaded to, such as
            ``{"host": 12e9, "/scratch": 2e9}``; needs costs in seconds. None if copies take no
            time, or the time that the costs name.

    Returns:
        The counts. With the default sizes `peak_bytes` is in units of one state or tape.

    Raises:
        ScheduleError: an action is impossible at its position, or the schedule is incomplete; the
            message names the action, its position and the reason.
        ValueError: a sequence has the wrong length, a size is negative, or a speed is missing.

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
        if bytes_per_second is not None:  # which says what copies cost
            costs = [replace(cost, offload_seconds=0.0) for cost in costs]
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
        waiting_seconds=_waiting_seconds(schedule, costs, bytes_per_second, in_flight_bytes),
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


# -- copies ----------------------------------------------------------------------------------------


def _waiting_seconds(
    schedule: Schedule,
    costs: Sequence[Cost] | None,
    bytes_per_second: Mapping[str, float] | None,
    in_flight_bytes: int,
) -> float:
    """Return the time that a schedule waits for copies, which run behind the computation."""
    if bytes_per_second is None:
        return 0.0
    if costs is None:
        raise ValueError(
            "`bytes_per_second` is given without `costs`, but the time between copies is that of "
            "the stages. Give a `Cost` for each stage, with times in seconds."
        )
    clock = _Clock(costs, bytes_per_second, in_flight_bytes)
    for action in schedule.actions:
        match action:
            case Advance(start, stop):
                clock.now += sum(cost.seconds for cost in costs[start:stop])
            case Tape(index):
                clock.now += costs[index].seconds
            case Invert(index):
                clock.now += costs[index].seconds + costs[index].invert_seconds
            case Reverse(index):
                clock.now += _BACKWARD * costs[index].seconds
            case Offload(index, to):
                if not bytes_per_second.get(to, 0) > 0:
                    raise ValueError(
                        f"`bytes_per_second[{to!r}]` is {bytes_per_second.get(to)}, but the "
                        "schedule offloads there: it must be above 0"
                    )
                clock.offload(index, to)
            case Load(index):
                clock.load(index)
            case Drop(index):
                clock.drop(index)
            case _:
                pass
    return clock.waited


class _Clock:
    """The time of a schedule, and the copies that are under way."""

    def __init__(
        self, costs: Sequence[Cost], bytes_per_second: Mapping[str, float], in_flight_bytes: int
    ) -> None:
        self.now = self.waited = 0.0
        self._costs = costs
        self._speeds = bytes_per_second
        self._bound = in_flight_bytes
        self._free: dict[str, float] = {}  # when a place begins its next copy
        self._away: dict[int, tuple[str, float]] = {}  # where a state is, and when it has landed
        self._here: set[int] = set()  # states whose memory on the device is not freed yet
        self._arriving: dict[int, float] = {}  # when each state that is being fetched arrives

    def offload(self, index: int, to: str) -> None:
        """Begin to copy a state, when it may be in flight."""
        num_bytes = self._costs[index].state_bytes
        landing = sorted((at, key) for key, (_, at) in self._away.items() if at > self.now)
        in_flight = sum(self._costs[key].state_bytes for _, key in landing)
        for at, key in landing:
            if in_flight + num_bytes <= self._bound:
                break
            self._wait(at)
            in_flight -= self._costs[key].state_bytes
        self._here = {key for key in self._here if self._away[key][1] > self.now} | {index}
        self._away[index] = to, self._copy(index, to)

    def load(self, index: int) -> None:
        """Wait for a state, and begin to fetch those that were offloaded before it."""
        if index not in self._away:
            return
        to, landed = self._away[index]
        if index in self._here:
            at = self.now
            if landed <= self.now:
                self._here.remove(index)
        else:
            at = self._arriving.pop(index, None) or self._copy(index, to)
        in_flight = {*self._arriving, *self._here, *([index] if at > self.now else [])}
        room = self._bound - sum(self._costs[key].state_bytes for key in in_flight)
        for before in sorted((key for key in self._away if key < index), reverse=True):
            if before in self._arriving or before in self._here:
                continue
            room -= self._costs[before].state_bytes
            if room < 0:
                break
            self._arriving[before] = self._copy(before, self._away[before][0])
        self._wait(at)

    def drop(self, index: int) -> None:
        """Forget a state."""
        self._away.pop(index, None)
        self._here.discard(index)
        self._arriving.pop(index, None)

    def _copy(self, index: int, to: str) -> float:
        """Begin a copy; return when it ends."""
        seconds = self._costs[index].state_bytes / self._speeds[to]
        self._free[to] = max(self.now, self._free.get(to, 0.0)) + seconds
        return self._free[to]

    def _wait(self, until: float) -> None:
        self.waited += max(until - self.now, 0.0)
        self.now = max(until, self.now)
