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
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.inner_gradients import FirstRun
from recoup._core.kept_decisions import saves_integer
from recoup._core.restoring import Restoring
from recoup._core.save_observer import Way, current
from recoup._core.saved_tensors import (
    Kept,
    Pair,
    backward_id,
    num_nodes,
    saving,
    version_of,
)
from recoup.errors import ChangedError, ReplayError

__all__ = ["Owner", "Region", "Slot"]

# Elements of a residual. Raising an exception takes 15 microseconds; where all residuals are
# smaller than this, the remaining operators take less.
_WORTH_A_STOP = 4096
# The types of indices and masks. (Bytes are the workspace of a kernel, in part never written.)
_INTEGERS = frozenset((torch.int64, torch.int32, torch.bool))


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
        "expected",
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
        self.expected: Tensor | None = None  # what a second run must make: see `saves_integer`
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
        "input_versions",
        "inputs",
        "is_looked_at",
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
        self.is_looked_at = True  # whether the decisions of the first run are kept, or looked for
        self.is_worth_a_stop = False  # whether any residual is large
        self.marks: list[int] = []  # of each save, for `Filling` to compare
        self.inputs: tuple[Tensor, ...] | None = None  # of a later run; freed with the last slot
        self.input_versions: list[int] = []
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
        mark = 2 * (num_nodes() - self.start) + tensor.requires_grad
        self.marks.append(mark)
        if tensor.dtype in _INTEGERS:
            parts, is_looked_at = self.first_run.parts, self.is_looked_at
            if saves_integer(parts, mark, is_looked_at=is_looked_at):
                slot.expected = tensor.detach()
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


class _Recording(saving):
    __slots__ = ("_region",)

    def __init__(self, region: Region, around: Restoring | None) -> None:
        super().__init__(region.pack, around=around)
        self._region = region

    def __enter__(self) -> None:
        super().__enter__()
        region = self._region
        region._beneath = pair = self._beneath
        if pair is not None:
            # A region around this one passes what is not its own to the pair beneath it.
            outer = getattr(pair[0], "__self__", None)
            if type(outer) is Region:
                region._beneath = outer._beneath
        region.start = num_nodes()
