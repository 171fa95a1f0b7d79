"""Two-tier schedules: states that wait on a disk or in host memory, and a few in memory."""

from __future__ import annotations

from recoup.schedules._binomial import binomial
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
from recoup.schedules.bounds import require_positive
from recoup.schedules.segmented import linear

__all__ = ["offloaded"]


def offloaded(n: int, to: str = "host", *, every: int = 1, slots: int | None = None) -> Schedule:
    """Offload the input of each segment of the chain, and reverse one segment at a time in memory.

    The chain is cut into segments of `every` stages, the first of them shorter where that does not
    divide `n`. The last segment is never offloaded. Each other one is loaded when its backward
    comes, and reversed as a chain of its own: all of its tapes at once, or by `binomial` with
    `slots` states in memory. Copies run behind the computation, in both directions.

    Kept: the tapes of one segment, or what `binomial` keeps of one; the input of every segment is
    elsewhere. Backward pays one forward run of each stage outside the last segment, and, with
    `slots`, those of `binomial` within segments.

    Args:
        n: number of stages.
        to: "host" or the path of a folder, as in `recoup.offloading`.
        every: number of stages in a segment.
        slots: number of states in memory for the segment that is reversed; None to tape all of it.

    Returns:
        The schedule.

    Raises:
        ValueError: `n`, `every` or `slots` is below one, or `to` is no string.

    Example:
        >>> from recoup.schedules import offloaded, simulate
        >>> simulation = simulate(offloaded(64, "/scratch", every=8))
        >>> simulation.num_forwards, simulation.peak_tapes, simulation.peak_offloaded_bytes
        (120, 8, 7)

    Source: Stumm and Walther, "MultiStage approaches for optimal offline checkpointing" (2009).
    """
    require_positive("n", n)
    require_positive("every", every)
    if not isinstance(to, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f'`to` is {to!r}, but must be "host" or the path of a folder.')
    stops = range(n, 0, -every)
    segments = [(max(stop - every, 0), stop) for stop in stops]  # the last one first
    (start, stop), *others = segments
    last = _within(start, stop, slots)
    sweep = [
        action
        for begin, end in reversed(others)
        for action in (Offload(begin, to), Advance(begin, end))
    ]
    backward = [
        action
        for begin, end in others
        for action in (Load(begin), Drop(begin), *_within(begin, end, slots))
    ]
    return Schedule(n, (*sweep, *last, *backward), name=f"offloaded, every {every}")


def _within(start: int, stop: int, slots: int | None) -> list[Action]:
    """Return the actions that reverse one segment, whose input is the working state."""
    num_stages = stop - start
    schedule = linear(num_stages) if slots is None else binomial(num_stages, slots)
    return [_moved(action, start) for action in schedule.actions]


def _moved(action: Action, by: int) -> Action:
    match action:
        case Advance(start, stop):
            return Advance(start + by, stop + by)
        case Tape() | Invert() | Reverse():
            return type(action)(action.index + by)
        case Offload(index, to):
            return Offload(index + by, to)
        case _:
            return type(action)(action.index + by)
