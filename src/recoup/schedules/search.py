"""The fastest schedule for every number of bytes (`frontier`), and for one of them (`optimal`).

A schedule is persistent if it keeps each state and tape until it has served its purpose (see
`optimal`). So a choice for each segment of the chain makes a schedule. The recurrence tries every
choice for every segment, and looks up the parts that the choice leaves. Bytes are not rounded. Of
many solutions of a segment, some are left out.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory" (2019).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil, inf, sqrt
from operator import itemgetter
from typing import NamedTuple

from recoup._arguments import check_real
from recoup.errors import ScheduleError
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
from recoup.schedules.choices import Chain, Choice
from recoup.schedules.costs import Cost, require_costs
from recoup.schedules.memory import linear

# How many times as many solutions are kept of a segment of the sweep: there are few of these.
_IN_SWEEP = 8

# The peak of a solution in bytes, its seconds, and the choice that begins it.
_Solution = tuple[int, float, Choice]


class Front(NamedTuple):
    """The fastest solutions of a segment, from the fewest bytes to the least time."""

    peaks: list[int]  # in bytes, without rounding; rising
    seconds: list[float]  # falling
    choices: list[Choice]  # that begin them

    def within(self, num_bytes: int) -> tuple[int, Choice]:
        """Return the peak and the choice of the fastest solution within a number of bytes."""
        place = bisect_right(self.peaks, num_bytes) - 1
        return self.peaks[place], self.choices[place]


Fronts = Mapping[tuple[int, int], Front]


def fronts_of(chain: Chain, most: int) -> Fronts:
    """Return the front of each segment of a chain.

    Of a segment that is run again, `most` solutions are kept, that with the fewest bytes among
    them.
    """
    nothing = Front([chain.base], [0.0], [])
    fronts = {(index, index): nothing for index in range(chain.num_stages + 1)}
    for start, stop in chain.segments():
        found: list[_Solution] = []
        for choice in chain.choices(start, stop):
            later, earlier = fronts[choice.middle, stop], fronts[start, choice.earlier_stop]
            least = choice.seconds + later.seconds[-1] + earlier.seconds[-1]
            place = bisect_right(found, -least, key=lambda solution: -solution[1])
            bound = found[place][0] if place < len(found) else inf
            if solutions := _begun_by(choice, later, earlier, bound):
                # Of equals the last choice is taken: what runs again early in the sweep does so
                # late in backward, when there is room.
                found = _fastest(solutions + found)
        found = _thinned(found, most * _IN_SWEEP if stop == chain.num_stages else most)
        peaks, seconds, choices = map(list, zip(*found, strict=True))
        fronts[start, stop] = Front(peaks, seconds, choices)
    return fronts


def _begun_by(choice: Choice, later: Front, earlier: Front, bound: float) -> list[_Solution]:
    """Return the solutions that a choice begins, with peaks below a bound."""
    needs, keeps = choice.needs, choice.keeps
    peak = max(needs, keeps + later.peaks[0], earlier.peaks[0])
    at, beside = bisect_right(later.peaks, peak - keeps), bisect_right(earlier.peaks, peak)
    found: list[_Solution] = []
    while peak < bound:
        seconds = choice.seconds + later.seconds[at - 1] + earlier.seconds[beside - 1]
        found.append((int(peak), seconds, choice))
        # More bytes serve once one of the parts has a faster solution within them.
        next_later = keeps + later.peaks[at] if at < len(later.peaks) else inf
        next_earlier = earlier.peaks[beside] if beside < len(earlier.peaks) else inf
        peak = min(next_later, next_earlier)
        if peak == inf:
            break
        at += next_later == peak
        beside += next_earlier == peak
    return found


def _fastest(solutions: list[_Solution]) -> list[_Solution]:
    """Return those solutions than which none with as few bytes is as fast, by bytes."""
    found: list[_Solution] = []
    least = inf
    for solution in sorted(solutions, key=itemgetter(0, 1)):
        if solution[1] < least:
            least = solution[1]
            found.append(solution)
    return found


def _thinned(solutions: list[_Solution], most: int) -> list[_Solution]:
    """Return the first solution, and the fastest in each of `most - 1` parts of the bytes."""
    if len(solutions) <= most:
        return solutions
    first, last = solutions[0][0], solutions[-1][0]
    kept: dict[int, _Solution] = {}
    for solution in reversed(solutions):
        share = (solution[0] - first) / (last - first)  # small budgets get finer parts
        kept.setdefault(ceil((most - 1) * sqrt(share)), solution)
    kept[0] = solutions[0]
    return sorted(kept.values(), key=itemgetter(0))


# -- building a schedule ---------------------------------------------------------------------------


class _Part(NamedTuple):
    """A segment that is to be solved, whose input is the working state."""

    start: int
    stop: int
    num_bytes: int  # that its solution may take
    stays: bool = False  # whether its input is kept, and stays so
    returns: bool = False  # whether its input is to be the working state again after it


def persistent(fronts: Fronts, num_stages: int, num_bytes: int) -> Schedule:
    """Build the fastest schedule of a chain within a number of bytes."""
    actions = actions_of(_Part(0, num_stages, num_bytes), partial(_begin, fronts))
    return Schedule(num_stages, tuple(actions), name="optimal")


def _begin(fronts: Fronts, part: _Part) -> list[Action | _Part]:
    start = part.start
    keep, drop = Keep(start), Drop(start)
    if start == part.stop:
        return [keep, Load(start), drop] if part.returns else []
    peak, choice = fronts[start, part.stop].within(part.num_bytes)
    later = _Part(choice.middle, part.stop, peak - choice.keeps)
    if choice.kind == "invert":
        inverse = (Invert(start), Reverse(start))
        return [Advance(start, start + 1), later._replace(returns=True), *inverse]
    if part.returns:
        return [keep, part._replace(stays=True, returns=False), Load(start), drop]
    # What an enclosing part keeps is neither kept nor dropped here.
    own_keep, own_drop = ([], []) if part.stays else ([keep], [drop])
    stages = range(start, start + len(choice.variants))
    reverses = map(Reverse, reversed(stages))
    earlier = _Part(start, choice.middle, peak, part.stays)
    match choice.kind:
        case "tape":
            return [*map(Tape, stages, choice.variants), later, *reverses]
        case "results":
            runs = [Advance(index, index + 1, choice.variants[index - start]) for index in stages]
            return [*own_keep, *runs, later, Load(start), *own_drop, *map(Tape, stages), *reverses]
        case "keep":
            run = Advance(start, choice.middle)
            return [*own_keep, run, later, Load(start), *own_drop, earlier]
        case "offload":
            away = (Offload(start), Advance(start, choice.middle))
            back = (Load(start), drop)
            if part.stays:
                return [drop, *away, later, *back, keep, earlier]
            return [*away, later, *back, earlier]


# Of each segment that is run again at least this many solutions are kept, and more in short chains:
# these over the square of the number of stages.
_NUM_SOLUTIONS = 16
_NUM_MORE = 20_000
# Longer chains are cut into about `_NUM_GROUPS` groups; to find the least bytes, only chains longer
# than `_NUM_EXACT` are cut.
_NUM_GROUPS = 64
_NUM_EXACT = 128
# If there are more points than this, only every second, third, ... is built.
_NUM_POINTS = 200


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the frontier: a schedule and its cost.

    Args:
        peak_bytes: its peak, as `simulate` counts it.
        seconds: its time, as `simulate` counts it: in the unit of the costs, which those of a plan
            (`Plan.frontier`) give in seconds.
        num_forwards: number of forward runs of stages.
        schedule: the schedule.
        num_inverses: number of inverse runs of stages.

    Example:
        >>> from recoup.schedules import Cost, frontier
        >>> frontier([Cost(1.0, 1, 3)] * 2)[0].peak_bytes
        4
    """

    peak_bytes: int
    seconds: float
    num_forwards: int
    schedule: Schedule
    num_inverses: int = 0


