"""The memory and the time of one call, and timelines: the bytes alive in each span of a step."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from recoup._arguments import check_callable, check_whole
from recoup._core import devices
from recoup._core.devices import NO_PEAKS, Peaks
from recoup._core.pytree import tensors_in
from recoup._core.storage_tracking import Allocations, StorageTracker, can_follow
from recoup._core.tensors import check_is_in_its_mode, is_without_values
from recoup.memory.size import format_bytes, shown_beside


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured memory and time of a call, as `measure` returns them. Printing shows all.

    Args:
        peak_bytes: the most bytes alive at one time while it ran, beyond those alive before it.
        held_bytes: the bytes still alive after it returned, those of its return value included,
            beyond those alive before it.
        seconds: the wall time of the fastest timed call, in seconds; None if no call was timed.
        device: the device whose bytes were counted, such as "cpu" or "cuda:0".
        peaks: the peak as it was `requested`, `allocated` (`peak_bytes`) and `reserved` from the
            device, beyond what was allocated before. On the CPU nothing is rounded up, and
            `reserved` is None.

    Example:
        >>> import torch
        >>> from recoup import measure
        >>> x = torch.zeros(1024, requires_grad=True)  # 4 KiB
        >>> measured = measure(lambda: x.exp().sin(), device="cpu", repeats=0)
        >>> measured.peak_bytes, measured.held_bytes, measured.seconds, measured.device
        (8192, 8192, None, 'cpu')
    """

    peak_bytes: int
    held_bytes: int
    seconds: float | None
    device: str
    peaks: Peaks

    def __str__(self) -> str:
        peak = f"peak {format_bytes(self.peak_bytes)}{shown_beside(self.peaks)}"
        time = "" if self.seconds is None else f", {1e3 * self.seconds:.4g} ms"
        return f"{peak}, held {format_bytes(self.held_bytes)}{time} on {self.device}"


def measure(
    fn: Callable[[], object], *, device: torch.device | str | None = None, repeats: int = 1
) -> Measurement:
    """Measure the memory and the time of a call.

    `fn` is called ``1 + repeats`` times: once to measure memory, then `repeats` times to measure
    time. Nothing is kept: each return value is released before the next call. Memory that only the
    first call allocates (``.grad`` of each parameter, workspaces of CUDA libraries) is part of the
    peak; call `fn` once beforehand to leave it out.

    On CPU the numbers are those that torch's allocator reports to profilers, temporaries within
    kernels included. Not counted are allocations on other threads, except those of autograd; memory
    that libraries such as numpy allocate themselves; and memory that the allocator caches, so that
    resident memory (RSS) is larger. Memory that was alive before and is freed by `fn` is not
    subtracted (unless an earlier measurement saw its allocation and memory of its size is alive).
    Torch may write a line to stderr about memory "allocated before the profiling started".

    A thread can have only one profiler. If one is active already, the storages that operators
    return are tracked instead, with a warning. The peak then lacks the temporaries of kernels: 5
    percent for a transformer layer, a quarter to a third for an LSTM or convolutions. `fn` cannot
    start a profiler.

    Under torch's `FakeTensorMode` no memory is taken, and the bytes are those that the storages
    would have; nothing is timed.

    On an accelerator the numbers are those of torch's allocator, rounded up to its blocks, for
    `device` alone; memory that was alive before and is freed by `fn` is subtracted there. The peak
    statistics of that device are reset. What it has reserved is counted, too, with the memory that
    it had cached before: call ``torch.accelerator.empty_cache()`` to leave that out.

    Args:
        fn: a function without arguments.
        device: ``"cpu"``, or an accelerator whose bytes torch counts, such as ``"cuda:0"``. The
            default is the current one if this process uses it already, else the CPU, which is
            measured by one more call, too, if the first one took nothing on that device; the result
            names it.
        repeats: number of timed calls, of which the fastest counts.

    Returns:
        The bytes and seconds, printable.

    Raises:
        ValueError: if `device` is none of these, or `repeats` is negative.

    Example:
        >>> import torch
        >>> from recoup import measure
        >>> x = torch.zeros(256, requires_grad=True)  # 1 KiB
        >>> print(measure(lambda: x.exp().sin(), device="cpu", repeats=0))
        peak 2 KiB, held 2 KiB on cpu
    """
    check_callable(fn=fn)
    check_whole(0, repeats=repeats)
    where = check_device(devices.device_in_use() if device is None else device)
    where = torch.empty(0, device=where).device  # with its index
    line, held = _counted(fn, where)
    if device is None and where.type != "cpu" and not line.peak_bytes:
        where = torch.device("cpu")
        line, held = _counted(fn, where)
    if is_without_values():
        repeats = 0  # there is nothing to time
    return Measurement(
        peak_bytes=line.peak_bytes,
        held_bytes=held.end_bytes,
        seconds=min((_seconds(fn, where) for _ in range(repeats)), default=None),
        device=str(where),
        peaks=line.peaks,
    )


