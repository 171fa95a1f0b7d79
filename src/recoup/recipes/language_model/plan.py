"""How many time steps a segment has, from what a person writes as ``--memory``.

Rule 1: the peak of a step is measured, not computed. It rises by the same amount with each segment
more (a state), and with the length of a segment it rises ever faster, since what does not depend on
it (the gradients) counts less and less. So between two lengths that were measured a line is at
least the peak, and beyond the last two a line is the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from recoup.memory import format_bytes, parse_bytes

__all__ = ["TimePlan"]

_MEASURED_STEPS = (1, 2, 4, 8, 16, 32, 64)
_FEW = 4  # whose peak is measured with more segments, too
_MARGIN = 1.02  # for the rounding of allocators

Peak = Callable[[int, int], int]
"""From the steps of a window and of its segments to the peak in bytes."""


class TimePlan:
    """What backward remembers of a window of text.

    Args:
        memory: "linear" for all of it; "sqrt" for as many states as a segment has time steps; or
            the most bytes that forward, loss and backward of a step may take beyond what is there
            before it, as "500 MiB".

    Raises:
        ValueError: `memory` is none of these.
    """

    def __init__(self, memory: str) -> None:
        self.memory = memory
        self.budget_bytes: int | None = None
        self._costs: _Costs | None = None
        if memory not in ("linear", "sqrt"):
            try:
                self.budget_bytes = parse_bytes(memory)
            except ValueError as error:
                raise ValueError(
                    f'`memory` is {memory!r}, but must be "linear", "sqrt", or a number of bytes '
                    'with its unit, such as "500 MiB".'
                ) from error

    def measure(self, peak: Peak, most_steps: int) -> None:
        """Measure what a step costs, to keep the bound on it.

        Args:
            peak: measures the peak of a step.
            most_steps: steps of the longest window there will be.

        Raises:
            ValueError: no cut of such a window keeps the bound.
        """
        self._costs = _Costs(peak, most_steps)
        if self._longest(most_steps) is None:
            least = min(self._costs.predicted(most_steps, steps) for steps in _lengths(most_steps))
            raise ValueError(
                f"`memory` is {self.memory}, but a step of {most_steps} time steps takes at least "
                f"{format_bytes(least)}. Give that, shorter windows, or a smaller batch."
            )

    def segment_steps(self, num_steps: int) -> int | None:
        """Return how many steps the segments of a window have; None for a single one."""
        if self.memory == "sqrt":
            return math.ceil(math.sqrt(num_steps))
        if self.memory == "linear":
            return None
        if self._costs is None:
            raise RuntimeError("`measure` was not called.")
        return self._longest(num_steps)

    def _longest(self, num_steps: int) -> int | None:
        """The longest segments, which are the fastest, that keep the bound."""
        costs, budget = self._costs, self.budget_bytes
        if costs is None or budget is None:
            return None
        fitting = (
            steps for steps in _lengths(num_steps) if costs.predicted(num_steps, steps) <= budget
        )
        return max(fitting, default=None)


class _Costs:
    """The peak of a step as a function of the steps of its window and segments. See Rule 1."""

    def __init__(self, peak: Peak, most_steps: int) -> None:
        lengths = [steps for steps in _MEASURED_STEPS if steps <= _FEW or 2 * steps <= most_steps]
        self._peaks = {steps: peak(2 * steps, steps) for steps in lengths}
        self._state = max(0, math.ceil((peak(6 * _FEW, _FEW) - self._peaks[_FEW]) / 4))

    def predicted(self, num_steps: int, segment_steps: int) -> int:
        num_segments = math.ceil(num_steps / segment_steps)
        base = self._peaks.get(segment_steps)
        if base is None:
            pairs = list(pairwise(self._peaks.items()))
            around = (pair for pair in pairs if segment_steps < pair[1][0])
            (low, low_peak), (high, high_peak) = next(around, pairs[-1])
            base = low_peak + (high_peak - low_peak) * (segment_steps - low) / (high - low)
        return math.ceil(_MARGIN * (base + self._state * max(0, num_segments - 2)))


def _lengths(num_steps: int) -> range:
    return range(1, num_steps + 1)
