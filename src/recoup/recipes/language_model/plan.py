"""The length of segments in time steps, from the option ``--memory``.

Rule 1: the peak of a step is measured, not computed. It rises by a constant (a state) with each
further segment, and ever faster with the length of a segment, since the share that does not depend
on it (the gradients) matters less and less. So a line between two measured lengths is at least the
peak, and beyond the last two the line through them is the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from recoup.memory import format_bytes, parse_bytes

__all__ = ["TimePlan"]

_MEASURED_STEPS = (1, 2, 4, 8, 16, 32, 64)
_FEW = 4  # this length is also measured with more segments
_MARGIN = 1.02  # for the rounding of allocators

Peak = Callable[[int, int], int]
"""From the steps of a window and of its segments to the peak in bytes."""


class TimePlan:
    """A memory mode for windows of text: the lengths of their segments.

    Args:
        memory: "linear" for a single segment; "sqrt" for as many states as a segment has time
            steps; or the most bytes that forward, loss and backward of a step may allocate beyond
            those allocated before it, such as "500 MiB".

    Raises:
        ValueError: when `memory` is none of these.
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
        """Measure the peak of steps, to keep the bound on bytes.

        Args:
            peak: measures the peak of a step.
            most_steps: number of steps of the longest window.

        Raises:
            ValueError: when no segments of such a window keep the bound.
        """
        self._costs = _Costs(peak, most_steps)
        if self._longest(most_steps) is None:
            lengths = range(1, most_steps + 1)
            least = min(self._costs.predicted(most_steps, steps) for steps in lengths)
            raise ValueError(
                f"`memory` is {self.memory}, but a step of {most_steps} time steps takes at least "
                f"{format_bytes(least)}. Give that, shorter windows, or a smaller batch."
            )

    def segment_steps(self, num_steps: int) -> int | None:
        """Return the number of steps of a window's segments; None for a single segment."""
        if self.memory == "sqrt":
            return math.ceil(math.sqrt(num_steps))
        if self.memory == "linear":
            return None
        if self._costs is None:
            raise RuntimeError("`measure` was not called.")
        return self._longest(num_steps)

    def _longest(self, num_steps: int) -> int | None:
        """Return the longest segments, which are the fastest, that keep the bound."""
        costs, budget = self._costs, self.budget_bytes
        if costs is None or budget is None:
            return None
        lengths = range(num_steps, 0, -1)
        fitting = (steps for steps in lengths if costs.predicted(num_steps, steps) <= budget)
        return next(fitting, None)


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
