"""Time against bytes: the fastest schedule for every number of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, gcd, inf

from recoup.schedules.actions import Schedule
from recoup.schedules.chain import Chain
from recoup.schedules.costs import Cost
from recoup.schedules.linear import linear
from recoup.schedules.persistent import persistent, smallest
from recoup.schedules.simulate import simulate
from recoup.schedules.table import Table

__all__ = ["Point", "fastest", "frontier"]

# Bytes are counted in this many levels at least, and in as many as the work of a search allows.
_NUM_LEVELS = 128
_WORK = 2_500_000


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule with what it costs.

    Args:
        peak_bytes: its peak, as `simulate` counts it.
        seconds: its time, as `simulate` counts it.
        num_forwards: runs of a stage's forward.
        schedule: the schedule.

    Example:
        >>> from recoup.schedules import Cost, frontier
        >>> frontier([Cost(1.0, 1, 3)] * 2)[0].peak_bytes
        4
    """

    peak_bytes: int
    seconds: float
    num_forwards: int
    schedule: Schedule


def frontier(costs: Sequence[Cost]) -> tuple[Point, ...]:
    """Find, for every number of bytes, the schedule with the least time.
    """
    points: list[Point] = []
    # `linear` ends it: another one may be as fast with fewer bytes where a stage takes no time.
    for point in (*fastest(costs), _point(costs, linear(len(costs)))):
        before = points[-1] if points else None
        if before is None or (
            point.seconds < before.seconds and point.num_forwards <= before.num_forwards
        ):
            points.append(point)
    return tuple(points)


def fastest(costs: Sequence[Cost]) -> list[Point]:
    """The schedules of `frontier`, and those that run more often than one for fewer bytes."""
    chain = Chain(costs)
    least, schedule = smallest(chain)
    found: list[tuple[int, float, int, int]] = []
    tables = [Table(chain, unit, num_levels) for unit, num_levels in _units(chain, least)]
    for number, table in enumerate(tables):
        for level, seconds in table.levels():
            found.append((table.peak(0, len(costs), level), seconds, number, level))
    schedules = [schedule, linear(len(costs))]
    before = inf
    for _, seconds, number, level in sorted(found):
        if seconds < before:
            schedules.append(persistent(len(costs), level, tables[number].choose))
            before = seconds
    return _best(map(partial(_point, costs), schedules))


def _point(costs: Sequence[Cost], schedule: Schedule) -> Point:
    found = simulate(schedule, costs=costs)
    return Point(found.peak_bytes, found.seconds, found.num_forwards, schedule)


def _best(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats in both bytes and seconds."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.seconds, p.num_forwards)):
        if not best or point.seconds < best[-1].seconds:
            best.append(point)
    return best


def _units(chain: Chain, least: int) -> Iterator[tuple[int, int]]:
    """Units to count bytes in and numbers of levels, finest first."""
    divisor = gcd(*(size for cost in chain.costs for size in _sizes(cost))) or 1
    most = simulate(linear(chain.num_stages), costs=chain.costs).peak_bytes
    size, least = max(most, least) - chain.base, least - chain.base
    work = sum(1 for segment in chain.segments() for _ in chain.choices(*segment))
    num_levels = min(max(_NUM_LEVELS, _WORK // max(work, 1)), 8 * _NUM_LEVELS)
    exact = size // divisor
    if exact <= 2 * _NUM_LEVELS or exact * work <= 2 * _WORK:
        num_levels = max(num_levels, exact)
    ranges = [size]
    while ranges[-1] > max(num_levels * divisor, 4 * least):
        ranges.append(ranges[-1] // 2)
    for size in reversed(ranges):
        yield divisor * max(1, ceil(size / (num_levels * divisor))), num_levels * 9 // 8


def _sizes(cost: Cost) -> Iterator[int]:
    yield from (cost.state_bytes, cost.run_bytes, cost.left_bytes, cost.beside_bytes)
    for variant in range(len(cost.variants) + 1):
        thin = cost.tape(variant)
        yield from (thin.tape_bytes, thin.tape_run_bytes, thin.reverse_bytes)
