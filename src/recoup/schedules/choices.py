"""The choices for each segment of a chain, and the bytes that each choice needs.

NOTE [ The bytes of a choice ]

Rule 1. Bytes are counted as `simulate` counts them. Those of a segment include memory beside the
        chain and memory that backward has left, but not what is kept for other segments. The peak
        of a choice is the largest of three terms: the bytes that it needs by itself, those of the
        later part plus what is kept meanwhile, and those of the earlier part, if it is solved, too.
Rule 2. Segments that end with the chain are solved in the sweep, with memory of the stages passed
        so far beside the chain (`_sweeping`, where each counts as run without a tape: one that is
        taped needs less). All others are solved in backward, when all stages behind them are
        reversed, with the memory that is then beside the chain (`_behind`).
Rule 3. A segment that does not end with the chain is run again. So it contains no fixed stage, and
        no stage but its first one may be unlinked.
Rule 4. In a long chain neighbours are grouped. The ends of a long segment are borders of groups,
        and if it is run again, its first group is taped completely or not at all. Within one group
        that is run again, and for the tapes and inverses of the sweep, stages are chosen one by
        one.
Rule 5. A segment of the sweep may keep results of its stages with its input. Its stages are all
        taped in backward, one after another, so none of the states between is kept, and their
        tapes are there at once. Not all ways to choose the results are tried (`_selections`).
Rule 6. Results that hold the output of a stage are for the last stage of such a segment: the state
        after it is there anyway, while those between are not kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import prod
from typing import Literal, NamedTuple

from recoup.schedules.costs import Cost, SelectiveTape

_Kind = Literal["tape", "results", "keep", "offload", "invert"]
_MOST_STAGES = 8  # that keep results in one segment, whose tapes are then there at once
_MOST_SELECTIONS = 10  # of results, for each segment
_FEW_WAYS = 16  # to select them, all of which are tried


class Choice(NamedTuple):
    """A choice: how to begin a segment.

    Tape the first stages; keep results of theirs with the input, and tape them in backward; keep or
    offload the input of the first part; or invert the first stage. The earlier part is run without
    tapes and solved after the later one; it is empty if nothing is left to solve there.
    """

    kind: _Kind
    earlier_stop: int  # the end of the earlier part
    middle: int  # the stage at which the later part begins
    variants: tuple[int, ...]  # of the tapes of the first stages, or the numbers of their results
    needs: int  # the bytes at the worst moment, without the parts that are solved
    keeps: int  # the bytes that are kept while the later part is solved
    seconds: float  # without those of the parts that are solved


class Chain:
    """A chain of stages with their costs, in about so many groups, the third root of choices."""

    def __init__(self, costs: Sequence[Cost], num_groups: int) -> None:
        self.costs = costs
        self.num_stages = num_stages = len(costs)
        self.states = [*(cost.state_bytes for cost in costs), 0]
        again = [cost.tape_again for cost in costs]  # the tapes that backward makes
        self.taped = [0, *accumulate(tape.tape_bytes for tape in again)]
        self._seconds_again = [0.0, *accumulate(tape.seconds for tape in again)]
        self._seconds_before = [0.0, *accumulate(cost.seconds for cost in costs)]
        self._passed = list(accumulate(cost.between_bytes for cost in costs))
        cached = [0, *accumulate(cost.cached_bytes for cost in costs)]
        self._sweeping = [a + b for a, b in zip(self._passed, cached, strict=False)]
        lefts = [0, *accumulate(cost.left_bytes for cost in reversed(costs))]
        self._behind = [
            (self._passed[index - 1] if index else 0) + lefts[num_stages - index]
            for index in range(num_stages + 1)
        ]
        self.base = min(self._behind)
        self._last_end = self._last_ends()
        self.borders = self._borders(num_groups)
        self._border_set = frozenset(self.borders)
        self._next_border = [
            self.borders[bisect_right(self.borders, index)] for index in range(num_stages)
        ]
        self._taped_once = [
            [self._taping_bytes(index, index + 1, goes_on=each) for index in range(num_stages)]
            for each in (False, True)
        ]
        self._taped_group = {
            start: self._taping_bytes(start, stop, goes_on=True)
            for start, stop in pairwise(self.borders)
        }
        # Results that each stage may keep within a segment, and at its end (See Rule 6).
        self._kept = {
            is_last: [self._numbers_of(index, is_last=is_last) for index in range(num_stages)]
            for is_last in (False, True)
        }
        self._steps = {
            is_last: [_steps_of(index, costs[index], each) for index, each in enumerate(numbers)]
            for is_last, numbers in self._kept.items()
        }
        self._advance_bytes = [self._advancing(index) for index in range(num_stages)]

    def _run(self, start: int, stop: int) -> float:
        """Return the seconds of one run of a segment."""
        return self._seconds_before[stop] - self._seconds_before[start]

    def _taping_again(self, start: int, stop: int) -> float:
        """Return the seconds of taping a segment in backward."""
        again = self._seconds_again[stop] - self._seconds_again[start]
        return self._run(start, stop) + again

    def segments(self) -> Iterator[tuple[int, int]]:
        """Yield all segments, each after the segments within it; those of the sweep come last."""
        for start in reversed(range(self.num_stages)):
            for stop in self.ends(start):
                yield start, stop
        for start in reversed(range(self.num_stages)):
            yield start, self.num_stages

    def ends(self, start: int) -> list[int]:
        """Return the ends of segments that begin at `start` and are run again."""
        last = min(self._last_end[start], self.num_stages - 1)
        border = self._next_border[start]
        ends = list(range(start + 1, min(border, last) + 1))
        if start in self._border_set:
            ends += self._borders_between(border + 1, last + 1)
        return ends

    def _borders_between(self, start: int, stop: int) -> list[int]:
        """Return the borders from `start` on and before `stop`."""
        return self.borders[bisect_left(self.borders, start) : bisect_left(self.borders, stop)]

    def choices(self, start: int, stop: int) -> Iterator[Choice]:
        """Yield all choices to begin a segment."""
        return self._in_sweep(start) if stop == self.num_stages else self._in_backward(start, stop)

    def _in_backward(self, start: int, stop: int) -> Iterator[Choice]:
        border, behind = self._next_border[start], self._behind[stop]
        if stop <= border:
            first, splits = start + 1, range(start + 1, stop)
            running, reversing = self._taped_once[first < stop][start]
        else:
            first = border
            splits = self._borders_between(start + 1, stop)
            running, reversing = self._taped_group[start]
        keeps = self.taped[first] - self.taped[start]
        seconds = self._taping_again(start, first)
        needs = max(running + behind, reversing)
        yield Choice("tape", start, first, (0,) * (first - start), needs, keeps, seconds)
        kept, offloaded, *_ = self._advance_bytes[start]
        state, offload = self.states[start], self.costs[start].offload_seconds
        for split in splits:
            seconds = self._run(start, split)
            at = split - start - 1
            yield Choice("keep", split, split, (), kept[at] + behind, state, seconds)
            if offload is not None:
                needs, seconds = offloaded[at] + behind, seconds + offload
                yield Choice("offload", split, split, (), needs, 0, seconds)

    def _in_sweep(self, start: int) -> Iterator[Choice]:
        cost, state, output = self.costs[start], self.states[start], self.states[start + 1]
        passed, reversed_ = self._sweeping[start], self._behind[start]
        behind = self._behind[start + 1]
        for variant in range(len(cost.variants) + 1):
            tape = cost.tape(variant)
            needs = max(
                state + max(tape.tape_run_bytes, cost.between_run_bytes) + passed,
                tape.tape_bytes + output + passed,
                tape.tape_bytes + tape.reverse_bytes + cost.lent_bytes + behind,
                reversed_,
            )
            seconds = cost.seconds + tape.seconds
            yield Choice("tape", start, start + 1, (variant,), needs, tape.tape_bytes, seconds)
        if cost.is_fixed:
            return
        if cost.is_invertible and self._links(start + 1):
            inverting = max(output + cost.tape_run_bytes, _reversing(cost, cost.tape(0)))
            if cost.invert_bytes is not None:
                inverting = max(output + cost.invert_bytes, state) + cost.lent_bytes
            needs = max(
                max(state + max(cost.run_bytes, cost.between_run_bytes), output) + passed,
                inverting + behind,
                state + reversed_,
                output + behind,
            )
            seconds = cost.seconds + cost.invert_seconds
            yield Choice("invert", start, start + 1, (), needs, 0, seconds)
        *_, kept, offloaded = self._advance_bytes[start]
        for split in self.ends(start):
            seconds, at = self._run(start, split), split - start - 1
            yield Choice("keep", split, split, (), kept[at], state, seconds)
            if cost.offload_seconds is not None:
                seconds += cost.offload_seconds
                yield Choice("offload", split, split, (), offloaded[at], 0, seconds)
            if split - start <= _MOST_STAGES:
                yield from self._keeping_results(start, split)

    def _keeping_results(self, start: int, stop: int) -> Iterator[Choice]:
        """Yield choices to keep results of all stages of a segment (See Rule 5)."""
        stages = range(start, stop)
        for numbers in self._selections(start, stop):
            results = [self.costs[start + at].kept(number) for at, number in enumerate(numbers)]
            left = sum(each.num_bytes for each in results)  # of the second runs that are to come
            needs, held, taped = self.base, self.states[start], 0
            for index, kept in zip(stages, results, strict=True):
                cost, state, output = self.costs[index], self.states[index], self.states[index + 1]
                again = output if self._links(index + 1) else 0
                running = max(cost.run_bytes + kept.num_bytes, cost.between_run_bytes)
                working = state if index > start else 0
                most = max(working + running, kept.num_bytes + output)
                needs = max(needs, held + most + self._sweeping[index])
                held += kept.num_bytes
                tape = cost.tape_again
                run_bytes = tape.run_bytes(goes_on=index + 1 < stop)
                running = state + run_bytes - kept.taped_bytes + left
                left -= kept.num_bytes
                making = max(running, tape.tape_bytes + again + left)
                reversing = _reversing(cost, tape) + self._behind[index + 1]
                needs = max(needs, taped + making + self._behind[stop])
                needs = max(needs, taped + max(reversing, self._behind[index]))
                taped += tape.tape_bytes
            seconds = self._taping_again(start, stop)
            seconds += sum(each.seconds for each in results)
            yield Choice("results", start, stop, numbers, needs, held, seconds)

    def _selections(self, start: int, stop: int) -> Iterator[tuple[int, ...]]:
        """Yield which results each stage of a segment keeps: all ways, or those that pay most."""
        last = stop - 1
        options = [*self._kept[False][start:last], self._kept[True][last]]
        if prod(len(numbers) + 1 for numbers in options) <= _FEW_WAYS:
            yield from filter(any, product(*((0, *numbers) for numbers in options)))
            return
        steps = [step for each in self._steps[False][start:last] for step in each]
        steps += self._steps[True][last]
        steps.sort(reverse=True)
        numbers = [0] * (stop - start)
        every = -(-len(steps) // _MOST_SELECTIONS)
        for place, (_, index, number) in enumerate(steps, 1):
            numbers[index - start] = number
            if (len(steps) - place) % every == 0:
                yield tuple(numbers)

    def _numbers_of(self, index: int, *, is_last: bool) -> list[int]:
        """Return the numbers of the results that a stage may keep in a segment (See Rule 6)."""
        keeps_output = False  # whether the stage after it keeps its input, which this one made
        if is_last and index + 1 < self.num_stages:
            after = self.costs[index + 1]
            is_kept = not after.is_invertible and after.offload_seconds is None
            keeps_output = is_kept and after.is_linked
        results = enumerate(self.costs[index].results, 1)
        return [number for number, each in results if keeps_output or not each.holds_output]

    def _links(self, index: int) -> bool:
        return index == self.num_stages or self.costs[index].is_linked

    def _last_ends(self) -> list[int]:
        """Return, for each stage, the last end of a segment that is run again (See Rule 3)."""
        reach = list(range(self.num_stages + 1))
        for start in reversed(range(self.num_stages)):
            if self.costs[start].is_fixed:
                continue
            goes_on = start + 1 < self.num_stages and self.costs[start + 1].is_linked
            reach[start] = max(start + 1, reach[start + 1]) if goes_on else start + 1
        return reach

    def _borders(self, num_groups: int) -> list[int]:
        """Return the borders of groups of neighbours, at small states if there is a choice."""
        longest = -(-self.num_stages // num_groups)
        borders = [0]
        while borders[-1] < self.num_stages:
            start = borders[-1]
            last = max(start + 1, min(start + longest, self._last_end[start]))
            near = range(max(start + 1, last - longest // 2), last + 1)
            cut = last == self._last_end[start] or last == start + 1
            borders.append(last if cut else min(near, key=lambda i: (self.states[i], -i)))
        return borders

    def _taping_bytes(self, start: int, stop: int, *, goes_on: bool) -> tuple[int, int]:
        """Return the bytes to tape stages again, or to go on from there, and to reverse them.

        The first number does not include the bytes beside the chain.
        """
        running, reversing = 0, self.base
        for index in range(start, stop):
            cost = self.costs[index]
            output = self.states[index + 1] if self._links(index + 1) else 0
            held = self.taped[index] - self.taped[start]
            tape = cost.tape_again
            run_bytes = tape.run_bytes(goes_on=goes_on or index + 1 < stop)
            most = max(self.states[index] + run_bytes, tape.tape_bytes + output)
            running = max(running, held + most)
            most = max(_reversing(cost, tape) + self._behind[index + 1], self._behind[index])
            reversing = max(reversing, held + most)
        return running, reversing

    def _advancing(self, start: int) -> tuple[list[int], ...]:
        """Return the bytes to run from `start` without tapes to the first, second, ... stage after.

        The four lists are: with the input kept, with it offloaded, both in backward (beyond the
        bytes beside the chain); then the same two in the sweep (in all).
        """
        ends = self.ends(start)
        stop = ends[-1] if ends else start
        input_ = self.states[start]
        found: tuple[list[int], ...] = ([], [], [], [])
        most = [0, 0, self.base, self.base]
        for index in range(start, stop):
            run, output = self.costs[index].run_bytes, self.states[index + 1]
            state = self.states[index] if index > start else 0
            in_sweep = max(run, self.costs[index].between_run_bytes)
            passed = self._sweeping[index]
            needs = (
                input_ + max(state + run, output),
                max(self.states[index] + run, output),
                input_ + max(state + in_sweep, output) + passed,
                max(self.states[index] + in_sweep, output) + passed,
            )
            for at, now in enumerate(needs):
                most[at] = max(most[at], now)
                found[at].append(most[at])
        return found


def _steps_of(index: int, cost: Cost, numbers: Sequence[int]) -> list[tuple[float, int, int]]:
    """Return the results that a stage keeps, fewest bytes first, by the seconds a byte saves.

    Each step saves less for a byte than the one before: others are left out. If none saves time,
    the least bytes may still need them, and must not hang on how the clock erred: all are steps.
    """
    chosen = [(0, cost.seconds, 0)]
    options = sorted((cost.kept(at).num_bytes, cost.kept(at).seconds, at) for at in numbers)
    for num_bytes, seconds, number in options:
        if seconds >= chosen[-1][1]:
            continue
        while len(chosen) > 1 and _rate(*chosen[-2:]) <= _rate(chosen[-1], (num_bytes, seconds, 0)):
            chosen.pop()
        chosen.append((num_bytes, seconds, number))
    if len(chosen) == 1:
        return [(-float(num_bytes), index, number) for num_bytes, _, number in options]
    return [(_rate(a, b), index, b[2]) for a, b in pairwise(chosen)]


def _rate(a: tuple[int, float, int], b: tuple[int, float, int]) -> float:
    """Return the seconds that each further byte saves."""
    return (a[1] - b[1]) / max(b[0] - a[0], 1)


def _reversing(cost: Cost, tape: SelectiveTape) -> int:
    """Return the bytes of backward from a tape, if the stage before may be taped."""
    return tape.tape_bytes + tape.reverse_bytes + cost.lent_bytes
