"""The recurrences over the segments of a chain: least bytes, and least seconds for given bytes.

Both try every choice for every segment and look the parts up that the choice leaves. `least_bytes`
counts bytes exactly; a `Table` has the seconds of each segment by level of memory, as Rotor does.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory" (2019).
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from operator import itemgetter, neg
from typing import NamedTuple

from recoup.schedules.actions import Schedule
from recoup.schedules.search.choices import Chain, Choice
from recoup.schedules.search.persistent import persistent

__all__ = ["Table", "least_bytes"]


def least_bytes(chain: Chain) -> tuple[int, Schedule]:
    """Return the least peak, in bytes without rounding, and a schedule that has it."""
    best: dict[tuple[int, int], tuple[int, float]] = {}
    chosen: dict[tuple[int, int], Choice] = {}
    nothing = (chain.base, 0.0)
    for start, stop in chain.segments():
        options: list[tuple[int, float, Choice]] = []
        for choice in chain.choices(start, stop):
            later = best.get((choice.middle, stop), nothing)
            earlier = best.get((start, choice.earlier_stop), nothing)
            peak = max(choice.needs, choice.keeps + later[0], earlier[0])
            options.append((peak, choice.seconds + later[1] + earlier[1], choice))
        peak, seconds, chosen[start, stop] = min(options, key=itemgetter(0, 1))
        best[start, stop] = (peak, seconds)
    schedule = persistent(chain.num_stages, 0, lambda start, stop, _: (chosen[start, stop], 0))
    return best[0, chain.num_stages][0], schedule


class _Row(NamedTuple):
    """A row of the table: the seconds of a segment by level of memory.

    Args:
        low: the first level at which it is feasible.
        values: seconds at that level and the following ones, never increasing.
        rest: seconds at all levels above those.
    """

    low: int
    values: list[float]
    rest: float

    def at(self, level: int) -> float:
        if level < self.low:
            return inf
        above = level - self.low
        return self.values[above] if above < len(self.values) else self.rest

    def between(self, low: int, high: int) -> list[float]:
        values = self.values[low - self.low : high - self.low]
        missing = high - low - len(values)
        return values + [self.rest] * missing if missing else values


_EMPTY = _Row(0, [], 0.0)  # of a segment without stages


class Table:
    """A table with the rows of all segments of a chain, where levels are bytes in units."""

    def __init__(self, chain: Chain, unit: int, num_levels: int) -> None:
        self.chain = chain
        self.unit = unit
        self.num_levels = num_levels
        self._rows: dict[tuple[int, int], _Row] = {}
        self._peaks: dict[tuple[int, int, int], int] = {}
        self._choices: dict[tuple[int, int, int], tuple[Choice, int]] = {}
        self._linear: dict[tuple[int, int], int] = {}
        for start, stop in chain.segments():
            self._solve(start, stop)

    def _row(self, start: int, stop: int) -> _Row:
        return self._rows[start, stop] if start < stop else _EMPTY

    def levels(self, first: int) -> list[tuple[int, float]]:
        """Return the levels from `first` on at which the whole chain gets faster, with seconds."""
        row = self._row(0, self.chain.num_stages)
        found: list[tuple[int, float]] = []
        before = inf
        for level, value in enumerate([*row.values, row.rest], start=row.low):
            if value < before and first <= level <= self.num_levels:
                found.append((level, value))
                before = value
        return found

    def peak(self, start: int, stop: int, level: int) -> int:
        """Return the bytes, without rounding, that the fastest solution of a segment needs."""
        # Segments that follow one another are not recursed into: a sweep may have a thousand.
        passed: list[tuple[tuple[int, int, int], int, int]] = []
        peak = 0
        while start < stop:
            key = start, stop, level
            if key in self._peaks:
                peak = self._peaks[key]
                break
            choice, later = self.choose(*key)
            needs = max(choice.needs, self.peak(start, choice.earlier_stop, level))
            passed.append((key, needs, choice.keeps))
            start, level = choice.middle, later
        else:
            peak = self.chain.base
        for key, needs, keeps in reversed(passed):
            peak = self._peaks[key] = max(needs, keeps + peak)
        return peak

    def choose(self, start: int, stop: int, level: int) -> tuple[Choice, int]:
        """Return the choice that begins a fastest solution, and the level of its later part."""
        key = start, stop, level
        if key not in self._choices:
            self._choices[key] = self._chosen(*key)
        return self._choices[key]

    def _chosen(self, start: int, stop: int, level: int) -> tuple[Choice, int]:
        row = self._row(start, stop)
        sought = row.at(level)
        is_linear = level >= row.low + len(row.values)
        best, seconds = (self.chain.choices(start, stop)[0], 0), inf
        for choice in self.chain.choices(start, stop):
            later, low = self._later(choice, start, stop)
            if is_linear:
                # After rounding, the level left may be a unit too low to tape the rest.
                rest = self._row(choice.middle, stop)
                return choice, max(level - later, rest.low + len(rest.values))
            if level < low:
                continue
            value = self._value(choice, start, stop, level, later)
            if value < seconds:
                best, seconds = (choice, level - later), value
                if value <= sought:
                    break
        return best

    def _value(self, choice: Choice, start: int, stop: int, level: int, keeps: int) -> float:
        later = self._row(choice.middle, stop).at(level - keeps)
        return choice.seconds + later + self._row(start, choice.earlier_stop).at(level)

    def _units(self, num_bytes: int) -> int:
        """Return bytes in units, rounded to the nearest."""
        return (num_bytes + self.unit // 2) // self.unit

    def _level(self, num_bytes: int) -> int:
        return self._units(num_bytes - self.chain.base)

    def _later(self, choice: Choice, start: int, stop: int) -> tuple[int, int]:
        """Return the units that a choice keeps, and the first level at which it is feasible."""
        # Rounded as a difference of running sums of tapes, so that rounding errors do not add up.
        before = self.chain.taped[start]
        keeps = self._units(before + choice.keeps) - self._units(before)
        later = self._row(choice.middle, stop)
        earlier = self._row(start, choice.earlier_stop)
        return keeps, max(self._level(choice.needs), keeps + later.low, earlier.low)

    def _solve(self, start: int, stop: int) -> None:
        chain = self.chain
        in_backward = stop < chain.num_stages
        run = chain.taping(start, stop, in_backward=in_backward)
        row: list[float] = []
        for number, choice in enumerate(chain.choices(start, stop)):
            keeps, low = self._later(choice, start, stop)
            if number == 0:
                enough = choice.needs
                if choice.middle < stop:
                    enough = max(enough, choice.keeps + self._linear[choice.middle, stop])
                self._linear[start, stop] = enough
                row = [inf] * min(max(self._level(enough), low), self.num_levels + 1)
            # The least time of a choice: one run of each stage, and its additional time.
            paid = choice.seconds
            if choice.earlier_stop == start:
                paid -= chain.taping(start, choice.middle, in_backward=in_backward)
            high = bisect_left(row, -(run + paid), key=neg)
            if low >= high:
                continue
            later = self._row(choice.middle, stop).between(low - keeps, high - keeps)
            earlier = self._row(start, choice.earlier_stop).between(low, high)
            row[low:high] = [
                value if (value := choice.seconds + a + b) < best else best
                for a, b, best in zip(later, earlier, row[low:high], strict=True)
            ]
        first = next((level for level, value in enumerate(row) if value < inf), len(row))
        self._rows[start, stop] = _Row(first, row[first:], run)
