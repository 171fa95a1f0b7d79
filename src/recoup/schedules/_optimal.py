"""The optimal schedule: the fastest one within a byte budget, for stages of any cost."""

from __future__ import annotations

from collections.abc import Sequence

from recoup.errors import ScheduleError
from recoup.schedules._frontier import fastest
from recoup.schedules._linear import linear
from recoup.schedules._simulate import simulate
from recoup.schedules.actions import Schedule
from recoup.schedules.costs import Cost

__all__ = ["optimal"]


def optimal(costs: Sequence[Cost], budget: int) -> Schedule:
    """Find the schedule with the least forward time whose peak is at most `budget` bytes.

    The search covers all persistent schedules: each stage is either taped when it is passed, or the
    input of a segment is kept, the segment is run without tapes, and later it is solved in the
    same way. Where the costs allow it, an input may be offloaded instead of kept. In the sweep a
    stage may also be taped with one of its thinner tapes, or be run without a tape and inverted in
    backward, from its output, which is available when the stages behind it are reversed. Bytes are
    counted as `simulate` counts them: the peak never exceeds the budget, and a larger budget never
    costs more time.

    Kept: what fits in `budget`. Sizes are rounded as in `frontier`.

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
    if not costs:
        raise ValueError("`costs` is empty, but a chain has at least one stage")
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
