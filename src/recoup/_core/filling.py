"""A second run of a region, which fills its slots.

NOTE [ Where a second run stops ]

Rule 1. A second run whose output is not needed stops at the last slot that autograd still holds.
        It is stopped by an exception that names its region. This is an `Exception`, since module
        hooks that are always called (FSDP2's) are not called for any other. Code that catches it
        is stopped at its next save, or when the run ends.
Rule 2. The total number of its saves is then unknown. So it stops only if each save came after as
        many nodes of the graph as in the first run, and requires a gradient if that one did. A run
        for which this does not hold may still be right (autocast caches casts in a first run
        only), and goes on to its end. Of a tensor without history the second half is not asked:
        an input is a leaf in a second run, also if it had a history in the first, and a region
        within keeps its input without that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.region import Region, Slot
from recoup._core.saved_tensors import num_nodes, saving, set_grad_enabled, storage_address
from recoup.errors import ChangedError, ReplayError

__all__ = ["Filled", "Filling"]


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
    """

    __slots__ = (
        "_before",
        "_has_stopped",
        "_inputs",
        "_num_saves",
        "_region",
        "_start",
        "last",
    )

    def __init__(self, region: Region, inputs: Iterable[Tensor], *, stops: bool = False) -> None:
        super().__init__(_itself, _itself)
        self._region = region
        self._inputs = inputs
        self.last = _last_alive(region.slots) if stops and region.is_worth_a_stop else -1
        self._has_stopped = False
        self._num_saves = 0
        self._start = 0
        self._before: bool | None = None

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        self._pack = self._fill
        super().__enter__()
        set_grad_enabled(True)
        self._start = num_nodes()

    def restore(self) -> None:
        self._restore_own()
        super().restore()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        self._restore_own()
        is_whole = not self._has_stopped and self._num_saves == len(self._region.slots)
        if kind is not None or is_whole:
            super().leave(kind, value, traceback)
            return
        super().leave(Filled, None, None)
        raise Filled(self._region) if self._has_stopped else self._miscounted()

    def _restore_own(self) -> None:
        if self._before is not None:
            set_grad_enabled(self._before)
            self._before = None
        self._pack = _itself  # or this object would hold itself: a reference cycle

    def num_saves(self) -> int:
        """Return how many residuals the run has saved so far."""
        return self._num_saves

    def put(self, values: Iterable[Tensor]) -> None:
        """Fill the slots with `values`, where nothing runs that would save them."""
        for value in values:
            self._fill(value)

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
            if slot.expected is not None and not torch.equal(slot.expected, tensor):
                raise self._other_decision(tensor)
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
            "state that it reads, or for a `requires_grad` that has changed since."
        )

    def _other_decision(self, tensor: Tensor) -> ReplayError:
        return ReplayError(
            f"Running {self._region.name} again decided otherwise: it made another {tensor.dtype} "
            f"of shape {tuple(tensor.shape)}. It had decided nothing in earlier steps, so its "
            "decisions were not kept. They will be kept from the next step on: repeat this step."
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


def _last_alive(slots: list[weakref.ref[Slot]]) -> int:
    """Return the place of the last slot that is alive; -1 if none is."""
    for place in range(len(slots) - 1, -1, -1):
        if slots[place]() is not None:
            return place
    return -1


def _itself(tensor: Tensor) -> Tensor:
    return tensor
