"""The fastest schedule for every number of bytes (`frontier`), and for one of them (`optimal`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import itemgetter
from typing import NamedTuple

from recoup._arguments import check_real
from recoup.errors import ScheduleError
from recoup.schedules._simulate import simulate
from recoup.schedules.actions import Schedule
from recoup.schedules.choices import Chain
from recoup.schedules.costs import Cost, require_costs
from recoup.schedules.recurrences import fronts_of, persistent
from recoup.schedules.segmented import linear

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
