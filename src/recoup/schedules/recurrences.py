"""The recurrences over the segments of a chain: least bytes, and least seconds for given bytes.

A schedule is persistent if it keeps each state and tape until it has served its purpose: a stage is
taped when it is passed and stays taped until it is reversed, or the input of a segment is kept, the
segment is run without tapes, and later it is solved in the same way. So a choice for each segment
makes a schedule. Both recurrences try every choice for every segment and look the parts up that the
choice leaves. `least_bytes` counts bytes exactly; a `Table` has the seconds of each segment by
level of memory, as Rotor does.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory" (2019).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from math import inf
from operator import itemgetter, neg
from typing import NamedTuple, TypeGuard

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
)
from recoup.schedules.choices import Chain, Choice


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


# -- building a schedule ---------------------------------------------------------------------------

# A function from the start, stop and level of a segment to the choice that begins it and the level
# of its later part. The earlier part is solved with the level of the segment.
_Choose = Callable[[int, int, int], tuple[Choice, int]]


class _Part(NamedTuple):
    """A segment that is to be solved, whose input is the working state.

    Args:
        start: its first stage.
        stop: one past its last stage.
        level: its level of memory, for the choice.
        is_kept: whether its input is kept.
        stays: whether its input, if it is kept, stays kept.
        returns: whether its input is to be the working state again after it is reversed.
    """

    start: int
    stop: int
    level: int
    is_kept: bool = False
    stays: bool = False
    returns: bool = False


def persistent(num_stages: int, level: int, choose: _Choose) -> Schedule:
    """Build a persistent schedule from a choice for each segment."""
    actions: list[Action] = []
    waiting: list[Action | _Part] = [_Part(0, num_stages, level)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Part):
            waiting += reversed(_begin(item, num_stages, choose))
        elif _is_plain(item) and actions and _is_plain(before := actions[-1]):
            actions[-1] = Advance(before.start, item.stop)
        else:
            actions.append(item)
    return Schedule(num_stages, tuple(actions), name="optimal")


def _is_plain(action: Action) -> TypeGuard[Advance]:
    """Whether an action runs stages and keeps none of their results."""
    return isinstance(action, Advance) and not action.results


def _begin(part: _Part, num_stages: int, choose: _Choose) -> list[Action | _Part]:
    start = part.start
    back: list[Action | _Part] = [Load(start), Drop(start)] if part.returns else []
    if start == part.stop:
        return [Keep(start), *back] if part.returns else []
    choice, level = choose(start, part.stop, part.level)
    later = _Part(choice.middle, part.stop, level)
    drop: list[Action | _Part] = [Drop(start)] if part.is_kept else []
    keep: list[Action | _Part] = [] if part.is_kept else [Keep(start)]
    match choice.kind:
        case "invert":
            inverse = (Invert(start), Reverse(start))
            return [Advance(start, start + 1), later._replace(returns=True), *inverse]
        case "tape":
            tapes = [Tape(index, variant) for index, variant in choice.of_stages(start)]
            reverses = [Reverse(tape.index) for tape in reversed(tapes)]
            if part.returns:
                return [*keep, *tapes, later, *reverses, *back]
            return [*([] if part.stays else drop), *tapes, later, *reverses]
        case "results":
            runs = [Advance(index, index + 1, kept) for index, kept in choice.of_stages(start)]
            tapes = [Tape(run.start) for run in runs]
            reverses = [Reverse(run.start) for run in reversed(runs)]
            stays = part.stays or part.returns
            loaded = [Load(start), *([] if stays else [Drop(start)])]
            return [*keep, *runs, later, *loaded, *tapes, *reverses, *back]
        case "keep":
            earlier = _Part(start, choice.middle, part.level, True, part.stays or part.returns)
            return [*keep, Advance(start, choice.middle), later, Load(start), earlier, *back]
        case "offload":
            stays = part.stays or part.returns
            again: list[Action | _Part] = [Keep(start)] if stays else []
            earlier = _Part(start, choice.middle, part.level, stays, stays)
            away = (Offload(start), Advance(start, choice.middle))
            return [*drop, *away, later, Load(start), Drop(start), *again, earlier, *back]
