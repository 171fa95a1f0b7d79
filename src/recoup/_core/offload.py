"""Offloading: tensors that wait in host memory or a folder, copied behind the computation.

NOTE [ Tensors that are away ]

Rule 1. A storage moves once, however many tensors look at it; each slot knows how its tensor does.
        So what is away is what autograd would have kept. The tensors must share one counter of
        versions. Parts that autograd takes for tensors of their own (of `unsafe_chunk`, as in
        recurrent kernels) are written to without a trace in the others: they stay.
Rule 2. A storage is held until its copy has been made, and its version is compared then. If it was
        changed meanwhile, it stays, and asking for it is an error, as where autograd keeps it.
Rule 3. Autograd keeps memory, not values: what is written to it later unseen (by `rrelu`, which
        fills its noise after the save, or through `.data`, as solvers fill a buffer of stages) is
        what backward finds. So the copy of what autograd saves begins when nobody else has its
        memory any more, and could write to it: at the first save after that, or where forward ends.
Rule 4. Bytes in flight are those that are being copied, or come back before backward asks for them.
        Where a storage would exceed the bound, forward waits for those that left before it.
Rule 5. Backward asks in the reverse order of forward. When it takes one storage, those that were
        sent before it begin to come back, as far as the bound allows. What was sent last is still
        here: only a storage that is sent, or backward asking for it, makes another one go.
Rule 6. A slot holds what is away, that its traffic and its copy. The traffic holds nothing that is
        away, so all of it goes with the slots.
Rule 7. If a storage cannot be copied (the disk is full), it and every later one stay where they
        are; the error is raised where forward ends, and backward would still work.

NOTE [ Copies that are under way ]

Rule 8. A tier begins a copy and returns; the copy says when it has landed, and is deleted with its
        object. Whoever began it holds the tensor until then, since the tier reads its memory.
Rule 9. On an accelerator copies run on a stream of their own. It waits for the stream that made
        the tensor, and the stream that takes a tensor back waits for it; the host for neither.
Rule 10. The file of a folder has no name: it is unlinked as it is made, so the system deletes it
        whatever becomes of the process.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.devices import has_streams, pins_memory
from recoup._core.saved_tensors import backward_id, set_versions, version_of, when_backward_ends
from recoup._core.tensors import geometry_of
from recoup.errors import ChangedError, OffloadError

_NUM_THREADS = 2
_MOST_AT_ONCE = 1 << 30  # a system call moves less than two gibibytes
_storages: Any = torch._C
_num_users: Callable[[int], int] = _storages._storage_Use_Count  # those in Python count as one
# Waits until a copy is back, and returns its bytes, where the tensor was.
_Arrival = Callable[[], Tensor]


def _flat(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a tensor of bytes."""
    found = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return found.set_(storage)  # pyright: ignore[reportArgumentType, reportCallIssue]


def existing_folder(to: object) -> Path | None:
    """Return the folder that `to` names, or None if there is none."""
    if not isinstance(to, (str, os.PathLike)) or to == "":
        return None
    folder = Path(cast("str | os.PathLike[str]", to)).expanduser().absolute()
    return folder if folder.is_dir() else None


def tier_for(to: str) -> Tier:
    """Return the tier "host", or that of a folder."""
    try:
        return HostTier() if to == "host" else FolderTier(Path(to))
    except OSError as error:
        raise OffloadError(
            f"No file can be made in {to!r}, where tensors should wait for backward: {error}. Name "
            'a folder that exists, that may be written to and that is not full, or "host".'
        ) from error


