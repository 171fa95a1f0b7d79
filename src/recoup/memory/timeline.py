"""Timelines: the bytes alive in each span of a step."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from recoup._core.allocations import Allocations, can_follow
from recoup._core.storage_tracking import StorageTracker

__all__ = ["Span", "Timeline", "timeline"]


@dataclass(slots=True)
class Span:
    """The bytes alive between two marks, beyond those alive before the timeline began.

    Args:
        peak_bytes: the most bytes alive at one time.
        end_bytes: the bytes alive at the second mark.
    """

    peak_bytes: int = 0
    end_bytes: int = 0

    def fill(self, peak_bytes: int, end_bytes: int) -> None:
        """Set the numbers."""
        self.peak_bytes, self.end_bytes = peak_bytes, end_bytes


class Timeline(ABC):
    """A context in which bytes are counted as `measure` counts them, span by span.

    Its numbers, and those of its spans, are available when it has ended.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one time."""
        return max((span.peak_bytes for span in self._spans), default=0)

    @property
    def end_bytes(self) -> int:
        """The bytes alive at the end."""
        return self._spans[-1].end_bytes if self._spans else 0

    def mark(self) -> Span:
        """End the current span and begin the next one; return the span that ended."""
        span = Span()
        self._spans.append(span)
        self._read(span)
        return span

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    @abstractmethod
    def _read(self, span: Span) -> None: ...


def timeline(device: torch.device) -> Timeline:
    """Return a timeline of the bytes on a device, "cpu" or CUDA.

    On CPU those are the bytes that the allocator reports to a profiler. A thread can have only one:
    while another profiler is active, storages are tracked, and a warning says what is not counted.
    """
    if device.type == "cuda":
        return _CudaTimeline(device)
    if can_follow():
        return _AllocatorTimeline()
    warnings.warn(
        "A profiler runs in this thread, so bytes are counted by the tensors that operators "
        "return. What kernels allocate for a moment is left out, which can be a third of the "
        "peak. Measure, or plan, outside of the profiler.",
        stacklevel=3,
    )
    return _StorageTimeline(device)


class _AllocatorTimeline(Timeline):
    def __init__(self) -> None:
        super().__init__()
        self._allocations = Allocations()

    def __enter__(self) -> Self:
        self._allocations.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.mark()
        finally:
            self._allocations.__exit__(*exc_info)

    def _read(self, span: Span) -> None:
        self._allocations.mark(span.fill)


class _StorageTimeline(Timeline):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._tracker = StorageTracker(device)

    def __enter__(self) -> Self:
        self._tracker.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._tracker.__exit__(*exc_info)
        self.mark()

    def _read(self, span: Span) -> None:
        tracker = self._tracker
        span.fill(tracker.peak_bytes, tracker.current_bytes)
        tracker.peak_bytes = tracker.current_bytes


class _CudaTimeline(Timeline):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._before = 0

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *exc_info: object) -> None:
        torch.cuda.synchronize(self._device)
        self.mark()

    def _read(self, span: Span) -> None:
        span.fill(
            torch.cuda.max_memory_allocated(self._device) - self._before,
            torch.cuda.memory_allocated(self._device) - self._before,
        )
        torch.cuda.reset_peak_memory_stats(self._device)
