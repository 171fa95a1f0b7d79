"""The second runs of a region: one fills its slots, the other keeps nothing.

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

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from recoup._core.compile import never_compiled
from recoup._core.forward_gradients import FirstRun
from recoup._core.region import Region, Slot, is_parameter, num_nodes
from recoup._core.restoring import Restoring
from recoup._core.saved_tensors import saving, set_grad_enabled, storage_of, version_of
from recoup.errors import ChangedError, ReplayError

__all__ = ["Filled", "Filling", "Untaped"]


class Filled(Exception):  # noqa: N818 - it is no error
    """The exception that ends a second run which has filled its slots (See Rule 1)."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.name)
        self.region = region


# Elements of a residual. Raising an exception takes 15 microseconds; where all residuals are
# smaller than this, the remaining operators take less.
_WORTH_A_STOP = 4096


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


class Filling(Restoring):
    """A context for a second run of a region, which fills the slots of the region.

    Args:
        region: the region.
        inputs: the inputs of the run.
        stops: whether the run may end with `Filled` when the last slot is filled.
    """

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

    def __init__(self, region: Region, inputs: Iterable[Tensor], *, stops: bool = False) -> None:
        super().__init__()
        self._region = region
        self._slots = region.slots
        self._last = -1
        if stops:
            self._last = _last_worth_a_stop(self._slots)
        self._has_stopped = False
        self._name = region.name
        self._inputs = inputs
        self._place = 0
        self._start = 0
        self._hooks: saving | None = None
        self._before: bool | None = None

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        self._hooks = saving(self.pack, _itself)
        set_grad_enabled(True)
        self._hooks.__enter__()
        self._start = num_nodes()

    def restore(self) -> None:
        if self._before is not None:
            set_grad_enabled(self._before)
            self._before = None
        if self._hooks is not None:
            self._hooks.restore()
            self._hooks = None  # it holds a method of ours: a reference cycle

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        self.restore()
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
        value = tensor.detach()  # the graph of a second run dies with it
        if is_parameter(tensor):
            return value
        place = self._place
        self._place = place + 1
        # A save too many is counted, and reported when the run has ended.
        slot = self._slots[place]() if place < len(self._slots) else None
        if slot is not None and not self._has_stopped:
            self._check(slot, tensor)
            slot.value = value
        if self._last >= 0:
            self._stop_at_last(place, 2 * (num_nodes() - self._start) + tensor.requires_grad)
        return value

    def _stop_at_last(self, place: int, mark: int) -> None:
        """Stop the run at its last slot, if its saves match the first run's (See Rules 1, 2)."""
        if not self._has_stopped:
            if self._region.marks[place] != mark:
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


class Untaped(Restoring):
    """A context for a second run without a backward: it builds a graph that keeps no tensors.

    Args:
        name: the name of the call in error messages.
        first_run: knows whether the run takes gradients itself, for which it keeps residuals.
    """

    __slots__ = ("_before", "_first_run", "_hooks", "_name")

    def __init__(self, name: str, first_run: FirstRun) -> None:
        super().__init__()
        self._before: bool | None = None
        self._name = name
        self._first_run = first_run
        self._hooks: saving | None = None

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        pack = _detached if self._first_run.keeps else _nothing
        self._hooks = saving(pack, self._unpack)
        self._hooks.__enter__()
        set_grad_enabled(True)

    def restore(self) -> None:
        if self._hooks is not None:
            self._hooks.restore()
            self._hooks = None  # it holds a method of ours: a reference cycle
        if self._before is not None:
            set_grad_enabled(self._before)
            self._before = None

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        self.restore()
        self._first_run.end(is_whole=kind is None)

    @never_compiled
    def _unpack(self, packed: Tensor | None) -> Tensor:
        self._first_run.asked(self._name)
        return cast("Tensor", packed)


@never_compiled
def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


@never_compiled
def _nothing(tensor: Tensor) -> None:
    del tensor


def _itself(packed: Tensor) -> Tensor:
    return packed
