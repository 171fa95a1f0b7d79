"""The region: a call whose residuals are not kept but made again when autograd needs them.

NOTE [ Regions and slots ]

Rule 1. In the first run of a region a `Slot` takes the place of each tensor that autograd saves; a
        parameter is kept, since it is alive anyway. Autograd holds the slots, the slots hold the
        region, and the region holds its slots weakly: a residual that autograd has dropped is not
        made again.
Rule 2. Unpacking the first empty slot makes the region run again; the second run makes the same
        saves in the same order and fills the slots. The owner of the region does that, since it
        alone knows where the inputs come from.
Rule 3. A slot returns its value once and drops it, so that memory falls during backward as it does
        in a plain run. If it is unpacked again (retain_graph), the region runs again.
Rule 4. Values are detached: the graph of a second run is freed with it. For residuals that are
        needed during the first run see NOTE [ A region that takes gradients ].
Rule 5. Parameters must not be mistaken for inputs, or the saves would be counted differently in
        the two runs: an input that is a parameter enters the region as a view of itself.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.forward_gradients import FirstRun
from recoup._core.save_observer import Way, current
from recoup._core.saved_tensors import (
    Kept,
    Pair,
    pair_in_force,
    saving,
)
from recoup.errors import ReplayError

__all__ = ["Region", "Slot", "is_parameter", "num_nodes"]


class Slot:
    """The object that autograd saves in place of a tensor."""

    __slots__ = ("__weakref__", "address", "dtype", "region", "shape", "value", "version")

    def __init__(self, region: Region, tensor: Tensor) -> None:
        self.region = region
        self.value: Tensor | None = None
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        # A sparse tensor has no address of its own; autograd saves its parts separately.
        self.address = tensor.data_ptr() if tensor.layout is torch.strided else 0
        self.version = 0 if tensor.is_inference() else tensor._version


class Region:
    """One call whose residuals are not kept.

    Args:
        name: the name of the region in error messages.
        fill: called when an empty slot is unpacked; must run the call again under a `Filling`.
        lock: held while the region is filled; regions with one owner share one.
        way: the way that a census reports, "recompute" or "invert".
        first_run: knows whether slots keep their values until the first run ends (see `ended`).
    """

    __slots__ = (
        "__weakref__",
        "_beneath",
        "_fill",
        "_has_failed",
        "_lock",
        "first_run",
        "inputs",
        "marks",
        "name",
        "slots",
        "start",
        "way",
    )

    def __init__(
        self,
        name: str,
        fill: Callable[[], None],
        lock: threading.RLock,
        way: Way = "recompute",
        first_run: FirstRun | None = None,
    ) -> None:
        self.name = name
        self.way: Way = way
        self.inputs: tuple[Tensor, ...] | None = None  # set by the owner; freed with the last slot
        self._fill = fill
        self._lock = lock
        self.slots: list[weakref.ref[Slot]] = []
        self.marks: list[int] = []  # of each save; see Rule 2 in `second_run`
        self.start = 0  # the number of graph nodes before the first run
        self._has_failed = False
        self.first_run = first_run  # None once it has ended
        self._beneath: Pair | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether autograd still holds any slot."""
        return any(ref() is not None for ref in self.slots)

    def ended(self, *, is_whole: bool) -> None:
        """End the first run; it is whole unless an exception ended it."""
        self._has_failed = not is_whole
        if self.first_run is not None and self.first_run.keeps:
            for ref in self.slots:
                slot = ref()
                if slot is not None:
                    slot.value = None
        self.first_run = None

    def recording(self) -> _Recording:
        """Return a context for the first run, in which residuals become slots (See Rule 1)."""
        return _Recording(self)

    @never_compiled
    def _pack(self, tensor: Tensor) -> Slot | Kept:
        if is_parameter(tensor):
            return Kept(tensor, f"A parameter that {self.name} uses", self._beneath)
        slot = Slot(self, tensor)
        if self.first_run is not None and self.first_run.keeps:
            slot.value = tensor.detach()
        self.slots.append(weakref.ref(slot))
        self.marks.append(2 * (num_nodes() - self.start) + tensor.requires_grad)
        if current.observer is not None:
            current.observer.saved(tensor, slot, self.way)
        return slot


# Returns the number of graph nodes that this thread has made.
_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - torch's stubs do not know it
num_nodes: Callable[[], int] = _autograd._get_sequence_nr


def is_parameter(tensor: Tensor) -> bool:
    """Whether `tensor` is an instance of `nn.Parameter`."""
    # isinstance would call a metaclass, in Python, for every plain tensor.
    return type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)


def _beneath_ours(pair: Pair | None) -> Pair | None:
    """Return the pair beneath all regions around, which pass other tensors on untouched."""
    if pair is not None and pair[1] is _unpack:
        return cast("Region", cast("MethodType", pair[0]).__self__)._beneath
    return pair


class _Recording(saving):
    __slots__ = ("_region",)

    def __init__(self, region: Region) -> None:
        super().__init__(region._pack, _unpack)
        self._region = region

    def __enter__(self) -> None:
        region = self._region
        region._beneath = _beneath_ours(pair_in_force())
        super().__enter__()
        region.start = num_nodes()


@never_compiled
def _unpack(packed: Slot | Kept) -> Tensor:
    if isinstance(packed, Kept):
        return packed.get()
    region = packed.region
    with region._lock:
        if region.first_run is not None:
            region.first_run.asked(region.name)
            if packed.value is not None:
                return packed.value
        if packed.value is None:
            if region._has_failed:
                raise ReplayError(
                    f"{region.name} ended with an exception, so it cannot be run again for what "
                    "it left. Call it again."
                )
            region._fill()
        value, packed.value = packed.value, None  # See Rule 3
    if value is None:
        raise ReplayError(
            f"Running {region.name} again did not make a value of shape {tuple(packed.shape)} that "
            "the first run saved."
        )
    return value
