"""Memory modes: the schedules that `memory=` means, and those in one sweep.

`linear`, `sqrt` and `offloaded` cut a chain into segments. The sweep keeps the input of each but
the last, or offloads it, and backward reverses one segment at a time. `constant` goes by stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from math import isqrt
from typing import Literal, cast, get_args

from recoup._arguments import check_choice, check_whole
from recoup.schedules._binomial import binomial, log, revolve
from recoup.schedules._simulate import simulate
from recoup.schedules.actions import (
    Action,
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Offload,
    Reverse,
    Schedule,
    Tape,
    actions_of,
)

Way = Literal["invert", "recompute", "keep"]
# A string that is none of these is a number of bytes, such as "2 GiB".
Memory = Literal["linear", "inputs", "sqrt", "log", "constant"] | str | int | Schedule


def linear(n: int) -> Schedule:
    """Tape every stage in the sweep; the fastest schedule, with the most memory.

    Kept: `n` tapes. Backward pays nothing: `n` forward runs in all.

    Args:
        n: number of stages.

    Returns:
        The schedule.

    Raises:
        ValueError: `n` is below one.

    Example:
        >>> from recoup.schedules import linear, simulate
        >>> simulation = simulate(linear(100))
        >>> simulation.num_forwards, simulation.peak_tapes
        (100, 100)
    """
    check_whole(n=n)
    return _by_segments([n], Keep, _taped, name="linear")


def sqrt(n: int) -> Schedule:
    """Cut the chain into segments of ``k, k - 1, ...`` stages and tape one segment at a time.

    When a segment is taped, the inputs of all segments before it are kept, so later segments are
    shorter: each segment then has the same peak, 29 % below that of segments of equal length. The
    last segment is taped in the sweep and never run again.

    Kept: the input of each segment but the last, and the tapes of one segment; with states and
    tapes of one unit each, at most ``k + 1`` units with the working state, where ``k`` is the
    least number with ``k (k + 1) / 2 >= n``. Backward pays one forward run of each stage outside
    the last segment: at most ``2 n - 1`` forward runs in all.

    Args:
        n: number of stages.

    Returns:
        The schedule.

    Raises:
        ValueError: `n` is below one.

    Example:
        >>> from recoup.schedules import simulate, sqrt
        >>> simulation = simulate(sqrt(100))
        >>> simulation.num_forwards, simulation.peak_bytes
        (197, 15)

    Source: the two-sweep point of Griewank and Walther, "Algorithm 799: revolve" (2000); equal
    segments are Chen et al., "Training deep nets with sublinear memory cost" (2016).
    """
    check_whole(n=n)
    return _by_segments(segment_lengths(n), Keep, _taped, name="sqrt")


def segment_lengths(n: int) -> list[int]:
    """Return the segment lengths: the fewest of ``k, k - 1, ...`` that reach `n`, the first cut."""
    longest = (isqrt(8 * n - 7) + 1) // 2
    segments: list[int] = []
    while sum(segments) < n:
        segments.append(longest - len(segments))
    # The excess is cut from the first segment: the last one is run only once, so it should be as
    # long as the peak allows.
    segments[0] -= sum(segments) - n
    return segments


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
        ValueError: `n`, `every` or `slots` is below one, or `to` is no string, or an empty one.

    Example:
        >>> from recoup.schedules import offloaded, simulate
        >>> simulation = simulate(offloaded(64, "/scratch", every=8))
        >>> simulation.num_forwards, simulation.peak_tapes, simulation.peak_offloaded_bytes
        (120, 8, 7)

    Source: Stumm and Walther, "MultiStage approaches for optimal offline checkpointing" (2009).
    """
    check_whole(n=n, every=every)
    if not isinstance(cast("object", to), str) or not to:
        raise ValueError(f'`to` is {to!r}, but must be "host" or the path of a folder.')
    first, *others = range(n, 0, -every)[::-1]

    def within(num_stages: int) -> Sequence[Action]:
        return _taped(num_stages) if slots is None else binomial(num_stages, slots).actions

    lengths = [first, *(every for _ in others)]
    return _by_segments(
        lengths, lambda at: Offload(at, to), within, name=f"offloaded, every {every}"
    )


def _by_segments(
    lengths: Sequence[int],
    leave: Callable[[int], Action],
    within: Callable[[int], Sequence[Action]],
    *,
    name: str,
) -> Schedule:
    """Return the schedule that reverses segments one at a time.

    The action `leave` keeps the input of a segment; the actions `within` it are those of a chain of
    so many stages.
    """
    *earlier, last = pairwise((0, *accumulate(lengths)))
    actions: list[Action] = []
    for start, stop in earlier:
        actions += [leave(start), Advance(start, stop)]
    actions += _moved(within, *last)
    for start, stop in reversed(earlier):
        actions += [Load(start), Drop(start), *_moved(within, start, stop)]
    return Schedule(last[1], tuple(actions), name=name)


def _moved(within: Callable[[int], Sequence[Action]], start: int, stop: int) -> list[Action]:
    """Return the actions that reverse one segment, whose input is the working state."""
    return [
        replace(action, start=action.start + start, stop=action.stop + start)
        if isinstance(action, Advance)
        else replace(action, index=action.index + start)
        for action in within(stop - start)
    ]


def _taped(num_stages: int) -> list[Action]:
    """Return the actions that tape all stages at once."""
    stages = range(num_stages)
    return [*map(Tape, stages), *map(Reverse, reversed(stages))]


# -- invertible stages -----------------------------------------------------------------------------


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
    actions = actions_of(0, partial(_pass_of_constant, ways))
    return Schedule(len(ways), tuple(actions), name="constant")


def _checked(ways: int | Sequence[Way]) -> Sequence[Way]:
    if not isinstance(ways, Sequence):
        check_whole(ways=ways)
        return ["invert" for _ in range(ways)]
    if not ways:
        raise ValueError("`ways` is empty, but a chain has at least one stage")
    check_choice(*get_args(Way), **{f"ways[{index}]": way for index, way in enumerate(ways)})
    return ways


def _pass_of_constant(ways: Sequence[Way], index: int) -> list[Action | int]:
    """Return the pass through stage `index`, within which that through the later ones stands."""
    if index == len(ways):
        return []
    later, run, reverse = index + 1, Advance(index, index + 1), Reverse(index)
    match ways[index]:
        case "keep":
            return [Tape(index), later, reverse]
        case "recompute" if index > 0 and ways[index - 1] == "invert":
            # That stage keeps this state, for its inverse to begin at.
            return [run, later, Load(index), Tape(index), reverse]
        case "recompute":
            return [Keep(index), run, later, Load(index), Drop(index), Tape(index), reverse]
        case "invert" if later < len(ways) and ways[later] == "invert":
            return [run, later, Invert(index), reverse]
        case "invert":
            return [run, Keep(later), later, Load(later), Drop(later), Invert(index), reverse]


# -- the argument `memory` -------------------------------------------------------------------------


def shown(memory: Memory) -> str:
    """Return `memory` for a repr; a schedule is shown by its name, without its actions."""
    return f"<schedule {memory.name}>" if isinstance(memory, Schedule) else repr(memory)


def schedule_for(memory: Memory, num_stages: int, ways: Sequence[Way] | None = None) -> Schedule:
    """Return the schedule that `memory` means for a chain; raise if it means none.

    Under "constant" each stage restores its input in its way; all are inverted if none are given.

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