class HostTier:
    """Host memory, for tensors on an accelerator: pinned, where that is possible."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def takes(self, tensor: Tensor) -> bool:
        """Whether `tensor` is on a device that copies aside."""
        return has_streams(tensor.device)

    def send(self, tensor: Tensor) -> _HostCopy:
        """Begin to copy `tensor`, of bytes and one dimension (See Rules 8 and 9)."""
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return _HostCopy(tensor, self._streams[device])


class _HostCopy:
    def __init__(self, tensor: Tensor, stream: torch.Stream) -> None:
        self._device, self._stream = tensor.device, stream
        self._held = torch.empty_like(tensor, device="cpu", pin_memory=pins_memory())
        self._event = self._copied(tensor, self._held)

    def _copied(self, source: Tensor, target: Tensor) -> torch.Event:
        """Copy after what was queued before; return when it is done."""
        self._stream.wait_stream(self._current())
        with torch.get_device_module(self._device).stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _current(self) -> torch.Stream:
        return torch.get_device_module(self._device).current_stream(self._device)

    def has_landed(self) -> bool:
        """Whether the tensor is no longer read."""
        return self._event.query()

    def land(self) -> None:
        """Let this stream wait until the tensor is no longer read."""
        # The memory is used again in the order of this stream, so the host need not wait.
        self._current().wait_event(self._event)

    def held(self) -> Tensor:
        """Return the bytes in host memory, when they are there."""
        self._event.synchronize()
        return self._held

    def fetch(self) -> _Arrival:
        """Begin to copy it back."""
        # Its memory may be in use by what was queued before, and is freed after this copy.
        tensor = torch.empty_like(self._held, device=self._device)
        tensor.record_stream(self._stream)
        event = self._copied(self._held, tensor)

        def wait() -> Tensor:
            self._current().wait_event(event)
            return tensor

        return wait


class FolderTier:
    """A file in a folder that threads write and read; from accelerators by way of host memory."""

    def __init__(self, folder: Path) -> None:
        if not hasattr(os, "pwritev"):
            raise OSError("this system has no os.pwritev, by which threads write to one file")
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - See Rule 10
        weakref.finalize(self, self._file.close)
        self.threads = ThreadPoolExecutor(_NUM_THREADS, "recoup-offload")
        self._end = 0  # of the file, once all of it is written
        self._host = HostTier()

    def takes(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in memory that threads can read, or can be copied there."""
        return not tensor.is_meta

    def send(self, tensor: Tensor) -> _FolderCopy:
        """Begin to write `tensor`, of bytes and one dimension (See Rule 8)."""
        place, self._end = self._end, self._end + tensor.numel()
        source = self._host.send(tensor).held if self._host.takes(tensor) else tensor.cpu
        written = self.threads.submit(self.move, os.pwritev, place, [source])
        return _FolderCopy(self, tensor, place, written)

    def move(
        self, call: Callable[..., int], place: int, source: list[Callable[[], Tensor]]
    ) -> None:
        """Write a tensor to its place in the file, or read it from there, by a system call.

        What returns the tensor is taken out of `source`, a list, or the thread would hold the
        tensor for a moment after its copy has landed.
        """
        tensor = source.pop()()
        memory = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())  # needs no NumPy
        rest = memoryview(memory).cast("B")
        while rest:
            num_moved = call(self._file.fileno(), [rest[:_MOST_AT_ONCE]], place)
            if not num_moved:
                raise OSError("the file with offloaded tensors is shorter than what was written")
            rest, place = rest[num_moved:], place + num_moved


class _FolderCopy:
    def __init__(self, tier: FolderTier, tensor: Tensor, place: int, written: Future[None]) -> None:
        self._tier, self._place, self._written = tier, place, written
        self._num_bytes, self._device = tensor.numel(), tensor.device

    def has_landed(self) -> bool:
        """Whether the tensor is no longer read."""
        return self._written.done()

    def land(self) -> BaseException | None:
        """Wait until the tensor is no longer read; return why it could not be copied."""
        return self._written.exception()

    def fetch(self) -> _Arrival:
        """Begin to copy it back; it must have landed."""
        is_pinned = has_streams(self._device) and pins_memory()
        held = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        read = self._tier.threads.submit(self._tier.move, os.preadv, self._place, [lambda: held])

        def wait() -> Tensor:
            read.result()
            return held.to(self._device, non_blocking=True)

        return wait

    def __del__(self) -> None:
        self._written.cancel()


Tier = HostTier | FolderTier
_Copy = _HostCopy | _FolderCopy


class Away:
    """A tensor that is away, as an object that autograd can hold in its place."""

    __slots__ = ("__weakref__", "_dtype", "_geometry", "_transfer")

    def __init__(self, transfer: _Transfer, tensor: Tensor) -> None:
        self._transfer = transfer
        self._dtype = tensor.dtype
        self._geometry = geometry_of(tensor)

    @never_compiled
    def get(self) -> Tensor:
        """Return the tensor; raise if it was changed in place before it had left."""
        found = self._transfer.traffic.take(self._transfer)
        whole = found.numel() // self._dtype.itemsize * self._dtype.itemsize
        return found[:whole].view(self._dtype).as_strided(*self._geometry)


