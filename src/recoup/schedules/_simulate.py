"""Simulation: computes the cost of a schedule without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recoup.errors import ScheduleError
from recoup.schedules.actions import Schedule
from recoup.schedules.bounds import require_positive
from recoup.schedules.costs import Cost
from recoup.schedules.walk import Walk

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of `simulate`.

    Args:
        num_forwards: number of forward runs of stages, with or without a tape, including partial
            runs for thin tapes.
        num_inverses: number of inverse runs of stages.
        peak_bytes: the most bytes held at any time, counted as in `simulate`.
        peak_states: the most states kept at any time, without the working state.
        peak_tapes: the most tapes held at any time.
        forwards_per_stage: `num_forwards` for each stage.
        seconds: time of all runs and inverses, of thin tapes and of offloading; 0 without costs.
        peak_offloaded_bytes: the most bytes in host memory at any time.

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
    require_positive("schedule.num_stages", schedule.num_stages)
    if costs is not None:
        _require_length("costs", len(costs), schedule.num_stages)
        walk = Walk.of(costs)
    else:
        states = _sizes("state_bytes", state_bytes, schedule.num_stages + 1)
        walk = Walk(states, _sizes("tape_bytes", tape_bytes, schedule.num_stages))
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
    return Simulation(
        num_forwards=sum(walk.forwards),
        num_inverses=walk.num_inverses,
        peak_bytes=walk.peak,
        peak_states=walk.peak_states,
        peak_tapes=walk.peak_tapes,
        forwards_per_stage=tuple(walk.forwards),
        seconds=walk.seconds,
        peak_offloaded_bytes=walk.peak_host,
    )


def _require_length(name: str, length: int, needed: int, way_out: str = "") -> None:
    if length != needed:
        raise ValueError(
            f"`{name}` has {length} numbers, but this schedule needs {needed}{way_out}"
        )


def _sizes(name: str, sizes: int | Sequence[int], length: int) -> Sequence[int]:
    sizes = [sizes] * length if isinstance(sizes, int) else sizes
    _require_length(name, len(sizes), length, ", or one for all")
    if min(sizes) < 0:
        raise ValueError(f"`{name}` has a negative number, {min(sizes)}")
    return sizes
