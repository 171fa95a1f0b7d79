"""Timelines: the bytes alive in each span of a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import torch

from recoup._core.devices import (
    NO_PEAKS,
    Peaks,
    is_accelerator,
    memory_counts,
    reset_peaks,
    synchronize,
)
from recoup._core.storage_tracking import Allocations, StorageTracker, can_follow
from recoup._core.tensors import is_without_values


@dataclass(slots=True)
class Span:
    """The bytes alive between two marks, beyond those alive before the timeline began.

    Args:
        peaks: the most bytes alive at one time, as they were requested, allocated and reserved.
        end_bytes: the bytes alive at the second mark.
        levels: the bytes alive after each allocation and each free, if the timeline records them.
    """

    peaks: Peaks = NO_PEAKS
    end_bytes: int = 0
    levels: Sequence[int] = ()

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one time."""
        return self.peaks.allocated


class _Counter(Protocol):
    """A context that counts bytes."""

    def __enter__(self) -> object: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any, /) -> object: ...

    def mark(self, take: Callable[..., None]) -> None:
        """Let `take` get the peak, or all peaks, since the last mark and the bytes alive now."""
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
        return self.peaks.allocated

    @property
    def peaks(self) -> Peaks:
        """The most bytes at one time, as they were requested, allocated and reserved.

        Those that the allocator had cached before count as reserved.
        """
        return most_of(self._spans)

    def mark(self) -> Span:
        """End the current span and begin the next one; return the span that ended."""
        span = Span()
        self._spans.append(span)
        self._counter.mark(partial(self._fill, span))
        return span

    def _fill(self, span: Span, peak: Peaks | int, end_bytes: int) -> None:
        span.peaks = Peaks(peak, peak) if isinstance(peak, int) else peak
        span.end_bytes = end_bytes
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


def most_of(spans: Sequence[Span]) -> Peaks:
    """Return the peaks of several spans together."""
    found = [span.peaks for span in spans] or [NO_PEAKS]
    reserved = [each.reserved for each in found if each.reserved is not None]
    return Peaks(
        max(each.requested for each in found),
        max(each.allocated for each in found),
        max(reserved, default=None),
    )


def timeline(device: torch.device, *, records_levels: bool = False) -> Timeline:
    """Return a timeline of the bytes on a device: the CPU, or an accelerator that counts them.

    On CPU those are the bytes that the allocator reports to a profiler. A thread can have only one:
    while another profiler is active, storages are tracked, and a warning says what is not counted.

    Args:
        device: the device.
        records_levels: whether spans have `levels`, which no accelerator tells.
    """
    levels: list[int] | None = [] if records_levels else None
    if is_without_values():  # whose storages are on the device "meta"
        return Timeline(StorageTracker(levels=levels), levels)
    if is_accelerator(device):
        return Timeline(_DeviceCounter(device))
    if can_follow():
        return Timeline(Allocations(levels), levels)
    warnings.warn(
        "A profiler runs in this thread, so bytes are counted by the tensors that operators "
        "return. What kernels allocate for a moment is left out, which can be a third of the "
        "peak. Measure, or plan, outside of the profiler.",
        stacklevel=3,
    )
    return Timeline(StorageTracker(device, levels), levels)


class _DeviceCounter:
    """The bytes that the allocator of an accelerator has handed out, as it counts them itself."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        synchronize(self._device)
        reset_peaks(self._device)
        self._before = memory_counts(self._device)

    def __exit__(self, *exc_info: object) -> None:
        synchronize(self._device)

    def mark(self, take: Callable[..., None]) -> None:
        """Let `take` get the peaks since the last mark and the bytes alive now."""
        now, before = memory_counts(self._device), self._before
        reserved = now.peaks.reserved
        peaks = Peaks(
            now.peaks.requested - before.requested,
            now.peaks.allocated - before.allocated,
            None if reserved is None else reserved - before.allocated,
        )
        take(peaks, now.allocated - before.allocated)
        reset_peaks(self._device)