class _Transfer:
    """A storage that is away, or on its way (See Rule 1)."""

    def __init__(self, traffic: Traffic, tensor: Tensor, name: str, place: int) -> None:
        self.traffic, self.name = traffic, name
        self.place = place  # in the order in which they were sent
        self.held: torch.UntypedStorage | None = tensor.untyped_storage()  # See Rule 2
        self.num_bytes = self.held.nbytes()
        self.copy: _Copy | None = None  # when it has been made
        self.lies_in(tensor)

    def lies_in(self, tensor: Tensor) -> None:
        """Remember that `tensor` has the value of the storage, while it is alive."""
        self._storage = weakref.ref(tensor.untyped_storage())
        self._version = version_of(tensor)
        self._witness = _in_counter_of(tensor, tensor.new_empty(0))

    @property
    def is_changed(self) -> bool:
        """Whether the tensor with the value was changed in place."""
        return version_of(self._witness) != self._version

    def is_alone(self) -> bool:
        """Whether no tensor has its memory any more, so that nothing can write to it."""
        return self.held is not None and _num_users(self.held._cdata) == 1

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it has the value of `tensor` (See Rule 1)."""
        is_same = self._storage() is tensor.untyped_storage() and not self.is_changed
        return is_same and _share_counter(self._witness, tensor)

    def here(self) -> Tensor | None:
        """Return the bytes if a tensor that is alive has them."""
        self.check()
        storage = self._storage()
        if storage is None or self.is_changed or storage.nbytes() != self.num_bytes:
            return None
        return _in_counter_of(self._witness, _flat(storage))

    def check(self) -> None:
        """Raise if the tensor was changed in place before it had left."""
        if self.held is not None and self.is_changed:
            raise ChangedError(
                f"{self.name} was changed in place before its copy had been made, so "
                "backward would see other values than forward did. Run backward before changing "
                "it, or change a clone."
            )


class Traffic:
    """The tensors that one forward sends away, and that its backward takes back.

    The bound on bytes in flight is twice the largest storage so far, if none is given.
    """

    def __init__(self, tier: Tier, in_flight_bytes: int | None = None, min_bytes: int = 1) -> None:
        self._tier = tier
        self._bound = in_flight_bytes
        self._min_bytes = min_bytes
        self._largest = 0
        self._lock = threading.RLock()
        self._sent: list[weakref.ref[_Transfer]] = []
        self._waiting: list[weakref.ref[_Transfer]] = []  # whose copies are to begin (See Rule 3)
        self._of_storage = weakref.WeakValueDictionary[int, _Transfer]()  # by its address
        self._leaving = weakref.WeakKeyDictionary[_Transfer, _Copy]()
        self._arriving = weakref.WeakKeyDictionary[_Transfer, _Arrival]()
        self._next = -1  # the last one that was sent of those that may be fetched (See Rule 5)
        self._task = -1
        self._failure: BaseException | None = None

    @never_compiled
    def send(self, tensor: Tensor, name: str, *, at_save: bool = False) -> Away | None:
        """Send a tensor away, at a save of autograd or else at once (Rule 3); None if it stays."""
        if not _can_move(tensor, self._min_bytes) or not self._tier.takes(tensor):
            return None
        with self._lock:
            if self._failure is not None:
                return None
            self._begin(is_due=_Transfer.is_alone)
            address = tensor.untyped_storage().data_ptr()
            transfer = self._of_storage.get(address)
            if transfer is None or not transfer.is_of(tensor):
                transfer = _Transfer(self, tensor, name, len(self._sent))
                self._next = len(self._sent)
                self._sent.append(weakref.ref(transfer))
                self._waiting.append(self._sent[-1])
                self._of_storage[address] = transfer
                if not at_save:
                    self._begin()
            return Away(transfer, tensor)

    @never_compiled
    def take(self, transfer: _Transfer) -> Tensor:
        """Return the bytes of a transfer, and let those before it come back (See Rule 5)."""
        with self._lock:
            if backward_id() not in (-1, self._task):
                self._task = backward_id()
                when_backward_ends(self._forget_arrivals)
            found = transfer.here()
            if found is None:
                if transfer.copy is not None and transfer not in self._arriving:
                    self._arriving[transfer] = transfer.copy.fetch()
            elif transfer in self._leaving and self._leaving[transfer].has_landed():
                self._let_go(transfer)
            self._fetch_before(transfer)
            if found is None:
                found = self._arriving[transfer]()
                transfer.lies_in(found)
            self._arriving.pop(transfer, None)
            return found

    def raise_failure(self, where: str) -> None:
        """Let all that was sent leave; raise if something could not (See Rule 7)."""
        with self._lock:
            self._begin()
            for copy in list(self._leaving.values()):
                if copy.has_landed():
                    self._failure = self._failure or copy.land()
        if self._failure is not None:
            raise OffloadError(
                f"Tensors could not be written to {where}: {self._failure}. What could not be "
                "written is still in memory, so that a backward of what forward has returned gives "
                "the right gradients. Make room there, name another folder, or let fewer tensors "
                "leave (`min_bytes`)."
            ) from self._failure

    def _begin(self, is_due: Callable[[_Transfer], bool] = bool) -> None:
        """Begin the copies that are due, each when it may be in flight (See Rules 3 and 4)."""
        waiting, self._waiting = self._waiting, []
        for ref in waiting:
            transfer = ref()
            if transfer is None:
                continue
            if not is_due(transfer):
                self._waiting.append(ref)
                continue
            self._largest = max(self._largest, transfer.num_bytes)
            for each in [each for each, copy in self._leaving.items() if copy.has_landed()]:
                self._let_go(each)
            for each in list(self._leaving):
                if self._excess(transfer.num_bytes) > 0:
                    self._let_go(each)
            if self._failure is None and transfer.held is not None:
                self._leaving[transfer] = self._tier.send(_flat(transfer.held))

    def _let_go(self, transfer: _Transfer) -> None:
        """Wait for a copy, and hold that instead of the storage (See Rules 2 and 7)."""
        copy = self._leaving.pop(transfer)
        error = copy.land()
        self._failure = self._failure or error
        if error is None and not transfer.is_changed:
            transfer.copy, transfer.held = copy, None

    def _fetch_before(self, transfer: _Transfer) -> None:
        self._next = min(self._next, transfer.place - 1)
        while self._next >= 0:
            before = self._sent[self._next]()
            if before is not None and before.copy is not None and before not in self._arriving:
                if self._excess(before.num_bytes) > 0:
                    return
                self._arriving[before] = before.copy.fetch()
            self._next -= 1

    def _forget_arrivals(self) -> None:
        """Forget what arrived and was not asked for, where a backward ends."""
        with self._lock:
            self._arriving.clear()
            self._next, self._task = len(self._sent), -1

    def _excess(self, num_bytes: int) -> int:
        """Return by how much `num_bytes` more in flight would exceed the bound (See Rule 4)."""
        in_flight = sum(transfer.num_bytes for transfer in (*self._leaving, *self._arriving))
        bound = 2 * self._largest if self._bound is None else self._bound
        return in_flight + num_bytes - bound


def _can_move(tensor: Tensor, min_bytes: int) -> bool:
    """Whether `tensor` may be away: it is an ordinary, large one, and nothing else keeps it."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return False  # a parameter is alive anyway; other subclasses have memory of their own
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return False  # the storage holds other numbers, or there is none
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
        return False
    if not base.numel() or base.storage_offset():
        return False
    last = sum((n - 1) * step for n, step in zip(base.shape, base.stride(), strict=True))
    # Its entries span the storage (See Rule 1).
    return min_bytes <= (last + 1) * base.itemsize == base.untyped_storage().nbytes()


def _share_counter(a: Tensor, b: Tensor) -> bool:
    """Whether a change of one tensor counts as one of the other: `.data` has its own counter."""
    version = version_of(a)
    if a.is_inference() or b.is_inference() or version_of(b) != version:
        return False
    set_versions((a,), (version + 1,))
    is_shared = version_of(b) == version + 1
    set_versions((a,), (version,))
    return is_shared


def _in_counter_of(tensor: Tensor, data: Tensor) -> Tensor:
    """Return `data` as a tensor that shares the counter of versions of `tensor`."""
    found = tensor.detach()
    found.data = data
    return found
