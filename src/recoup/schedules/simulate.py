"""What a schedule costs, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recoup.errors import ScheduleError
from recoup.schedules.actions import (
    Action,
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Reverse,
    Schedule,
    Tape,
)
from recoup.schedules.bounds import require_positive

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What `simulate` found.

    Args:
        num_forwards: runs of a stage's forward, with or without a tape.
        num_inverses: runs of a stage's inverse.
        peak_bytes: the most that is held at any time; `simulate` says what is counted.
        peak_states: the most states that are kept at any time, the working state left out.
        peak_tapes: the most tapes that are held at any time.
        forwards_per_stage: `num_forwards`, stage by stage.

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


def simulate(
    schedule: Schedule,
    state_bytes: int | Sequence[int] = 1,
    tape_bytes: int | Sequence[int] = 1,
) -> Simulation:
    """Walk through a schedule: check every action, count the runs and the bytes.

    Counted after every action, and after every stage of an `Advance`:

    - every tape, with the stage's input in it;
    - every state that is kept or is the working state, once, unless it is the input of a tape
      that is held (then it is in that tape's bytes).

    Not counted: what a stage allocates and frees while it runs, its input beside its output for
    that moment, gradients, parameters. The working state is let go of where backward begins: the
    chain's output is the caller's. A schedule that needs it in backward has to keep it at once,
    with the last action of the sweep.

    Args:
        schedule: the schedule.
        state_bytes: bytes of a state; or of ``x_0 ... x_n``, ``n + 1`` numbers.
        tape_bytes: bytes of a tape, the stage's input included; or of each stage's, ``n`` numbers.

    Returns:
        The counts. With the default sizes `peak_bytes` is in units of one state or tape.

    Raises:
        ScheduleError: an action is impossible where it stands, or something is missing at the
            end; the message names the action, its position, and what it needs.
        ValueError: a sequence of sizes has the wrong length, or a size is negative.

    Example:
        >>> from recoup.schedules import binomial, simulate
        >>> simulate(binomial(10, 3)).num_forwards
        16
    """
    require_positive("schedule.num_stages", schedule.num_stages)
    states = _sizes("state_bytes", state_bytes, schedule.num_stages + 1)
    tapes = _sizes("tape_bytes", tape_bytes, schedule.num_stages)
    walk = _Walk(schedule.num_stages, states, tapes)
    for position, action in enumerate(schedule.actions):
        reason = walk.step(action)
        if reason is not None:
            raise ScheduleError(
                f"`{schedule.name}` cannot do action {position}, {action!r}: {reason}"
            )
    if walk.remaining:
        missing = "the sweep ends before x_" if not walk.swept else "it never reverses stage "
        number = walk.num_stages if not walk.swept else walk.remaining - 1
        raise ScheduleError(f"`{schedule.name}` is incomplete: {missing}{number}")
    return walk.result()


def _sizes(name: str, sizes: int | Sequence[int], length: int) -> Sequence[int]:
    sizes = [sizes] * length if isinstance(sizes, int) else sizes
    if len(sizes) != length:
        raise ValueError(
            f"`{name}` has {len(sizes)} numbers, but this schedule needs {length}, or one for all"
        )
    if min(sizes) < 0:
        raise ValueError(f"`{name}` has a negative number, {min(sizes)}")
    return sizes


class _Walk:
    """The memory of a chain while a schedule is executed."""

    def __init__(
        self, num_stages: int, state_bytes: Sequence[int], tape_bytes: Sequence[int]
    ) -> None:
        self.num_stages = num_stages
        self.state_bytes = state_bytes
        self.tape_bytes = tape_bytes
        self.working: int | None = 0
        self.kept: set[int] = set()
        self.tapes: set[int] = set()
        self.remaining = num_stages  # stages that are not reversed; they are the first ones
        self.swept = False  # whether the working state has been x_n
        self.in_backward = False
        self.forwards = [0] * num_stages
        self.num_inverses = 0
        self.counted = [0] * (num_stages + 1)  # bytes of each state that are in `held` now
        self.held = 0
        self.peak = self.peak_states = self.peak_tapes = 0
        self._recount(0)

    def result(self) -> Simulation:
        return Simulation(
            num_forwards=sum(self.forwards),
            num_inverses=self.num_inverses,
            peak_bytes=self.peak,
            peak_states=self.peak_states,
            peak_tapes=self.peak_tapes,
            forwards_per_stage=tuple(self.forwards),
        )

    def step(self, action: Action) -> str | None:
        """Do one action; if it is impossible, do nothing and say why."""
        if self.swept and not self.in_backward and action != Keep(self.num_stages):
            self.in_backward = True
            self._work(None)
        reason = self._refusal(action)
        if reason is not None:
            return reason
        match action:
            case Keep(index):
                self.kept.add(index)
            case Drop(index):
                self.kept.remove(index)
                self._recount(index)
            case Load(index):
                self._work(index)
            case Advance(start, stop):
                self._advance(start, stop)
            case Tape(index):
                self.forwards[index] += 1
                self._tape(index, index + 1)
            case Invert(index):
                self.num_inverses += 1
                self._tape(index, index)
            case Reverse(index):
                self.tapes.remove(index)
                self.held -= self.tape_bytes[index]
                self.remaining -= 1
                self._recount(index)
        self.peak = max(self.peak, self.held)
        self.peak_states = max(self.peak_states, len(self.kept))
        self.peak_tapes = max(self.peak_tapes, len(self.tapes))
        return None

    def _refusal(self, action: Action) -> str | None:
        if not self._in_range(action):
            return f"a chain of {self.num_stages} stages has no such stage or state"
        if not self.swept and isinstance(action, Load | Invert | Reverse):
            return f"it belongs to backward, but the sweep has not reached x_{self.num_stages}"
        match action:
            case Keep(index):
                return self._needs(index) or (
                    f"x_{index} is kept already" if index in self.kept else None
                )
            case Drop(index) | Load(index):
                return None if index in self.kept else f"it needs x_{index} kept, and it is not"
            case Advance(start):
                return self._needs(start)
            case Tape(index):
                return self._needs(index) or self._untaped(index)
            case Invert(index):
                return self._needs(index + 1) or self._untaped(index)
            case Reverse(index):
                if index != self.remaining - 1:
                    return f"the next stage to reverse is {self.remaining - 1}"
                return None if index in self.tapes else f"it needs a tape of stage {index}"

    def _in_range(self, action: Action) -> bool:
        match action:
            case Keep(index) | Drop(index) | Load(index):
                return 0 <= index <= self.num_stages
            case Advance(start, stop):
                return 0 <= start < stop <= self.num_stages
            case Tape(index) | Invert(index) | Reverse(index):
                return 0 <= index < self.num_stages

    def _needs(self, index: int) -> str | None:
        if self.working == index:
            return None
        if self.working is None:
            return (
                f"it needs the working state x_{index}, and the working state is gone where "
                f"backward begins: keep x_{index} in the sweep and load it first"
            )
        return f"it needs the working state x_{index}, and the working state is x_{self.working}"

    def _untaped(self, index: int) -> str | None:
        if index in self.tapes:
            return f"stage {index} is taped already"
        return f"stage {index} is reversed already" if index >= self.remaining else None

    def _recount(self, index: int) -> None:
        present = (index in self.kept or index == self.working) and index not in self.tapes
        now = self.state_bytes[index] if present else 0
        self.held += now - self.counted[index]
        self.counted[index] = now
        self.peak = max(self.peak, self.held)

    def _work(self, index: int | None) -> None:
        before, self.working = self.working, index
        if before is not None:
            self._recount(before)
        if index is not None:
            self._recount(index)
        self.swept = self.swept or index == self.num_stages

    def _advance(self, start: int, stop: int) -> None:
        for index in range(start, stop):
            self.forwards[index] += 1
            self._work(index + 1)

    def _tape(self, index: int, working: int) -> None:
        self.tapes.add(index)
        self.held += self.tape_bytes[index]
        # The input goes into the tape before the output is counted, or it would be counted twice.
        self.counted[index], counted = 0, self.counted[index]
        self.held -= counted
        self._work(working)
