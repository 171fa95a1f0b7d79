"""Offloading: tensors that wait in another memory, copied behind the computation.

NOTE [ Tensors that are away ]

Rule 1. A storage moves once, however many tensors look at it; each slot knows how its tensor does.
        So what is away is what autograd would have kept. The tensors must share one counter of
        versions: parts that autograd takes for tensors of their own (of `unsafe_chunk`, as in
        recurrent kernels) are written to without a trace in the others, so they stay.
Rule 2. Until its copy has landed a tensor stays, and its version is compared then. If it was
        changed meanwhile, the copy may have either value: asking for it is an error, as it is
        where autograd keeps the tensor. What is changed later does not reach the copy.
Rule 3. Bytes in flight are those of tensors that are leaving, and of tensors that arrive, or have
        arrived, before backward asks for them. Where a tensor would exceed the bound, forward
        waits for those that left before it; backward asks for one at a time.
Rule 4. Backward asks in the reverse order of forward. When it takes one tensor, those that were
        sent before it begin to come back, as far as the bound allows. What was sent last is still
        here then: only a tensor that is sent, or backward asking for it, makes another one go.
Rule 5. Autograd holds the slots, a slot what is away, that its traffic and its copy. The traffic
        holds nothing that is away, so all of it goes with the slots.
Rule 6. If a tensor cannot be copied (the disk is full), it stays where it is, and so does every
        later one; the error is raised where forward ends, and backward would still work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.memory_layout import Geometry, geometry_of
from recoup._core.restoring import new_lock
from recoup._core.saved_tensors import backward_id, set_versions, version_of, when_backward_ends
from recoup._core.tiers import Arrival, Copy, Tier, flat
from recoup.errors import ChangedError, OffloadError

__all__ = ["Away", "Traffic", "can_move"]


def can_move(tensor: Tensor) -> bool:
    """Whether `tensor` may be away: it is an ordinary tensor, and nothing else keeps it."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return False  # a parameter is alive anyway; other subclasses have memory of their own
    if tensor.is_conj() or tensor.is_neg():
        return False  # the storage holds other numbers
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
        return False
    return _covers_storage(base)  # See Rule 1


def _covers_storage(tensor: Tensor) -> bool:
    """Whether the entries of `tensor` span its storage."""
    if not tensor.numel() or tensor.storage_offset():
        return False
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize == tensor.untyped_storage().nbytes()


def _share_counter(a: Tensor, b: Tensor) -> bool:
    """Whether a change of one tensor counts as one of the other: `.data` has its own counter."""
    version = version_of(a)
    if a.is_inference() or b.is_inference() or version_of(b) != version:
        return False
    set_versions((a,), (version + 1,))
    try:
        return version_of(b) == version + 1
    finally:
        set_versions((a,), (version,))


class Away:
    """A tensor that is away, as an object that autograd can hold in its place.

    Args:
        parcel: its storage.
        tensor: the tensor, whose sizes and strides are recorded.
    """

    __slots__ = ("__weakref__", "_dtype", "_geometry", "_parcel")

    def __init__(self, parcel: _Parcel, tensor: Tensor) -> None:
        self._parcel = parcel
        self._dtype: torch.dtype = tensor.dtype
        self._geometry: Geometry = geometry_of(tensor)

    @never_compiled
    def get(self) -> Tensor:
        """Return the tensor; raise if it was changed in place before it had left."""
        found = self._parcel.traffic.take(self._parcel)
        whole = found.numel() // self._dtype.itemsize * self._dtype.itemsize
        return found[:whole].view(self._dtype).as_strided(*self._geometry)

    def check(self, when: str) -> None:
        """Raise if the tensor was changed in place before it had left."""
        self._parcel.check(when)


