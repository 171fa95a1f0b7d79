"""Bytes: the storages that tensors use, and two counters of the bytes that are alive.

NOTE [ When a storage counts ]

A storage counts once, however many tensors use it, from the operator that first returns it until
its last reference is dropped. One that an operator takes, and none has returned before, existed
earlier and does not count; if an operator makes it grow, the growth counts. It is held weakly. Its
address serves as key: the callback of the weak reference runs before another one can have it.

NOTE [ Reports of the allocator ]

Rule 1. The allocator reports each allocation and each free to the profiler of its thread. A session
        is such a profiler, which does not record operators. Other threads report to it only if
        torch starts them for this thread, in backward.
Rule 2. A thread has at most one profiler. Nested contexts share a session; while a profiler of
        other code runs there can be no session, and `can_follow` returns False.
Rule 3. A session is read by ending it and beginning another one, which is not possible within a
        backward that began outside of it. So a moment is marked by an operator that is recorded.
Rule 4. Memory that was allocated before does not count when it is freed. A report has a size and no
        address, so a free counts if memory of this size is alive. Memory that an earlier session
        followed may be mistaken for it; frees of other earlier memory are not reported.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain, count
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup._core.compile import never_compiled
from recoup._core.operators import DispatchMode
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import is_in_backward


def storages_of(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages that `tensors` use, one after the other; a shared one comes repeatedly.

    A storage is one Python object while it is alive, so a `WeakSet` tells storages apart.
    """
    for tensor in tensors:
        for part in _parts_of(tensor):
            with torch._C.DisableTorchFunctionSubclass():  # or a `Value` would count as exposed
                yield part.untyped_storage()


def bytes_of(tensors: Iterable[Tensor], left_out: Container[torch.UntypedStorage] = ()) -> int:
    """Return the bytes of the storages that `tensors` use, each once, except those `left_out`."""
    return sum(storage.nbytes() for storage in set(storages_of(tensors)) if storage not in left_out)


def _parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with a storage of their own that `tensor` consists of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor names its mesh, too
                yield from _parts_of(part)
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


class _Followed(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with the bytes counted for it."""

    key: int
    num_bytes: int
    baseline_bytes: int


class StorageTracker(DispatchMode):
    """A context that counts the bytes of the storages made by operators within it.

    After the context has ended, `current_bytes` goes on falling as storages made within are freed.

    It cannot see temporaries inside a kernel; storages that no operator made (`torch.from_numpy`,
    `torch.load`); operators on other threads, and those inside a compiled graph; storages that were
    alive before and are freed within. One that is resized by `UntypedStorage.resize_` is counted
    again when an operator next uses it, and at the end.

    Args:
        device: count storages on this type of device only; all if None.
        levels: a list to which the bytes alive are appended when they change.

    Example:
        >>> import torch
        >>> from recoup._core.storage_tracking import StorageTracker
        >>> with StorageTracker() as tracker:
        ...     x = torch.zeros(256)  # 1 KiB
        ...     y = x.view(16, 16).exp().sum()
        >>> tracker.peak_bytes, tracker.current_bytes
        (2052, 1028)
    """

    # Operators that take functions (such as flex_attention) must reach this mode too.
    supports_higher_order_operators = True

    def __init__(
        self, device: torch.device | str | None = None, levels: list[int] | None = None
    ) -> None:
        super().__init__()
        self.current_bytes = 0
        self.peak_bytes = 0
        self._levels = levels
        self._device_type = None if device is None else torch.device(device).type
        self._followed: dict[int, _Followed] = {}
        # The callback must not own the tracker, or the two would wait for the garbage collector.
        tracker = weakref.ref(self)

        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            owner = tracker()
            if owner is not None and isinstance(reference, _Followed):
                owner._forget(reference)

        self._when_freed: Callable[[weakref.ref[torch.UntypedStorage]], None] = forget

    def __exit__(self, *exc_info: Any) -> None:
        try:
            self._count_resized()
        finally:
            super().__exit__(*exc_info)

    def mark(self, take: Callable[[int, int], None]) -> None:
        """Call `take` with the peak since the last mark and the bytes alive now."""
        self._count_resized()
        take(self.peak_bytes, self.current_bytes)
        self.peak_bytes = self.current_bytes

    @never_compiled
    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count the storages that it made."""
        kwargs = {} if kwargs is None else kwargs
        taken = {
            storage._cdata: (storage, storage.nbytes())
            for storage in self._storages((args, kwargs))
        }
        for key, (_, num_bytes) in taken.items():
            followed = self._followed.get(key)
            if followed is not None and followed.num_bytes != num_bytes:
                self._count(followed, num_bytes)
        result = func(*args, **kwargs)
        for key, (storage, num_bytes) in taken.items():
            if storage.nbytes() != num_bytes:
                self._follow(key, storage, baseline_bytes=num_bytes)
        # `torch.tensor` makes its storage unseen, and passes it first to this operator.
        fresh = func is torch.ops.aten.lift_fresh.default
        for storage in self._storages(result):
            if fresh or storage._cdata not in taken:
                self._follow(storage._cdata, storage, baseline_bytes=0)
        return result

    def _follow(self, key: int, storage: torch.UntypedStorage, baseline_bytes: int) -> None:
        followed = self._followed.get(key)
        if followed is None:
            followed = _Followed(storage, self._when_freed)
            followed.key, followed.num_bytes = key, baseline_bytes
            followed.baseline_bytes = baseline_bytes
            self._followed[key] = followed
        self._count(followed, storage.nbytes())

    def _count_resized(self) -> None:
        for followed in list(self._followed.values()):
            storage = followed()
            if storage is not None:
                self._count(followed, storage.nbytes())

    def _count(self, followed: _Followed, num_bytes: int) -> None:
        before = max(followed.num_bytes - followed.baseline_bytes, 0)
        followed.num_bytes = num_bytes
        self.current_bytes += max(num_bytes - followed.baseline_bytes, 0) - before
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        if self._levels is not None and self._levels[-1:] != [self.current_bytes]:
            self._levels.append(self.current_bytes)

    def _forget(self, followed: _Followed) -> None:
        self._count(followed, 0)
        del self._followed[followed.key]

    def _storages(self, value: Any) -> Iterator[torch.UntypedStorage]:
        """Yield all storages of `value` on the device that is counted."""
        for storage in storages_of(tensors_in(value)):
            if self._device_type in (None, storage.device.type):
                yield storage


_autograd: Any = torch.autograd
_profiler: Any = vars(torch._C)["_profiler"]
_OPERATOR = "push"
_MEMORY = "memory_alloc"
_numbers = count()


class _Session(threading.local):
    """The profiler of a thread, and the contexts that follow its reports."""

    is_on = False
    records_operators = True  # outside of the session

    def __init__(self) -> None:
        self.followers: list[Allocations] = []


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
    complete when the context has ended. To the list `levels` the bytes alive are appended after
    each allocation and each free, before the next mark takes its numbers.

    Example:
        >>> import torch
        >>> from recoup._core.storage_tracking import Allocations
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
    flags = (False, True, False, False, False)  # memory is recorded
    cpu, more = _autograd.ProfilerState.CPU, _profiler._ExperimentalConfig()
    _autograd._enable_profiler_legacy(_autograd.ProfilerConfig(cpu, *flags, more))


def _stop() -> list[Any]:
    """End the session and return its events in order; none if other code has ended it."""
    if not _autograd._profiler_enabled():
        return []
    threads = [events for events in _autograd._disable_profiler_legacy() if events]
    events = list(chain.from_iterable(threads))
    if len(threads) > 1:
        events.sort(key=events[0].cpu_elapsed_us)
    return events
