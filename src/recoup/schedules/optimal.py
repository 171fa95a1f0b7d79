"""The fastest schedule within a number of bytes, for stages of any cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, gcd, inf, isfinite

from recoup.errors import ScheduleError
from recoup.schedules.actions import Action, Advance, Drop, Keep, Load, Reverse, Schedule, Tape
from recoup.schedules.linear import linear
from recoup.schedules.simulate import simulate

__all__ = ["Cost", "optimal"]

# Bytes are counted in this many levels at least, and in as many as the work of a search allows.
_NUM_LEVELS = 256
_WORK = 20_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """What one stage costs.

    Args:
        seconds: time of one forward run; any other unit of time will do.
        state_bytes: bytes of the stage's input.
        tape_bytes: bytes of the stage's tape, its input included.

    Raises:
        ValueError: a cost is negative or not finite, or the tape is smaller than the input.

    Example:
        >>> from recoup.schedules import Cost
        >>> Cost(seconds=1.0, state_bytes=1, tape_bytes=17).tape_bytes
        17
    """

    seconds: float
    state_bytes: int
    tape_bytes: int

    def __post_init__(self) -> None:
        if not (isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"`seconds` is {self.seconds}, but it must be finite and not negative")
        if self.state_bytes < 0:
            raise ValueError(f"`state_bytes` is {self.state_bytes}, but it must not be negative")
        if self.tape_bytes < self.state_bytes:
            raise ValueError(
                f"`tape_bytes` is {self.tape_bytes}, but it must be at least `state_bytes` "
                f"({self.state_bytes}): the stage's input is counted in its tape"
            )


def optimal(costs: Sequence[Cost], budget: int) -> Schedule:
    """Find the schedule with the least forward time whose peak is at most `budget` bytes.

    Searched are all persistent schedules: each stage is either taped when it is passed, or the
    input of a segment is kept, the segment is run without tapes, and later it is solved in the
    same manner. The bytes are those of `simulate`: tapes, kept states and the working state; but
    not the chain's output, which is the caller's. `simulate` has the last word, so the peak never
    exceeds the budget, and a larger budget never costs more time.

    Kept: what fits in `budget`. If all sizes are small multiples of one size (at most 256 of them
    hold everything), the schedule is the best persistent one exactly; otherwise sizes are
    rounded to a 256th of what `linear` holds, or of a fourth or sixteenth of that where the budget is small,
    and some of the budget may be left unused. The time of the search grows with the third power
    of the number of stages that differ: a few seconds for 100.

    Args:
        costs: what each stage costs, first stage first.
        budget: bytes.

    Returns:
        The schedule.

    Raises:
        ScheduleError: no persistent schedule fits; the message names the least feasible bytes.
        ValueError: `costs` is empty.

    Example:
        >>> from recoup.schedules import Cost, optimal, simulate
        >>> schedule = optimal([Cost(1.0, 1, 17)] * 32, budget=41)
        >>> simulation = simulate(schedule, state_bytes=[1] * 32 + [0], tape_bytes=17)
        >>> simulation.num_forwards, simulation.peak_bytes
        (64, 41)

    Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep
    neural networks with limited memory" (2019).
    """
    if not costs:
        raise ValueError("`costs` is empty, but a chain has at least one stage")
    chain = _Chain(
        [cost.seconds for cost in costs],
        [*(cost.state_bytes for cost in costs), 0],
        [cost.tape_bytes for cost in costs],
    )
    if chain.linear_bytes(0, len(costs)) <= budget:
        return linear(len(costs))
    smallest = _smallest(chain)
    least = chain.peak(smallest)
    if least > budget:
        raise ScheduleError(
            f"`budget` is {budget} bytes, but every persistent schedule of these "
            f"{len(costs)} stages needs at least {least} bytes"
        )
    candidates = [smallest]
    num_levels = _num_levels(chain)
    for unit in _units(chain, num_levels, least, budget):
        candidates += _first_fit(chain, num_levels, unit, budget)
    return min(candidates, key=chain.time)


class _Chain:
    """The costs of a chain, stage by stage, and sums of them."""

    def __init__(self, seconds: Sequence[float], states: Sequence[int], tapes: Sequence[int]):
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

    def rounded(self, unit: int) -> _Chain:
        """The same chain with bytes in units, rounded to the nearest."""
        states = [(state + unit // 2) // unit for state in self.states]
        return _Chain(self.seconds, states, [(tape + unit // 2) // unit for tape in self.tapes])

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
_Choice = Callable[[int, int, int], int]


def _schedule(chain: _Chain, level: int, choose: _Choice) -> Schedule:
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


def _smallest(chain: _Chain) -> Schedule:
    """A persistent schedule with the least peak of all, found in bytes, without rounding."""
    kinds = chain.kinds()
    best: dict[int, tuple[int, float, int]] = {}  # of each kind: peak, seconds, choice
    for length in range(1, chain.num_stages + 1):
        for start in range(chain.num_stages - length + 1):
            kind = kinds[start][start + length]
            if kind not in best:
                best[kind] = min(_peaks(chain, kinds, best, start, start + length))
    return _schedule(chain, 0, lambda start, stop, _: best[kinds[start][stop]][2])


def _peaks(
    chain: _Chain,
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
    passing = state
    for split in range(start + 1, stop):
        later, earlier = best[kinds[split][stop]], best[kinds[start][split]]
        passing = max(passing, state + chain.states[split])
        seconds = chain.run(start, split) + later[1] + earlier[1]
        yield max(passing, state + later[0], earlier[0]), seconds, split - start


def _num_levels(chain: _Chain) -> int:
    """More levels where segments are alike, since each kind of segment is solved once."""
    lengths: dict[int, int] = {}
    for start, row in enumerate(chain.kinds()):
        for stop in range(start + 1, chain.num_stages + 1):
            lengths[row[stop]] = stop - start
    return min(max(_NUM_LEVELS, _WORK // sum(lengths.values())), 8192)


def _units(chain: _Chain, num_levels: int, least: int, budget: int) -> Iterator[int]:
    """Units to count bytes in, finest first.

    A larger budget gets all the units of a smaller one, so it cannot find less.
    """
    divisor = gcd(*chain.states, *chain.tapes)
    ranges = [chain.linear_bytes(0, chain.num_stages)]
    while ranges[-1] > max(num_levels * divisor, 8 * least):
        ranges.append(ranges[-1] // 4)
    for size in reversed(ranges):
        yield divisor * ceil(size / (num_levels * divisor))
        if size >= budget:
            return


def _first_fit(chain: _Chain, num_levels: int, unit: int, budget: int) -> Iterator[Schedule]:
    """The fastest schedule that counting in units finds and that fits in truth, if there is one."""
    rounded = chain.rounded(unit)
    table = _Table(rounded, min(rounded.linear_bytes(0, chain.num_stages), num_levels * 9 // 8))
    row = table.row(0, chain.num_stages)
    # Each of the tapes and states held at the peak was rounded down by half a unit at most.
    highest = min(table.num_levels, budget // unit + chain.num_stages // 2 + 1)
    for level in range(highest, -1, -1):
        if row[level] < inf and (level == 0 or row[level] < row[level - 1]):
            schedule = _schedule(rounded, level, table.choose)
            if chain.peak(schedule) <= budget:
                yield schedule
                return


class _Table:
    """The least seconds for each segment and each level of memory: Rotor's recurrence."""

    def __init__(self, chain: _Chain, num_levels: int):
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
        """How a fastest schedule of a segment begins, as `_schedule` wants it."""
        chain = self.chain
        if stop == start + 1 or level >= chain.linear_bytes(start, stop):
            return 0
        state, tape = chain.states[start], chain.tapes[start]
        options = [(inf, 0)]
        if tape <= level:
            rest = self.row(start + 1, stop)[level - tape]
            options.append((chain.seconds[start] + rest, 0))
        passing = state
        for split in range(start + 1, stop):
            passing = max(passing, state + chain.states[split])
            if passing > level:
                break
            later, earlier = self.row(split, stop)[level - state], self.row(start, split)[level]
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
        passing, high = state, enough
        for split in range(start + 1, stop):
            advance = chain.run(start, split)
            passing = max(passing, state + chain.states[split])
            # Keeping the input costs this advance at least, on top of one run of each stage;
            # levels that already do as well, which are the highest, need not be tried.
            while high > passing and row[high - 1] <= run + advance:
                high -= 1
            if high <= passing:
                break
            low = max(passing, state + self._first(split, stop), self._first(start, split))
            if high <= low:
                continue
            later = self.row(split, stop)[low - state : high - state]
            earlier = self.row(start, split)[low:high]
            row[low:high] = [
                advance + a + b if advance + a + b < best else best
                for a, b, best in zip(later, earlier, row[low:high], strict=True)
            ]
        return row
