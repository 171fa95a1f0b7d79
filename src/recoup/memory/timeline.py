"""Bytes from one moment of a step to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import NamedTuple, Self

import torch

from recoup.residuals.tracking import StorageTracker

__all__ = ["Span", "Timeline", "timeline"]


class Span(NamedTuple):
    """What was alive between two moments, beyond what was alive before the timeline began.

    Args:
        peak_bytes: most at one time.
        end_bytes: at the second moment.
    """

    peak_bytes: int
    end_bytes: int


class Timeline(ABC):
    """A context in which bytes are counted as `measure` counts them, span by span."""

    def __init__(self) -> None:
        self._peak_bytes = self._end_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """Most at one time, of all spans that have ended."""
        return self._peak_bytes

    @property
    def end_bytes(self) -> int:
        """What was alive when the last span ended."""
        return self._end_bytes

    def mark(self) -> Span:
        """End a span, and begin the next one."""
        span = self._read()
        self._peak_bytes = max(self._peak_bytes, span.peak_bytes)
        self._end_bytes = span.end_bytes
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
    def _read(self) -> Span: ...


def timeline(device: torch.device) -> Timeline:
    """Return a timeline of the bytes on a device, "cpu" or CUDA."""
    return _CudaTimeline(device) if device.type == "cuda" else _CpuTimeline(device)


class _CpuTimeline(Timeline):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._tracker = StorageTracker(device)

    def __enter__(self) -> Self:
        self._tracker.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._tracker.__exit__(*exc_info)
        self.mark()

    def _read(self) -> Span:
        tracker = self._tracker
        span = Span(tracker.peak_bytes, tracker.current_bytes)
        tracker.peak_bytes = tracker.current_bytes
        return span


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

    def _read(self) -> Span:
        span = Span(
            torch.cuda.max_memory_allocated(self._device) - self._before,
            torch.cuda.memory_allocated(self._device) - self._before,
        )
        torch.cuda.reset_peak_memory_stats(self._device)
        return span
