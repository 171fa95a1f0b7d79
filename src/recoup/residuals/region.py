"""A region replays: a call whose residuals are not kept, but made again when asked for.

NOTE [ Regions and slots ]

Rule 1. While a region runs first, whatever autograd would save becomes a `Slot`; a parameter is
        kept, since it is alive anyway. Autograd holds the slots, the slots hold the region, and
        the region knows its slots weakly: what nothing can ask for any more is not made again.
Rule 2. The first slot that is asked for makes the region run again; the second run meets the
        same saves in the same order and fills the slots. The owner of the region does that,
        since it alone knows where the inputs come from.
Rule 3. A slot hands its value out once and forgets it, so that memory falls as backward
        proceeds as it does in a plain run. Asked again (retain_graph), the region runs again.
Rule 4. Values are detached: the graph of a second run dies with it.
Rule 5. A second run whose output nobody needs stops at the last slot that can still be asked for.
        An exception stops it, which names the region that it is meant for. It is an `Exception`:
        hooks of modules that are always called (FSDP2's) are called for no other. Code that
        catches it is stopped at its next save, or when it ends.
        Its saves are not counted to the end then. So it stops only if each of them came after as
        many nodes of the graph as in the first run, and wants a gradient if that one did. A run
        for which this does not hold may be right all the same (autocast keeps casts in a first run
        only), and goes on to its end.
Rule 6. Parameters may not be mistaken for inputs, or the saves would be counted differently in
        the two runs: an input that is a parameter enters the region as a view of itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup.errors import ChangedError, ReplayError
from recoup.residuals.compiler import never_compiled
from recoup.residuals.hooks import (
    Kept,
    Pair,
    pair_in_force,
    saving,
    set_grad_enabled,
    storage_of,
    version_of,
)
from recoup.residuals.listening import Way, here

__all__ = ["Filled", "Region", "Slot", "Untaped", "num_nodes"]


class Filled(Exception):  # noqa: N818 - it is no error
    """Ends a second run that has filled its slots (See Rule 5)."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.name)
        self.region = region


class Slot:
    """What autograd holds in the place of a tensor."""

    __slots__ = ("__weakref__", "address", "dtype", "region", "shape", "value", "version")

    def __init__(self, region: Region, tensor: Tensor) -> None:
        self.region = region
        self.value: Tensor | None = None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        # A sparse tensor has no address of its own; what it is made of is saved by itself.
        self.address = tensor.data_ptr() if tensor.layout is torch.strided else 0
        self.version = 0 if tensor.is_inference() else tensor._version


