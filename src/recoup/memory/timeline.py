"""Timelines: the bytes alive in each span of a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from recoup._core.allocations import Allocations, can_follow
from recoup._core.devices import counter_of, is_accelerator, synchronize
from recoup._core.storage_tracking import StorageTracker

__all__ = ["Span", "Timeline", "timeline"]


@dataclass(slots=True)
class Span:
    """The bytes alive between two marks, beyond those alive before the timeline began.

    Args:
        peak_bytes: the most bytes alive at one time.
        end_bytes: the bytes alive at the second mark.
        levels: the bytes alive after each allocation and each free, if the timeline records them.
    """

    peak_bytes: int = 0
    end_bytes: int = 0
    levels: Sequence[int] = ()


class _Counter(Protocol):
    """A context that counts bytes."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exc_info: Any) -> None: ...

    def mark(self, take: Callable[[int, int], None]) -> None:
        """Let `take` get the peak since the last mark and the bytes alive now."""
        ...


class Timeline:
    """A context in which bytes are counted as `measure` counts them, span by span.

    Its numbers, and those of its spans, are available when it has ended.

    Args:
        counter: the context that counts them.
        levels: the list to which it appends the bytes alive after each event, and from which spans
            take theirs; None if it does not.
    """

    def __init__(self, counter: _Counter, levels: list[int] | None = None) -> None:
        self._counter = counter
        self._levels = levels
        self._spans: list[Span] = []

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one time."""
        return max((span.peak_bytes for span in self._spans), default=0)

    def mark(self) -> Span:
        """End the current span and begin the next one; return the span that ended."""
        span = Span()
        self._spans.append(span)
        self._counter.mark(lambda peak_bytes, end_bytes: self._fill(span, peak_bytes, end_bytes))
        return span

    def _fill(self, span: Span, peak_bytes: int, end_bytes: int) -> None:
        span.peak_bytes, span.end_bytes = peak_bytes, end_bytes
        if self._levels is not None:
            span.levels = tuple(self._levels)
            self._levels.clear()

    def __enter__(self) -> Self:
        self._counter.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.mark()
        finally:
            self._counter.__exit__(*exc_info)


def timeline(device: torch.device, *, records_levels: bool = False) -> Timeline:
    """Return a timeline of the bytes on a device: the CPU, or an accelerator that counts them.

    On CPU those are the bytes that the allocator reports to a profiler. A thread can have only one:
    while another profiler is active, storages are tracked, and a warning says what is not counted.

    Args:
        device: the device.
        records_levels: whether spans have `levels`, which only that profiler can tell.
    """
    if is_accelerator(device):
        return Timeline(_DeviceCounter(device))
    if can_follow():
        levels: list[int] | None = [] if records_levels else None
        return Timeline(Allocations(levels), levels)
    warnings.warn(
        "A profiler runs in this thread, so bytes are counted by the tensors that operators "
        "return. What kernels allocate for a moment is left out, which can be a third of the "
        "peak. Measure, or plan, outside of the profiler.",
        stacklevel=3,
    )
    return Timeline(StorageTracker(device))


class _DeviceCounter:
    """The bytes that the allocator of an accelerator has handed out, as it counts them itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counter = counter_of(device)
        self._before = 0

    def __enter__(self) -> None:
        synchronize(self._device)
        self._counter.reset_peak_memory_stats(self._device)
        self._before = self._counter.memory_allocated(self._device)

    def __exit__(self, *exc_info: object) -> None:
        synchronize(self._device)

    def mark(self, take: Callable[[int, int], None]) -> None:
        """Let `take` get the peak since the last mark and the bytes alive now."""
        take(
            self._counter.max_memory_allocated(self._device) - self._before,
            self._counter.memory_allocated(self._device) - self._before,
        )
        self._counter.reset_peak_memory_stats(self._device)
