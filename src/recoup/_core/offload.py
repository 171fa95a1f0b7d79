"""Offloading: tensors that wait in another memory, copied behind the computation.

NOTE [ Tensors that are away ]

Rule 1. A storage moves once, however many tensors look at it; each slot knows how its tensor does.
        So what is away is what autograd would have kept. The tensors must share one counter of
        versions. Parts that autograd takes for tensors of their own (of `unsafe_chunk`, as in
        recurrent kernels) are written to without a trace in the others, so that the storage would
        move once for each: they stay.
Rule 2. A storage is held until its copy has been made, and its version is compared then. If it was
        changed meanwhile, the copy may have either value: it stays, and asking for it is an error,
        as it is where autograd keeps the tensor. What is changed later does not reach the copy.
Rule 3. Autograd keeps memory, not values: what is written to it later unseen (by `rrelu`, which
        fills its noise after the save, or through `.data`, as solvers fill a buffer of stages) is
        what backward finds. So the copy of what autograd saves begins when nobody else has its
        memory any more, and could write to it: at the first save after that, or where forward ends.
Rule 4. Bytes in flight are those that are being copied, and those that are coming back, or have
        come back, before backward asks for them. Where a storage would exceed the bound, forward
        waits for those that left before it; backward asks for one at a time.
Rule 5. Backward asks in the reverse order of forward. When it takes one storage, those that were
        sent before it begin to come back, as far as the bound allows. What was sent last is still
        here then: only a storage that is sent, or backward asking for it, makes another one go.
Rule 6. Autograd holds the slots, a slot what is away, that its traffic and its copy. The traffic
        holds nothing that is away, so all of it goes with the slots.
Rule 7. If a storage cannot be copied (the disk is full), it stays where it is, and so does every
        later one; the error is raised where forward ends, and backward would still work.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.saved_tensors import (
    backward_id,
    set_versions,
    version_of,
    when_backward_ends,
)
from recoup._core.tensors import geometry_of
from recoup._core.tiers import Arrival, Copy, Tier, flat
from recoup.errors import ChangedError, OffloadError

_storages: Any = torch._C
_num_users: Callable[[int], int] = _storages._storage_Use_Count  # those in Python count as one


class Away:
    """A tensor that is away, as an object that autograd can hold in its place.

    Args:
        transfer: its storage.
        tensor: the tensor, whose sizes and strides are recorded.
    """

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
        self.traffic = traffic
        self.name = name
        self.place = place  # in the order in which they were sent
        self.held: torch.UntypedStorage | None = tensor.untyped_storage()  # See Rule 2
        self.num_bytes = self.held.nbytes()
        self.copy: Copy | None = None  # when it has been made
        self.lies_in(tensor)

    def lies_in(self, tensor: Tensor) -> None:
        """Remember that `tensor` has the value of the storage, for as long as it is alive."""
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
        return _in_counter_of(self._witness, flat(storage))

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

    Args:
        tier: where they wait.
        in_flight_bytes: the bound on bytes in flight; None for twice the largest storage so far.
        min_bytes: the least bytes of a storage that moves.
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
        self._leaving = weakref.WeakKeyDictionary[_Transfer, Copy]()
        self._arriving = weakref.WeakKeyDictionary[_Transfer, Arrival]()
        self._next = -1  # the last one that was sent of those that may be fetched (See Rule 5)
        self._task = -1
        self._failure: BaseException | None = None

    @never_compiled
    def send(self, tensor: Tensor, name: str, *, at_save: bool = False) -> Away | None:
        """Send a tensor away; None if it has to stay.

        Args:
            tensor: the tensor.
            name: its name in error messages.
            at_save: whether autograd saves it now (See Rule 3).
        """
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
                self._fetch(transfer)
                self._fetch_before(transfer)
                found = self._arriving[transfer]()
                transfer.lies_in(found)
            else:
                if transfer in self._leaving and self._leaving[transfer].has_landed():
                    self._let_go(transfer)
                self._fetch_before(transfer)
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

    # -- leaving ---------------------------------------------------------------------------

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
                self._leaving[transfer] = self._tier.send(flat(transfer.held))

    def _let_go(self, transfer: _Transfer) -> None:
        """Wait for the copy of a storage, and hold that instead (See Rules 2 and 7)."""
        copy = self._leaving.pop(transfer)
        error = copy.land()
        self._failure = self._failure or error
        if error is None and not transfer.is_changed:
            transfer.copy, transfer.held = copy, None

    # -- arriving --------------------------------------------------------------------------

    def _fetch(self, transfer: _Transfer) -> None:
        if transfer.copy is not None and transfer not in self._arriving:
            self._arriving[transfer] = transfer.copy.fetch()

    def _fetch_before(self, transfer: _Transfer) -> None:
        self._next = min(self._next, transfer.place - 1)
        while self._next >= 0:
            before = self._sent[self._next]()
            if before is not None and before.copy is not None and before not in self._arriving:
                if self._excess(before.num_bytes) > 0:
                    return
                self._fetch(before)
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
