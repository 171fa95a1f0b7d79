"""The constant schedule: invertible stages keep no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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

__all__ = ["Way", "constant"]

Way = Literal["invert", "recompute", "keep"]


def constant(ways: int | Sequence[Way]) -> Schedule:
    """Restore the input of each stage by inverting it, or in the way given for that stage.

    Kept: the output of each sequence of inverted stages, the input of each recomputed stage, and
    the tape of each kept stage; so one state in all if every stage is inverted, at any depth.
    Backward pays one inverse of each inverted stage, which also makes its tape, and one forward
    run of each recomputed one.

    Args:
        ways: the way of each stage, ``"invert"``, ``"recompute"`` or ``"keep"``; or the number of
            stages, all of them inverted.

    Returns:
        The schedule.

    Raises:
        ValueError: there is no stage, or a way is not one of the three.

    Example:
        >>> from recoup.schedules import constant, simulate
        >>> simulation = simulate(constant(100))
        >>> simulation.num_forwards, simulation.num_inverses, simulation.peak_states
        (100, 100, 1)
        >>> simulate(constant(["invert", "keep", "recompute"])).num_forwards
        4

    Source: Gomez et al., "The reversible residual network" (2017).
    """
    ways = _checked(ways)
    kept = _kept(ways)
    return Schedule(len(ways), (*_sweep(ways, kept), *_backward(ways)), name="constant")


def _checked(ways: int | Sequence[Way]) -> Sequence[Way]:
    if not isinstance(ways, Sequence):
        require_positive("ways", ways)
        return ["invert" for _ in range(ways)]
    if not ways:
        raise ValueError("`ways` is empty, but a chain has at least one stage")
    for index, way in enumerate(ways):
        if way not in ("invert", "recompute", "keep"):
            raise ValueError(
                f"`ways[{index}]` is {way!r}, but it must be 'invert', 'recompute' or 'keep'"
            )
    return ways


def _kept(ways: Sequence[Way]) -> set[int]:
    """Return the states to keep: inputs of recomputed stages, and outputs to invert from."""
    kept = {i for i, way in enumerate(ways) if way == "recompute"}
    kept |= {i + 1 for i, way in enumerate(ways) if way == "invert" and not _inverted(ways, i + 1)}
    return kept


def _inverted(ways: Sequence[Way], index: int) -> bool:
    return 0 <= index < len(ways) and ways[index] == "invert"


def _sweep(ways: Sequence[Way], kept: set[int]) -> list[Action]:
    actions: list[Action] = []
    start = 0  # of the stages that are run without a tape and have no action yet
    for index in range(len(ways) + 1):
        taped = index < len(ways) and ways[index] == "keep"
        if start < index and (index in kept or taped or index == len(ways)):
            actions.append(Advance(start, index))
            start = index
        if index in kept:
            actions.append(Keep(index))
        if taped:
            actions.append(Tape(index))
            start = index + 1
    return actions


def _backward(ways: Sequence[Way]) -> list[Action]:
    actions: list[Action] = []
    for index in reversed(range(len(ways))):
        match ways[index]:
            case "invert":
                if not _inverted(ways, index + 1):
                    actions += [Load(index + 1), Drop(index + 1)]
                actions.append(Invert(index))
            case "recompute":
                # The inverse of the stage before, if there is one, begins at this state.
                drop = [] if _inverted(ways, index - 1) else [Drop(index)]
                actions += [Load(index), *drop, Tape(index)]
            case "keep":
                pass
        actions.append(Reverse(index))
    return actions