def _counted(fn: Callable[[], object], device: torch.device) -> tuple[Timeline, Span]:
    """Call `fn`, and return the timeline of the bytes on a device, and what is held at the end."""
    with timeline(device) as line:
        result = fn()
        held = line.mark()
        check_is_in_its_mode(tensors_in(result))
        del result  # after the mark, so that it counts as held
    return line, held


def check_device(device: torch.device | str) -> torch.device:
    """Return `device`, or raise ValueError if its memory cannot be measured here."""
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        wrong = f'`device` is "{device}", which torch does not know. Give "cpu".'
        raise ValueError(wrong) from error
    if not devices.is_available(where):
        raise ValueError(f'`device` is "{where}", but torch finds no such device here. Pass "cpu".')
    if devices.is_accelerator(where):
        devices.counter_of(where)
    return where


def _seconds(fn: Callable[[], object], device: torch.device) -> float:
    """Return the wall time of one call, without the release of its result."""
    devices.synchronize(device)
    start = time.perf_counter()
    result = fn()
    devices.synchronize(device)
    seconds = time.perf_counter() - start
    del result
    return seconds


# -- timelines ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Span:
    """The bytes alive between two marks, beyond those alive before the timeline began."""

    peaks: Peaks = NO_PEAKS
    end_bytes: int = 0  # those alive at the second mark
    levels: Sequence[int] = ()  # after each allocation and each free, if the timeline records them

    @property
    def peak_bytes(self) -> int:
        return self.peaks.allocated


class Timeline:
    """A context in which bytes are counted as `measure` counts them, span by span.

    Its numbers, and those of its spans, are available when it has ended. Spans take their levels
    from the list to which the counter appends the bytes alive after each event, if it does.
    """

    def __init__(
        self,
        counter: StorageTracker | Allocations | _DeviceCounter,
        levels: list[int] | None = None,
    ) -> None:
        self._counter = counter
        self._levels = levels
        self._spans: list[Span] = []

    @property
    def peak_bytes(self) -> int:
        return self.peaks.allocated

    @property
    def peaks(self) -> Peaks:
        """The most bytes at one time; those that the allocator had cached count as reserved."""
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
    requested, allocated, reserved = zip(*[span.peaks for span in spans] or [NO_PEAKS], strict=True)
    known = [each for each in reserved if each is not None]
    return Peaks(max(requested), max(allocated), max(known, default=None))


def timeline(device: torch.device, *, records_levels: bool = False) -> Timeline:
    """Return a timeline of the bytes on a device: the CPU, or an accelerator that counts them.

    On CPU those are the bytes that the allocator reports to a profiler. A thread can have only one:
    while another profiler is active, storages are tracked, and a warning says what is not counted.
    No accelerator tells `levels`.
    """
    levels: list[int] | None = [] if records_levels else None
    if is_without_values():  # whose storages are on the device "meta"
        return Timeline(StorageTracker(levels=levels), levels)
    if devices.is_accelerator(device):
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
        devices.synchronize(self._device)
        devices.reset_peaks(self._device)
        self._before = devices.memory_counts(self._device)

    def __exit__(self, *exc_info: object) -> None:
        devices.synchronize(self._device)

    def mark(self, take: Callable[[Peaks, int], None]) -> None:
        now, before = devices.memory_counts(self._device), self._before
        reserved = now.peaks.reserved
        peaks = Peaks(
            now.peaks.requested - before.requested,
            now.peaks.allocated - before.allocated,
            None if reserved is None else reserved - before.allocated,
        )
        take(peaks, now.allocated - before.allocated)
        devices.reset_peaks(self._device)
