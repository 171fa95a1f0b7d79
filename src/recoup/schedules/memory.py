"""Memory modes: turns the argument `memory=` into a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from recoup._arguments import check_whole
from recoup.schedules._binomial import binomial, log, revolve
from recoup.schedules._simulate import simulate
from recoup.schedules.actions import Schedule
from recoup.schedules.segmented import Way, constant, linear, sqrt

# A string that is none of these is a number of bytes, such as "2 GiB".
Memory = Literal["linear", "inputs", "sqrt", "log", "constant"] | str | int | Schedule


def shown(memory: Memory) -> str:
    """Return `memory` for a repr; a schedule is shown by its name, without its actions."""
    return f"<schedule {memory.name}>" if isinstance(memory, Schedule) else repr(memory)


def schedule_for(memory: Memory, num_stages: int, ways: Sequence[Way] | None = None) -> Schedule:
    """Return the schedule that `memory` means for a chain of `num_stages` stages.

    Args:
        memory: "linear", "inputs", "sqrt", "log", "constant", a number of slots, or a
            schedule.
        num_stages: number of stages, at least 1.
        ways: the way in which each stage restores its input under "constant"; all are inverted if
            None.

    Returns:
        The schedule.

    Raises:
        ValueError: `memory` is not one of these, or a schedule for another number of stages.
        ScheduleError: a schedule has an impossible action, or is incomplete.

    Example:
        >>> from recoup.schedules.memory import schedule_for
        >>> schedule_for("sqrt", 100).name
        'sqrt'
    """
    if isinstance(memory, Schedule):
        if memory.num_stages != num_stages:
            raise ValueError(
                f"`memory` is a schedule for {memory.num_stages} stages, but the chain has "
                f"{num_stages}. Make the schedule for {num_stages} stages."
            )
        simulate(memory)  # raises on one that cannot be executed, by its own numbers of stages
        return memory
    if isinstance(memory, int) and not isinstance(memory, bool):
        check_whole(memory=memory)
        return binomial(num_stages, memory)
    match memory:
        case "linear":
            return linear(num_stages)
        case "inputs":
            return revolve(num_stages, num_stages)
        case "sqrt":
            return sqrt(num_stages)
        case "log":
            return log(num_stages)
        case "constant":
            return constant(num_stages if ways is None else ways)
        case str() if memory[:1].isdigit():
            raise ValueError(
                f"`memory` is {memory!r}, but a number of bytes needs a chain that keeps its plan "
                f"from step to step, such as recoup.Sequential(*modules, memory={memory!r})."
            )
        case _:
            raise ValueError(
                f'`memory` is {memory!r}, but must be "linear", "inputs", "sqrt", "log", '
                '"constant", a number of bytes such as "2 GiB", a number of slots, or a Schedule.'
            )