class _Parcel:
    """A storage that is away, or on its way (See Rule 1)."""

    __slots__ = (
        "__weakref__",
        "arrival",
        "back",
        "copy",
        "is_changed",
        "is_shared",
        "name",
        "num_bytes",
        "place",
        "tensor",
        "traffic",
        "version",
        "whole",
        "witness_back",
        "witness_sent",
    )

    def __init__(self, traffic: Traffic, tensor: Tensor, name: str) -> None:
        self.traffic = traffic
        self.name = name
        self.tensor: Tensor | None = tensor.detach()  # shares the version counter (See Rule 2)
        self.version = version_of(tensor)
        self.is_changed = False
        self.witness_sent = tensor.detach()  # shares the counter, and has no memory
        self.witness_sent.data = tensor.new_empty(0)
        self.whole: Tensor | None = flat(tensor.untyped_storage())
        self.num_bytes = self.whole.numel()
        self.copy: Copy | None = None  # None where it could not be copied (See Rule 6)
        self.arrival: Arrival | None = None
        self.is_shared = False  # whether several slots look at it
        self.back: weakref.ref[torch.UntypedStorage] | None = None  # the last arrival, if in use
        self.witness_back: Tensor | None = None  # shares the version of that one, and has no memory
        self.place = 0  # in the order in which they were sent

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the copy has the value of a tensor with the same storage (See Rule 1)."""
        is_same = version_of(tensor) == self.version == version_of(self.witness_sent)
        return is_same and _share_counter(self.witness_sent, tensor)

    def leave(self) -> None:
        """Let go of the memory, since the copy has landed (See Rule 2)."""
        self.is_changed = self._is_changed_now()
        self.tensor = self.whole = None

    def stay(self) -> None:
        """Stay where it is, for good (See Rule 6)."""
        self.copy = None

    def here(self) -> Tensor | None:
        """Return the bytes if they are still here, or here again."""
        self.check("between forward and backward")
        if self.whole is not None:
            return self.whole
        storage = None if self.back is None else self.back()
        if storage is None or self.witness_back is None or self.witness_back._version:
            return None  # nobody uses it, or somebody has changed it in place
        return flat(storage)

    def arrived(self, found: Tensor) -> None:
        """Remember what has arrived, for other slots that look at it."""
        if self.is_shared:
            self.back = weakref.ref(found.untyped_storage())
            self.witness_back = found.detach()
            self.witness_back.data = found.new_empty(0)

    def check(self, when: str) -> None:
        """Raise if the tensor was changed in place before it had left."""
        if self.is_changed or self._is_changed_now():
            raise ChangedError(
                f"{self.name} was changed in place {when}, before its copy had been made, so "
                "backward would see other values than forward did. Run backward before changing "
                "it, or change a clone."
            )

    def _is_changed_now(self) -> bool:
        return self.tensor is not None and version_of(self.tensor) != self.version


class Traffic:
    """The tensors that one forward sends away, and that its backward takes back.

    Args:
        tier: where they wait.
        in_flight_bytes: the bound on bytes in flight; None for twice the largest storage so far.
    """

    def __init__(self, tier: Tier, in_flight_bytes: int | None = None) -> None:
        self._tier = tier
        self._bound = in_flight_bytes
        self._largest = 0
        self._lock = new_lock()
        self._sent: list[weakref.ref[_Parcel]] = []
        self._leaving: list[weakref.ref[_Parcel]] = []
        self._arriving: list[weakref.ref[_Parcel]] = []
        # By the storage, which is the same object for as long as it is alive.
        self._of_storage = weakref.WeakKeyDictionary[torch.UntypedStorage, weakref.ref[_Parcel]]()
        self._next = -1  # the last one that was sent of those that may be fetched (See Rule 4)
        self._asked = -1  # the one that backward asked for last
        self._task = -1
        self.failure: OSError | None = None

    @property
    def in_flight_bytes(self) -> int:
        """The bytes in flight now (See Rule 3)."""
        leaving = sum(parcel.num_bytes for parcel in _alive(self._leaving))
        return leaving + sum(parcel.num_bytes for parcel in self._arriving_now())

    @never_compiled
    def send(self, tensor: Tensor, name: str) -> Away | None:
        """Send a tensor away; None if it has to stay."""
        if self.failure is not None or not can_move(tensor) or not self._tier.takes(tensor):
            return None
        with self._lock:
            storage = tensor.untyped_storage()
            known = self._of_storage.get(storage)
            parcel = None if known is None else known()
            if parcel is None or not parcel.is_of(tensor):
                parcel = _Parcel(self, tensor, name)
                self._make_room(parcel.num_bytes)
                if self.failure is not None:
                    return None
                parcel.copy = self._tier.send(parcel.whole)  # pyright: ignore[reportArgumentType]
                parcel.place = len(self._sent)
                ref = weakref.ref(parcel)
                self._sent.append(ref)
                self._leaving.append(ref)
                self._of_storage[storage] = ref
            else:
                parcel.is_shared = True
            return Away(parcel, tensor)

    @never_compiled
    def take(self, parcel: _Parcel) -> Tensor:
        """Return the bytes of a parcel, and let those before it come back (See Rule 4)."""
        with self._lock:
            self._end_with_backward()
            found = parcel.here()
            if found is not None and parcel.tensor is not None:
                self._release(lambda each: each is parcel)
            if found is None:
                parcel.arrival = arrival = parcel.arrival or self._fetched(parcel)
                self._fetch_before(parcel)
                found = arrival.wait()
                parcel.arrival = None
                parcel.arrived(found)
            else:
                self._fetch_before(parcel)
            return found

    def raise_failure(self, where: str) -> None:
        """Raise if a tensor could not be sent away (See Rule 6)."""
        with self._lock:
            for ref in self._leaving:
                parcel = ref()
                if parcel is not None and parcel.copy is not None and parcel.copy.has_landed():
                    self._try_to_land(parcel)
        if self.failure is not None:
            raise OffloadError(
                f"Tensors could not be written to {where}: {self.failure}. What could not be "
                "written is still in memory, so that a backward of what forward has returned gives "
                "the right gradients. Make room there, name another folder, or let fewer tensors "
                "leave (`min_bytes`)."
            ) from self.failure

    # -- leaving ---------------------------------------------------------------------------

    def _make_room(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more may be in flight (See Rule 3)."""
        self._largest = max(self._largest, num_bytes)
        self._release()
        while self._leaving and self.in_flight_bytes + num_bytes > self._limit:
            self._land(self._leaving.pop(0)())

    def _release(self, may_leave: Callable[[_Parcel], bool] = lambda parcel: True) -> None:
        """Let go of tensors whose copy has landed."""
        still: list[weakref.ref[_Parcel]] = []
        for ref in self._leaving:
            parcel = ref()
            if parcel is None or parcel.copy is None:
                continue
            if may_leave(parcel) and parcel.copy.has_landed():
                self._land(parcel)
            else:
                still.append(ref)
        self._leaving = still

    def _land(self, parcel: _Parcel | None) -> None:
        if parcel is not None and self._try_to_land(parcel):
            parcel.leave()

    def _try_to_land(self, parcel: _Parcel) -> bool:
        """Wait for the copy of a parcel; return whether there is one (See Rule 6)."""
        if parcel.copy is None:
            return False
        try:
            parcel.copy.land()
        except OSError as error:
            self.failure = self.failure or error
            parcel.stay()
            return False
        return True

    # -- arriving --------------------------------------------------------------------------

    def _fetch_before(self, parcel: _Parcel) -> None:
        if parcel.place > self._asked or self._next >= parcel.place:
            self._next = parcel.place - 1
        self._asked = parcel.place
        while self._next >= 0:
            before = self._sent[self._next]()
            if before is not None and before.tensor is None and before.arrival is None:
                if self.in_flight_bytes + before.num_bytes > self._limit:
                    return
                before.arrival = self._fetched(before)
            self._next -= 1

    def _fetched(self, parcel: _Parcel) -> Arrival:
        self._arriving = [ref for ref in self._arriving if _is_arriving(ref())]
        self._arriving.append(weakref.ref(parcel))
        return cast("Copy", parcel.copy).fetch()  # what has no copy is still here

    def _end_with_backward(self) -> None:
        """Forget what arrived and was not asked for when this backward ends."""
        task = backward_id()
        if task not in (-1, self._task):
            self._task = task
            when_backward_ends(self.forget_arrivals)

    def forget_arrivals(self) -> None:
        """Forget what arrived and was not asked for."""
        with self._lock:
            for parcel in self._arriving_now():
                parcel.arrival = None
            self._arriving.clear()
            self._asked = self._task = -1

    # -- bytes -----------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return 2 * self._largest if self._bound is None else self._bound

    def _arriving_now(self) -> Iterator[_Parcel]:
        return filter(_is_arriving, _alive(self._arriving))


def _alive(parcels: list[weakref.ref[_Parcel]]) -> Iterator[_Parcel]:
    for ref in parcels:
        parcel = ref()
        if parcel is not None:
            yield parcel


def _is_arriving(parcel: _Parcel | None) -> bool:
    return parcel is not None and parcel.arrival is not None
