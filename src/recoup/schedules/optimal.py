"""The fastest schedule within a number of bytes, for stages of any cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, gcd, inf, isfinite

from recoup.errors import ScheduleError
from recoup.schedules.actions import Schedule
from recoup.schedules.linear import linear
from recoup.schedules.persistent import Chain, Table, persistent, smallest

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
    hold everything; more where stages are alike), the schedule is the best persistent one
    exactly; otherwise sizes are rounded to a 256th of what `linear` holds, or of a fourth or a
    sixteenth of that where the budget is small, and a little of the budget may be left unused.
    The search takes time with the third power of the number of stages: seconds for 100.

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
        (63, 41)

    Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep
    neural networks with limited memory" (2019).
    """
    if not costs:
        raise ValueError("`costs` is empty, but a chain has at least one stage")
    chain = Chain(
        [cost.seconds for cost in costs],
        [*(cost.state_bytes for cost in costs), 0],
        [cost.tape_bytes for cost in costs],
    )
    if chain.linear_bytes(0, len(costs)) <= budget:
        return linear(len(costs))
    fallback = smallest(chain)
    least = chain.peak(fallback)
    if least > budget:
        raise ScheduleError(
            f"`budget` is {budget} bytes, but every persistent schedule of these "
            f"{len(costs)} stages needs at least {least} bytes"
        )
    candidates = [fallback]
    num_levels = _num_levels(chain)
    for unit in _units(chain, num_levels, least, budget):
        candidates += _first_fit(chain, num_levels, unit, budget)
    return min(candidates, key=chain.time)


def _num_levels(chain: Chain) -> int:
    """More levels where segments are alike, since each kind of segment is solved once."""
    lengths: dict[int, int] = {}
    for start, row in enumerate(chain.kinds()):
        for stop in range(start + 1, chain.num_stages + 1):
            lengths[row[stop]] = stop - start
    return min(max(_NUM_LEVELS, _WORK // sum(lengths.values())), 8192)


def _units(chain: Chain, num_levels: int, least: int, budget: int) -> Iterator[int]:
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


def _first_fit(chain: Chain, num_levels: int, unit: int, budget: int) -> Iterator[Schedule]:
    """The fastest schedule that counting in units finds and that fits in truth, if there is one."""
    rounded = chain.rounded(unit)
    table = Table(rounded, min(rounded.linear_bytes(0, chain.num_stages), num_levels * 9 // 8))
    row = table.row(0, chain.num_stages)
    # Each of the tapes and states held at the peak was rounded down by half a unit at most.
    highest = min(table.num_levels, budget // unit + chain.num_stages // 2 + 1)
    for level in range(highest, -1, -1):
        if row[level] < inf and (level == 0 or row[level] < row[level - 1]):
            schedule = persistent(rounded, level, table.choose)
            if chain.peak(schedule) <= budget:
                yield schedule
                return