def frontier(costs: Sequence[Cost]) -> tuple[Point, ...]:
    """Find, for every number of bytes, the schedule with the least time.

    The search covers the schedules of `optimal`. Of more than 200 points, only every second, third,
    ... is returned; `optimal` still finds the others. A point may run more stages than one with
    fewer bytes: runs that are given results take less time than whole ones.

    Bytes are never rounded, and the least feasible bytes are exact for up to 128 stages. Of the
    solutions of a segment at most 16 are kept (eight times as many in the sweep, and in short
    chains all, or some hundreds), so a schedule may leave a few bytes unused.

    Chains of more than 64 stages are cut into about 64 groups of neighbours, at small states. The
    search then lacks segments that begin within one group and end within another, and in backward
    tapes of a part of a group; beyond 128 stages the least feasible bytes are those of the
    remaining schedules. The stages that the sweep tapes or inverts are chosen one by one.

    Kept: nothing; each point holds its schedule and its peak. The search takes seconds for 1000
    stages.

    Args:
        costs: the cost of each stage, in order.

    Returns:
        Points from the least feasible bytes to the most, with falling seconds.

    Raises:
        ValueError: `costs` is empty.

    Example:
        >>> from recoup.schedules import Cost, frontier
        >>> for point in frontier([Cost(1.0, 1, 3)] * 3):
        ...     print(point.peak_bytes, point.seconds)
        5 5.0
        7 4.0
        9 3.0

    Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep
    neural networks with limited memory" (2019).
    """
    require_costs(costs)
    found = fastest(tuple(costs))
    step = 1 + len(found) // _NUM_POINTS
    schedules = [found[0].build(), *(each.build() for each in found[1::step])]
    points: list[Point] = []
    # `linear` is last. If a stage takes no time, another schedule may be as fast with fewer bytes.
    for schedule in (*schedules, linear(len(costs))):
        simulation = simulate(schedule, costs=costs)
        if not points or simulation.seconds < points[-1].seconds:
            points.append(
                Point(
                    simulation.peak_bytes, simulation.seconds, simulation.num_forwards, schedule,
                    simulation.num_inverses,
                )
            )  # fmt: skip
    return tuple(points)


