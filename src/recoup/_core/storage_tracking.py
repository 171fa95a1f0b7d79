"""Storages: those that tensors use, their bytes, and a tracker of the bytes that are alive.

NOTE [ When a storage counts ]

Tensors are views; memory belongs to their storage. A storage counts once, however many tensors
use it, from the operator that first returns it until its last reference is dropped. A storage
that an operator takes as input, and no operator has returned before, existed earlier and does
not count; if an operator makes it grow, the growth counts.

Only weak references are held, so following a storage does not prolong its life. Its address
serves as key: the entry is removed before another storage can have the address, because the
callback of the weak reference runs first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup._core.compile import never_compiled
from recoup._core.dispatch_modes import DispatchMode
from recoup._core.pytree import tensors_in


def storages_of(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages that `tensors` use, one after the other; a shared one comes repeatedly.

    A storage is the same Python object for as long as it is alive, so a `WeakSet` of storages tells
    them apart without keeping them alive.
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

    It keeps only one weak reference a storage. After the context has ended, no new storage is
    counted, and `current_bytes` goes on falling as storages made within are freed.

    It cannot see temporaries inside a kernel; storages that no operator made
    (`torch.from_numpy`, `torch.load`); operators on other threads, and those inside a
    compiled graph; storages that were alive before and are freed within. A storage that is resized
    by `UntypedStorage.resize_` is counted again when an operator next uses it, and at the end.

    Args:
        device: count storages on this type of device only; all if None.

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

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.current_bytes = 0
        self.peak_bytes = 0
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

    def _forget(self, followed: _Followed) -> None:
        self._count(followed, 0)
        del self._followed[followed.key]

    def _storages(self, value: Any) -> Iterator[torch.UntypedStorage]:
        """Yield all storages of `value` on the device that is counted."""
        for storage in storages_of(tensors_in(value)):
            if self._device_type in (None, storage.device.type):
                yield storage
