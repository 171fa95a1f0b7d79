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
        in a plain run, also with retain_graph. If it is unpacked again, the region runs again. If
        that happens in one backward (a function that reads `ctx.saved_tensors` twice), the slots
        of the region keep their values from then on, until another region does the same or that
        backward ends.
Rule 4. Values are detached: the graph of a second run is freed with it. For residuals that are
        needed during the first run see NOTE [ A region that takes gradients ].
Rule 5. Parameters must not be mistaken for inputs, or the saves would be counted differently in
        the two runs: an input that is a parameter enters the region as a view of itself.
Rule 6. Autograd does not check the version of a tensor that went through hooks, so a slot does.

NOTE [ Where a second run stops ]

Rule 1. A second run whose output is not needed stops at the last slot that autograd still holds.
        It is stopped by an exception that names its region. This is an `Exception`, since module
        hooks that are always called (FSDP2's) are not called for any other. Code that catches it
        is stopped at its next save, or when the run ends.
Rule 2. The total number of its saves is then unknown. So it stops only if each save came after as
        many nodes of the graph as in the first run, and requires a gradient if that one did. A run
        for which this does not hold may still be right (autocast caches casts in a first run
        only), and goes on to its end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.inner_gradients import FirstRun
from recoup._core.restoring import Restoring
from recoup._core.save_observer import Way, current
from recoup._core.saved_tensors import (
    Kept,
    Pair,
    backward_id,
    num_nodes,
    saving,
    set_grad_enabled,
    storage_address,
    version_of,
)
from recoup.errors import ChangedError, ReplayError

__all__ = ["Filled", "Filling", "Owner", "Region", "Slot"]

# Elements of a residual. Raising an exception takes 15 microseconds; where all residuals are
# smaller than this, the remaining operators take less.
_WORTH_A_STOP = 4096


class Owner(Protocol):
    """The object that runs regions again: it knows where their inputs come from."""

    @property
    def lock(self) -> threading.RLock:
        """The lock that is held while a region of this owner is filled."""
        ...

    def fill_slots(self, index: int) -> None:
        """Run region `index` again under a `Filling`."""
        ...


class Slot:
    """The object that autograd saves in place of a tensor."""

    __slots__ = (
        "__weakref__",
        "address",
        "dtype",
        "region",
        "shape",
        "task",
        "value",
        "value_version",
        "version",
    )

    def __init__(self, region: Region, tensor: Tensor) -> None:
        self.region = region
        self.value: Tensor | None = None
        self.value_version = 0
        self.task = -1  # the backward that took the value last
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        try:
            self.version = tensor._version
            self.address = tensor.data_ptr()
        except RuntimeError:  # an inference tensor has no version, a sparse one no address
            self.version = version_of(tensor)
            # Autograd saves the parts of a sparse tensor separately.
            self.address = tensor.data_ptr() if tensor.layout is torch.strided else 0

    def _changed(self) -> ChangedError:
        return ChangedError(
            f"A tensor of shape {tuple(self.shape)} that {self.region.name} saved for backward was "
            "changed in place by a later operator in it, so that its gradient would be wrong. Use "
            "an operator that is not in place (for an activation, inplace=False)."
        )

    @never_compiled
    def get(self) -> Tensor:
        """Return the residual, made again if it is not here (See Rule 2)."""
        region = self.region
        with region.owner.lock:
            if region.first_run.is_running:
                region.first_run.asked(region.name)
                if self.value is not None:
                    if self.value._version != self.value_version:
                        raise self._changed()
                    return self.value
            if self.value is None:
                if region.first_run.has_failed:
                    raise ReplayError(
                        f"{region.name} raised an exception in forward, so its residuals cannot be "
                        "recomputed. Call it again before backward."
                    )
                if self.task == backward_id() != -1:
                    region.keep_for_now()
                region.owner.fill_slots(region.index)
            value = self.value
            if value is not None and value._version != self.value_version:
                raise self._changed()  # See Rule 6
            task = backward_id()
            if region.keeps_in != task:  # See Rule 3
                self.value = None
                self.task = task
        if value is None:
            raise ReplayError(
                f"Running {region.name} again did not save a tensor of shape {tuple(self.shape)} "
                "that the first run saved. A region must do the same when it runs again: look for "
                "outside state that it reads, such as a counter or a cache."
            )
        return value


class Region:
    """One call whose residuals are not kept.

    Args:
        name: the name of the region in error messages.
        owner: runs the region again when an empty slot is unpacked.
        index: the number by which the owner knows the region.
        first_run: decides whether slots keep their values until the first run ends.
        way: the way that a census reports, "recompute" or "invert".
    """

    __slots__ = (
        "__weakref__",
        "_beneath",
        "first_run",
        "index",
        "inputs",
        "is_worth_a_stop",
        "keeps_in",
        "marks",
        "name",
        "owner",
        "slots",
        "start",
        "way",
    )

    def __init__(
        self, name: str, owner: Owner, index: int, first_run: FirstRun, way: Way = "recompute"
    ) -> None:
        self.name = name
        self.owner = owner
        self.index = index
        self.first_run = first_run
        self.way: Way = way
        self.slots: list[weakref.ref[Slot]] = []
        self.is_worth_a_stop = False  # whether any residual is large
        self.marks: list[int] = []  # of each save: NOTE [ Where a second run stops ], Rule 2
        self.inputs: tuple[Tensor, ...] | None = None  # of a later run; freed with the last slot
        self.start = 0  # the number of graph nodes before the first run
        self.keeps_in: int | None = None  # the backward in which slots keep their values
        self._beneath: Pair | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether autograd still holds any slot."""
        for ref in self.slots:  # noqa: SIM110 - without a generator, for speed
            if ref() is not None:
                return True
        return False

    def keep_for_now(self) -> None:
        """Let slots keep their values in the backward in progress (See Rule 3)."""
        before = _local.keeping
        if before is not None and before() is not self:
            _Release(before)()
        _local.keeping = weakref.ref(self)
        self.keeps_in = backward_id()
        torch.autograd.Variable._execution_engine.queue_callback(_Release(_local.keeping))

    def recording(self, around: Restoring | None = None) -> _Recording:
        """Return a context for the first run, in which residuals become slots (See Rule 1).

        Args:
            around: a context that is entered before it and left after it.
        """
        return _Recording(self, around)

    @never_compiled
    def pack(self, tensor: Tensor) -> Slot | Kept:
        """Return a slot for `tensor`, or `tensor` kept if it is a parameter."""
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
            return Kept(tensor, f"A parameter that {self.name} uses", self._beneath)
        slot = Slot(self, tensor)
        ref = weakref.ref(slot)
        if self.first_run.keeps:
            slot.value = tensor.detach()
            slot.value_version = tensor._version
            self.first_run.filled.append(ref)
        self.slots.append(ref)
        if tensor.numel() >= _WORTH_A_STOP:
            self.is_worth_a_stop = True
        self.marks.append(2 * (num_nodes() - self.start) + tensor.requires_grad)
        if current.observer is not None:
            current.observer.saved(tensor, slot, self.way)
        return slot


class _Local(threading.local):
    keeping: weakref.ref[Region] | None = None  # the last region whose slots keep their values


_local = _Local()


class _Release:
    """Lets the slots of a region drop their values; a callback at the end of a backward."""

    def __init__(self, region: weakref.ref[Region]) -> None:
        self._region = region

    def __call__(self) -> None:
        region = self._region()
        # Another thread that holds the lock is about to take a value.
        if region is None or not region.owner.lock.acquire(blocking=False):
            return
        try:
            region.keeps_in = None
            for ref in region.slots:
                slot = ref()
                if slot is not None:
                    slot.value = None
        finally:
            region.owner.lock.release()


# Each of these two enters the context around it by hand: a `with` statement for both is cheaper.


class _Recording(saving):
    __slots__ = ("_around", "_region")

    def __init__(self, region: Region, around: Restoring | None) -> None:
        super().__init__(region.pack)
        self._region = region
        self._around = around

    def __enter__(self) -> None:
        if self._around is not None:
            self._around.__enter__()
        super().__enter__()
        region = self._region
        region._beneath = pair = self._beneath
        if pair is not None:
            # A region around this one passes what is not its own to the pair beneath it.
            outer = getattr(pair[0], "__self__", None)
            if type(outer) is Region:
                region._beneath = outer._beneath
        region.start = num_nodes()

    def restore(self) -> None:
        super().restore()
        if self._around is not None:
            self._around.restore()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        super().leave(kind, value, traceback)
        if self._around is not None:
            self._around.leave(kind, value, traceback)


class Filled(Exception):  # noqa: N818 - it is no error
    """The exception that ends a second run which has filled its slots."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.name)
        self.region = region


class Filling(saving):
    """A context for a second run of a region, which fills the slots of the region.

    Args:
        region: the region.
        inputs: the inputs of the run.
        stops: whether the run may end with `Filled` when the last slot is filled; `last` is then
            the place of that slot, or -1 if a stop is not worth it.

    Attributes:
        around: a context that is entered before it and left after it.
    """

    __slots__ = (
        "_before",
        "_has_stopped",
        "_inputs",
        "_num_saves",
        "_region",
        "_start",
        "around",
        "last",
    )

    def __init__(self, region: Region, inputs: Iterable[Tensor], *, stops: bool = False) -> None:
        super().__init__(_itself, _itself)
        self._region = region
        self._inputs = inputs
        self.last = _last_worth_a_stop(region.slots) if stops and region.is_worth_a_stop else -1
        self._has_stopped = False
        self._num_saves = 0
        self._start = 0
        self._before: bool | None = None
        self.around: Restoring | None = None

    def __enter__(self) -> None:
        if self.around is not None:
            self.around.__enter__()
        self._before = torch.is_grad_enabled()
        self._pack = self._fill
        super().__enter__()
        set_grad_enabled(True)
        self._start = num_nodes()

    def restore(self) -> None:
        if self._before is not None:
            set_grad_enabled(self._before)
            self._before = None
        super().restore()
        self._pack = _itself  # or this object would hold itself: a reference cycle
        if self.around is not None:
            self.around.restore()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        super().leave(kind, value, traceback)
        if self._before is not None:
            set_grad_enabled(self._before)
            self._before = None
        self._pack = _itself
        try:
            if kind is None:
                if self._has_stopped:
                    raise Filled(self._region)
                if self._num_saves != len(self._region.slots):
                    raise self._miscounted()
        except Exception as error:
            if self.around is not None:
                self.around.leave(type(error), error, traceback)
            raise
        if self.around is not None:
            self.around.leave(kind, value, traceback)

    @never_compiled
    def _fill(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
            return tensor
        value = tensor.detach()  # the graph of a second run dies with it
        place = self._num_saves
        self._num_saves = place + 1
        slots = self._region.slots
        # A save too many is counted, and reported when the run has ended.
        slot = slots[place]() if place < len(slots) else None
        if slot is not None and not self._has_stopped:
            if slot.shape != tensor.shape or slot.dtype is not tensor.dtype:
                raise self._mismatch(slot, tensor)
            if slot.address and slot.address == tensor.data_ptr():
                version = 0 if tensor.is_inference() else tensor._version
                if slot.version != version and not self._is_input(tensor):
                    raise self._changed(tensor)
            slot.value = value
            slot.value_version = value._version
        if self.last >= 0:
            self._stop_at_last(place, tensor)
        return value

    def _stop_at_last(self, place: int, tensor: Tensor) -> None:
        """Stop the run at its last slot, if its saves match those of the first run."""
        if not self._has_stopped:
            mark = 2 * (num_nodes() - self._start) + tensor.requires_grad
            difference = self._region.marks[place] ^ mark
            # An input that is a leaf here had a history in the first run, and a region within
            # this one keeps its input without that.
            if difference > 1 or (difference and not tensor.is_leaf):
                self.last = -1
                return
            self._has_stopped = place == self.last
        if self._has_stopped:
            raise Filled(self._region)

    def _mismatch(self, slot: Slot, tensor: Tensor) -> ReplayError:
        return ReplayError(
            f"Running {self._region.name} again made a {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} where the first run made a {slot.dtype} of shape "
            f"{tuple(slot.shape)}. A region must do the same when it runs again: look for outside "
            "state that it reads."
        )

    def _changed(self, tensor: Tensor) -> ChangedError:
        return ChangedError(
            f"A tensor of shape {tuple(tensor.shape)} that {self._region.name} reads from outside "
            "was changed in place between forward and backward. Pass a clone, or change it later."
        )

    def _is_input(self, tensor: Tensor) -> bool:
        return any(storage_address(tensor) == storage_address(value) for value in self._inputs)

    def _miscounted(self) -> ReplayError:
        return ReplayError(
            f"Running {self._region.name} again saved {self._num_saves} values where the first "
            f"run saved {len(self._region.slots)}. A region must do the same when it runs "
            "again: look for outside state that it reads, such as a counter or a cache."
        )


def _last_worth_a_stop(slots: list[weakref.ref[Slot]]) -> int:
    """Return the place of the last slot that is alive; -1 if a stop is not worth it."""
    last = -1
    for place in range(len(slots) - 1, -1, -1):
        slot = slots[place]()
        if slot is not None:
            last = max(last, place)
            if slot.shape.numel() >= _WORTH_A_STOP:
                return last
    return -1


def _itself(tensor: Tensor) -> Tensor:
    return tensor