class Region:
    """One call whose residuals are not kept.

    Args:
        name: what errors call it.
        fill: called when a slot is asked for and empty; must run the call again under `filling`.
        lock: taken while the region is filled; regions with one owner share one.
        way: what a census calls it, "recompute" or "invert".
    """

    __slots__ = (
        "__weakref__",
        "_beneath",
        "_fill",
        "_is_recorded",
        "_lock",
        "_marks",
        "_slots",
        "_start",
        "inputs",
        "name",
        "way",
    )

    def __init__(
        self, name: str, fill: Callable[[], None], lock: threading.RLock, way: Way = "recompute"
    ) -> None:
        self.name = name
        self.way: Way = way
        self.inputs: tuple[Tensor, ...] | None = None  # the owner's: it goes with the last slot
        self._fill = fill
        self._lock = lock
        self._slots: list[weakref.ref[Slot]] = []
        self._marks: list[int] = []  # of each save (See Rule 5)
        self._start = 0
        self._is_recorded = False
        self._beneath: Pair | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether any slot can still be asked for."""
        return any(ref() is not None for ref in self._slots)

    def recording(self) -> _Recording:
        """Around the first run: residuals become slots (See Rule 1)."""
        return _Recording(self)

    def filling(self, inputs: Iterable[Tensor], *, stops: bool = False) -> _Filling:
        """Around a second run, given `inputs`: fill the slots (See Rule 2).

        If it `stops`, it ends with `Filled` where the last slot is filled (See Rule 5).
        """
        return _Filling(self, inputs, stops=stops)

    @never_compiled
    def _pack(self, tensor: Tensor) -> Slot | Kept:
        if _is_parameter(tensor):
            return Kept(tensor, f"A parameter that {self.name} uses", self._beneath)
        slot = Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        self._marks.append(2 * (num_nodes() - self._start) + tensor.requires_grad)
        if here.listener is not None:
            here.listener.told(tensor, slot, self.way)
        return slot


# Elements of a residual. To raise an exception takes 15 microseconds; where everything is smaller
# than this, the operators that are left take less.
_WORTH_A_STOP = 4096


def _last_worth_a_stop(slots: list[weakref.ref[Slot]]) -> int:
    """Return the place of the last slot that can be asked for; -1 if a stop is not worth it."""
    last = -1
    for place in range(len(slots) - 1, -1, -1):
        slot = slots[place]()
        if slot is not None:
            last = max(last, place)
            if slot.shape.numel() >= _WORTH_A_STOP:
                return last
    return -1


# How many nodes of the graph this thread has made.
_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - torch's stubs do not know it
num_nodes: Callable[[], int] = _autograd._get_sequence_nr


def _is_parameter(tensor: Tensor) -> bool:
    # isinstance asks a metaclass, in Python, for each of the plain tensors that come by.
    return type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)


def _beneath_ours(pair: Pair | None) -> Pair | None:
    """Skip the regions around: what is not ours goes through all of them untouched."""
    if pair is not None and pair[1] is _unpack:
        return cast("Region", cast("MethodType", pair[0]).__self__)._beneath
    return pair


class _Recording:
    __slots__ = ("_hooks", "_region")

    def __init__(self, region: Region) -> None:
        self._region = region
        self._hooks = saving(region._pack, _unpack)

    def __enter__(self) -> None:
        region = self._region
        region._beneath = _beneath_ours(pair_in_force())
        self._hooks.__enter__()
        region._start = num_nodes()

    def __exit__(self, kind: object, *_: object) -> None:
        self._hooks.__exit__()
        self._region._is_recorded = kind is None


class _Filling:
    __slots__ = (
        "_before",
        "_has_stopped",
        "_hooks",
        "_inputs",
        "_last",
        "_name",
        "_place",
        "_region",
        "_slots",
        "_start",
    )

    def __init__(self, region: Region, inputs: Iterable[Tensor], *, stops: bool) -> None:
        self._region = region
        self._slots = region._slots
        self._last = -1
        if stops:
            self._last = _last_worth_a_stop(self._slots)
        self._has_stopped = False
        self._name = region.name
        self._inputs = inputs
        self._place = 0
        self._start = 0
        self._hooks: saving | None = None
        self._before = False

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(True)
        self._hooks = saving(self.pack, _itself)
        self._hooks.__enter__()
        self._start = num_nodes()

    def __exit__(self, kind: object, *_: object) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None  # it holds a method of ours: a reference cycle
        set_grad_enabled(self._before)
        if kind is None:
            if self._has_stopped:
                raise Filled(self._region)
            self._check_count()

    @property
    def stops(self) -> bool:
        """Whether the run may end with `Filled`."""
        return self._last >= 0

    @never_compiled
    def pack(self, tensor: Tensor) -> Tensor:
        value = tensor.detach()  # See Rule 4
        if _is_parameter(tensor):
            return value
        place = self._place
        self._place = place + 1
        # One save too many is counted, and reported when the run has ended.
        slot = self._slots[place]() if place < len(self._slots) else None
        if slot is not None and not self._has_stopped:
            self._check(slot, tensor)
            slot.value = value
        if self._last >= 0:
            self._stop_at_last(place, 2 * (num_nodes() - self._start) + tensor.requires_grad)
        return value

    def _stop_at_last(self, place: int, mark: int) -> None:
        """See Rule 5."""
        if not self._has_stopped:
            if self._region._marks[place] != mark:
                self._last = -1
                return
            self._has_stopped = place == self._last
        if self._has_stopped:
            raise Filled(self._region)

    def _check(self, slot: Slot, tensor: Tensor) -> None:
        if slot.shape != tensor.shape or slot.dtype is not tensor.dtype:
            raise ReplayError(
                f"Running {self._name} again made a {tensor.dtype} of shape {tuple(tensor.shape)} "
                f"where the first run made a {slot.dtype} of shape {tuple(slot.shape)}. A region "
                "must do the same when it runs again: look for outside state that it reads."
            )
        if slot.version == version_of(tensor) or slot.address == 0:
            return
        if slot.address == tensor.data_ptr() and not self._is_input(tensor):
            raise ChangedError(
                f"A tensor of shape {tuple(tensor.shape)} that {self._name} reads from outside was "
                "changed in place between forward and backward. Pass a clone, or change it later."
            )

    def _is_input(self, tensor: Tensor) -> bool:
        return any(storage_of(tensor) == storage_of(value) for value in self._inputs)

    def _check_count(self) -> None:
        if self._place != len(self._slots):
            raise ReplayError(
                f"Running {self._name} again saved {self._place} values where the first run saved "
                f"{len(self._slots)}. A region must do the same when it runs again: look for "
                "outside state that it reads, such as a counter or a cache."
            )


class Untaped:
    """Around a second run that is not to be reversed: with a graph, and nothing kept in it."""

    __slots__ = ("_before", "_hooks")

    def __init__(self) -> None:
        self._before = torch.is_grad_enabled()
        self._hooks = saving(_nothing, _itself)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(True)
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()
        set_grad_enabled(self._before)


@never_compiled
def _nothing(tensor: Tensor) -> None:
    del tensor


@never_compiled
def _unpack(packed: Slot | Kept) -> Tensor:
    if isinstance(packed, Kept):
        return packed.get()
    region = packed.region
    with region._lock:
        if packed.value is None:
            if not region._is_recorded:
                raise ReplayError(
                    f"{region.name} asked for its own residuals while it ran: a backward or "
                    "autograd.grad inside a region whose residuals are not kept. Keep them "
                    '(memory="linear"), or take the gradient outside.'
                )
            region._fill()
        value, packed.value = packed.value, None  # See Rule 3
    if value is None:
        raise ReplayError(
            f"Running {region.name} again did not make a value of shape {tuple(packed.shape)} that "
            "the first run saved."
        )
    return value


def _itself(packed: Tensor) -> Tensor:
    return packed
