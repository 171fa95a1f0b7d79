"""Persistent schedules: the recurrences that find the fastest and the smallest of them.

A schedule is persistent if what it keeps stays until what it is for is done: a stage is taped when
it is passed and stays taped until it is reversed, or the input of a segment is kept, the segment
is run without tapes, and later it is solved in the same manner.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep neural
networks with limited memory" (2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf

from recoup.schedules.actions import Action, Advance, Drop, Keep, Load, Reverse, Schedule, Tape
from recoup.schedules.simulate import simulate

__all__ = ["Chain", "Table", "persistent", "smallest"]


class Chain:
    """The costs of a chain, stage by stage, and sums of them."""

    def __init__(
        self, seconds: Sequence[float], states: Sequence[int], tapes: Sequence[int]
    ) -> None:
        self.seconds = seconds
        self.states = states
        self.tapes = tapes
        self.num_stages = len(seconds)
        self._until = [0.0, *accumulate(seconds)]

    def run(self, start: int, stop: int) -> float:
        return self._until[stop] - self._until[start]

    def linear_bytes(self, start: int, stop: int) -> int:
        """Peak of a segment all of whose stages are taped."""
        held = accumulate(self.tapes[start:stop])
        outputs = self.states[start + 1 : stop + 1]
        return max(
            self.states[start], *(tape + state for tape, state in zip(held, outputs, strict=True))
        )

    def rounded(self, unit: int) -> Chain:
        """The same chain with bytes in units, rounded to the nearest."""
        states = [(state + unit // 2) // unit for state in self.states]
        return Chain(self.seconds, states, [(tape + unit // 2) // unit for tape in self.tapes])

    def kinds(self) -> list[list[int]]:
        """A number for each segment ``[start][stop]``, the same for segments of the same costs."""
        numbers: dict[tuple[object, ...], int] = {}
        kinds = [[0] * (self.num_stages + 1) for _ in range(self.num_stages + 1)]
        for start in reversed(range(self.num_stages + 1)):
            for stop in range(start, self.num_stages + 1):
                key: tuple[object, ...] = (self.states[start],)
                if start < stop:
                    rest = kinds[start + 1][stop]
                    key = (self.seconds[start], self.states[start], self.tapes[start], rest)
                kinds[start][stop] = numbers.setdefault(key, len(numbers))
        return kinds

    def peak(self, schedule: Schedule) -> int:
        return simulate(schedule, self.states, self.tapes).peak_bytes

    def time(self, schedule: Schedule) -> float:
        runs = simulate(schedule).forwards_per_stage
        return sum(run * seconds for run, seconds in zip(runs, self.seconds, strict=True))


# Says how to begin a segment, start and stop and level given: 0 to tape its first stage, otherwise
# how many stages to advance with the segment's input kept.
Choice = Callable[[int, int, int], int]


def persistent(chain: Chain, level: int, choose: Choice) -> Schedule:
    """Build a persistent schedule from a choice for each segment."""
    actions: list[Action] = []
    waiting: list[Action | tuple[int, int, int, bool]] = [(0, chain.num_stages, level, False)]
    while waiting:
        item = waiting.pop()
        if not isinstance(item, tuple):
            actions.append(item)
            continue
        start, stop, level, kept = item
        if start == stop:
            continue
        length = choose(start, stop, level)
        if length == 0:
            actions += [Drop(start), Tape(start)] if kept else [Tape(start)]
            waiting += [Reverse(start), (start + 1, stop, level - chain.tapes[start], False)]
        else:
            split = start + length
            actions += [Advance(start, split)] if kept else [Keep(start), Advance(start, split)]
            later = (split, stop, level - chain.states[start], False)
            waiting += [(start, split, level, True), Load(start), later]
    return Schedule(chain.num_stages, tuple(actions), name="optimal")


def smallest(chain: Chain) -> Schedule:
    """A persistent schedule with the least peak of all, found in bytes, without rounding."""
    kinds = chain.kinds()
    best: dict[int, tuple[int, float, int]] = {}  # of each kind: peak, seconds, choice
    for length in range(1, chain.num_stages + 1):
        for start in range(chain.num_stages - length + 1):
            kind = kinds[start][start + length]
            if kind not in best:
                best[kind] = min(_peaks(chain, kinds, best, start, start + length))
    return persistent(chain, 0, lambda start, stop, _: best[kinds[start][stop]][2])


def _peaks(
    chain: Chain,
    kinds: list[list[int]],
    best: dict[int, tuple[int, float, int]],
    start: int,
    stop: int,
) -> Iterator[tuple[int, float, int]]:
    """Peak, seconds and choice for every way to begin a segment."""
    state, tape, output = chain.states[start], chain.tapes[start], chain.states[start + 1]
    first = max(state, tape + output)
    if stop == start + 1:
        yield first, chain.seconds[start], 0
        return
    rest = best[kinds[start + 1][stop]]
    yield max(first, tape + rest[0]), chain.seconds[start] + rest[1], 0
    # The states that are passed on the way to a split need no room of their own: each is in the
    # tape that its stage gets later, when the segment's input is held as well.
    for split in range(start + 1, stop):
        later, earlier = best[kinds[split][stop]], best[kinds[start][split]]
        seconds = chain.run(start, split) + later[1] + earlier[1]
        yield max(state + later[0], earlier[0]), seconds, split - start


class Table:
    """The least seconds for each segment and each level of memory: Rotor's recurrence."""

    def __init__(self, chain: Chain, num_levels: int) -> None:
        self.chain = chain
        self.num_levels = num_levels
        self._kinds = chain.kinds()
        self._rows: dict[int, list[float]] = {}
        self._least: dict[int, int] = {}  # the first level at which a kind is feasible
        for length in range(1, chain.num_stages + 1):
            for start in range(chain.num_stages - length + 1):
                kind = self._kinds[start][start + length]
                if kind not in self._rows:
                    row = self._rows[kind] = self._solve(start, start + length)
                    self._least[kind] = row.count(inf)

    def row(self, start: int, stop: int) -> list[float]:
        """Seconds of a segment by level, infinite where it does not fit; never increasing."""
        return self._rows[self._kinds[start][stop]]

    def _first(self, start: int, stop: int) -> int:
        return self._least[self._kinds[start][stop]]

    def choose(self, start: int, stop: int, level: int) -> int:
        """How a fastest schedule of a segment begins that is feasible with this level."""
        chain = self.chain
        if level >= chain.linear_bytes(start, stop):
            return 0
        # A feasible level has room for the tape of each stage, and so for its input.
        rest = self.row(start + 1, stop)[level - chain.tapes[start]]
        options = [(chain.seconds[start] + rest, 0)]
        for split in range(start + 1, stop):
            later = self.row(split, stop)[level - chain.states[start]]
            earlier = self.row(start, split)[level]
            options.append((chain.run(start, split) + later + earlier, split - start))
        return min(options)[1]

    def _solve(self, start: int, stop: int) -> list[float]:
        chain, run, size = self.chain, self.chain.run(start, stop), self.num_levels + 1
        enough = min(chain.linear_bytes(start, stop), size)
        row = [inf] * enough + [run] * (size - enough)
        if stop == start + 1:
            return row
        state, tape = chain.states[start], chain.tapes[start]
        if tape < enough:
            rest = self.row(start + 1, stop)
            row[tape:enough] = [chain.seconds[start] + rest[i] for i in range(enough - tape)]
        high = enough
        for split in range(start + 1, stop):
            advance = chain.run(start, split)
            # Keeping the input costs this advance at least, on top of one run of each stage;
            # the highest levels, which do as well already, need not be tried.
            while high > 0 and row[high - 1] <= run + advance:
                high -= 1
            if high <= state:
                break
            low = max(state + self._first(split, stop), self._first(start, split))
            if high <= low:
                continue
            later = self.row(split, stop)[low - state : high - state]
            earlier = self.row(start, split)[low:high]
            row[low:high] = [
                advance + a + b if advance + a + b < best else best
                for a, b, best in zip(later, earlier, row[low:high], strict=True)
            ]
        return row