def optimal(costs: Sequence[Cost], budget: int) -> Schedule:
    """Find the schedule with the least forward time whose peak is at most `budget` bytes.

    The search covers all persistent schedules: each stage is either taped when it is passed, or the
    input of a segment is kept, the segment is run without tapes, and later it is solved in the
    same way. Where the costs allow it, an input may be offloaded instead of kept. In the sweep a
    stage may also be taped with one of its selective tapes, or be run without a tape and inverted
    in backward, from its output, which is available when the stages behind it are reversed; or the
    results of up to 8 stages are kept with the input of the first, and all are taped in backward.
    Of the ways to choose these results those are tried that save the most seconds for a byte, and
    all of them where there are at most 16. Bytes are counted as `simulate` counts them: the peak
    never exceeds the budget, and a larger budget never costs more time.

    Kept: what fits in `budget`. The search leaves out what that of `frontier` does.

    Args:
        costs: the cost of each stage, in order.
        budget: the budget in bytes.

    Returns:
        The schedule.

    Raises:
        ScheduleError: no persistent schedule fits; the message has the least feasible bytes.
        ValueError: `costs` is empty.

    Example:
        >>> from recoup.schedules import Cost, optimal, simulate
        >>> costs = [Cost(1.0, 1, 17)] * 32
        >>> simulation = simulate(optimal(costs, budget=41), costs=costs)
        >>> simulation.num_forwards, simulation.peak_bytes
        (63, 41)

    Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep
    neural networks with limited memory" (2019).
    """
    require_costs(costs)
    check_real(budget=budget)
    plain = linear(len(costs))
    if simulate(plain, costs=costs).peak_bytes <= budget:
        return plain
    candidates = fastest(tuple(costs))
    fitting = [found for found in candidates if found.peak_bytes <= budget]
    if not fitting:
        raise ScheduleError(
            f"`budget` is {budget} bytes, but every persistent schedule of these "
            f"{len(costs)} stages needs at least {candidates[0].peak_bytes} bytes"
        )
    return fitting[-1].build()


class Candidate(NamedTuple):
    """A schedule that is not built yet, with its cost."""

    peak_bytes: int
    seconds: float
    build: Callable[[], Schedule]


@lru_cache(maxsize=2)  # for calls of `optimal` with several budgets
def fastest(costs: tuple[Cost, ...]) -> tuple[Candidate, ...]:
    """Return the Pareto-optimal schedules in order of bytes, without `linear`."""
    num_stages = len(costs)
    chains = [(_NUM_GROUPS, _NUM_SOLUTIONS + _NUM_MORE // num_stages**2)]
    if _NUM_GROUPS < num_stages <= _NUM_EXACT:
        chains.append((num_stages, 1))  # for the least bytes
    found: list[Candidate] = []
    for num_groups, most in chains:
        fronts = fronts_of(Chain(costs, num_groups), most)
        front = fronts[0, num_stages]
        found += [
            Candidate(peak, seconds, partial(persistent, fronts, num_stages, peak))
            for peak, seconds in zip(front.peaks, front.seconds, strict=True)
        ]
    best: list[Candidate] = []
    for candidate in sorted(found, key=itemgetter(0, 1)):
        if not best or candidate.seconds < best[-1].seconds:
            best.append(candidate)
    return tuple(best)
