"""Allocations: the bytes that the CPU allocator reports as allocated and freed.

NOTE [ Reports of the allocator ]

Rule 1. The allocator reports each allocation and each free to the profiler of its thread. A session
        is such a profiler, which does not record operators. Other threads report to it only if
        torch starts them for this thread, in backward.
Rule 2. A thread has at most one profiler. Nested contexts share a session; while a profiler of
        other code runs there can be no session, and `can_follow` returns False.
Rule 3. A session is read by ending it and beginning another one, which is not possible within a
        backward that began outside of it. So a moment is marked by an operator that is recorded,
        and the bytes alive at that moment are known when the session is read.
Rule 4. Memory that was allocated before does not count when it is freed. A report has a size and no
        address, so a free counts if memory of this size is alive. Memory that an earlier session
        followed, and is freed here, may be mistaken for it; the profiler does not report frees of
        other earlier memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import Any, Self

import torch

from recoup._core.saved_tensors import is_in_backward

_autograd: Any = torch.autograd
_profiler: Any = vars(torch._C)["_profiler"]
_OPERATOR = "push"
_MEMORY = "memory_alloc"
_numbers = count()


class _Session(threading.local):
    """The profiler of a thread, and the contexts that follow its reports."""

    def __init__(self) -> None:
        self.followers: list[Allocations] = []
        self.is_on = False
        self.records_operators = True  # outside of the session


_here = _Session()


def can_follow() -> bool:
    """Whether a context can begin here (See Rules 2 and 3)."""
    if _here.followers:
        return not is_in_backward()
    return _here.is_on or not _autograd._profiler_enabled()


class Allocations:
    """A context that counts the bytes that the allocator of the CPU hands out within it.

    Temporaries within kernels count, and so do random states. It does not see other threads, memory
    of libraries that do not use torch's allocator, and frees of memory from before. The counts are
    complete when the context has ended.

    Args:
        levels: a list to which the bytes alive after each allocation and each free are appended,
            before the next mark takes its numbers; None to record no such list.

    Example:
        >>> import torch
        >>> from recoup._core.allocations import Allocations
        >>> with Allocations() as allocations:
        ...     x = torch.zeros(256)  # 1 KiB
        ...     y = x.view(16, 16).exp().sum()
        >>> allocations.current_bytes
        1028
    """

    def __init__(self, levels: list[int] | None = None) -> None:
        self.current_bytes = 0
        self._levels = levels
        self._peak_bytes = 0  # since the last mark
        self._num_alive: Counter[int] = Counter()  # by size
        self._marks: dict[str, Callable[[int, int], None]] = {}

    def __enter__(self) -> Self:
        if _here.followers:
            _report()
        else:
            _begin()
        _here.followers.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            _report()
        finally:
            _here.followers.remove(self)
            if not _here.followers:
                _end()

    def mark(self, take: Callable[[int, int], None]) -> None:
        """Mark a moment: `take` gets the peak since the last mark and the bytes alive then."""
        name = f"recoup {next(_numbers)}"
        self._marks[name] = take
        _autograd._enable_record_function(True)
        with _profiler._RecordFunctionFast(name):
            _autograd._enable_record_function(False)

    def _take(self, events: Sequence[tuple[str, int]]) -> None:
        """Count allocations and frees (negative sizes), and call the marks among `events`."""
        current, peak, num_alive = self.current_bytes, self._peak_bytes, self._num_alive
        levels = self._levels
        for name, size in events:
            if size > 0:
                num_alive[size] += 1
                current += size
                peak = max(peak, current)
            elif num_alive[-size]:  # See Rule 4
                num_alive[-size] -= 1
                current += size
            else:
                if name in self._marks:
                    self._marks.pop(name)(peak, current)
                    peak = current
                continue
            if levels is not None:
                levels.append(current)
        self.current_bytes, self._peak_bytes = current, peak


def _begin() -> None:
    if not _here.is_on:
        _here.is_on = True
        try:
            _start()
        except BaseException:
            _here.is_on = False
            raise
        torch.empty(0)  # shows whether operators are recorded
        _here.records_operators = any(event.kind() == _OPERATOR for event in _stop())
        _start()
    elif not _autograd._profiler_enabled():
        _start()  # an interrupt came between two sessions
    _autograd._enable_record_function(False)


def _end() -> None:
    _autograd._enable_record_function(_here.records_operators)
    if _autograd._profiler_enabled():
        _stop()
    _here.is_on = False


def _report() -> None:
    """Pass the events reported so far to the followers."""
    events = [
        (event.name(), event.cpu_memory_usage())
        for event in _stop()
        if event.kind() in (_MEMORY, _OPERATOR)
    ]
    _start()
    for follower in _here.followers:
        follower._take(events)


def _start() -> None:
    is_memory_recorded, *others = True, False, False, False
    cpu, more = _autograd.ProfilerState.CPU, _profiler._ExperimentalConfig()
    config = _autograd.ProfilerConfig(cpu, False, is_memory_recorded, *others, more)
    _autograd._enable_profiler_legacy(config)


def _stop() -> list[Any]:
    """End the session and return its events in order; none if other code has ended it."""
    if not _autograd._profiler_enabled():
        return []
    threads = [events for events in _autograd._disable_profiler_legacy() if events]
    events = list(chain.from_iterable(threads))
    if len(threads) > 1:
        events.sort(key=events[0].cpu_elapsed_us)
    return events
