"""Code that takes gradients itself, in a call whose residuals are not kept.

NOTE [ A region that takes gradients ]

Rule 1. Code in a region may take a gradient itself (a force, a penalty). It then unpacks residuals
        of a run before that run has ended. A second run that fills slots has them, since it keeps
        all.
Rule 2. Only a run shows whether code does that. So the first run of some code keeps its residuals
        until it ends. If none was unpacked, later first runs keep nothing; otherwise they keep
        theirs, too. A second run needs as much memory, so the peak of a step does not grow. The
        same holds for a second run that only advances.
Rule 3. Code that takes its first gradient in a later run is an error, once; after that it is known
        to take gradients.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.saved_tensors import saving, set_grad_enabled
from recoup.errors import ReplayError

__all__ = ["Advancing", "FirstRun", "place_of"]

# By mode, training or not, as in `random_sources`. Plain sets of references that take themselves
# out when their object dies: `in` then runs no Python code, as it would for a WeakSet.
_seen: tuple[set[weakref.ref[Any]], ...] = (set(), set())
_asking: tuple[set[weakref.ref[Any]], ...] = (set(), set())


class FirstRun:
    """The decision whether a run keeps its residuals until it ends (See Rule 2).

    Args:
        parts: weak references to the code and modules that run.
        is_training: the mode they run in.
    """

    __slots__ = ("_is_asked", "_mode", "filled", "has_failed", "is_running", "keeps", "parts")

    def __init__(self, parts: Sequence[weakref.ref[Any]], *, is_training: bool) -> None:
        self.parts = parts
        self._mode = int(is_training)
        self._is_asked = False
        self.filled: list[weakref.ref[Any]] = []  # slots that keep their value until the end
        self.is_running = True
        self.has_failed = False
        asking = _asking[self._mode]
        self.keeps = not _seen[self._mode].issuperset(parts) or (
            bool(asking) and asking.issuperset(parts)
        )

    def asked(self, name: str) -> None:
        """Note that a residual of the run is unpacked; raise if it is not kept (See Rule 3)."""
        self._is_asked = True
        if not self.keeps:
            raise ReplayError(
                f"{name} computes a gradient while it runs, which it did not do in its first run, "
                "so the residuals for it were not kept. They will be kept from the next run on: "
                "repeat this step. Or move the code that computes the gradient into a "
                f"recoup.checkpoint of its own, or out of {name}."
            )

    def end(self, *, is_whole: bool) -> None:
        """Record whether the code takes gradients; not `is_whole` if an exception ended the run."""
        self.is_running = False
        self.has_failed = not is_whole
        if self.filled:
            for ref in self.filled:
                slot = ref()
                if slot is not None:
                    slot.value = None
            self.filled.clear()
        if self._is_asked:
            _add(_asking[self._mode], self.parts)
        if (self._is_asked or is_whole) and self.keeps:
            _add(_seen[self._mode], self.parts)


def _add(known: set[weakref.ref[Any]], parts: Iterable[weakref.ref[Any]]) -> None:
    for part in parts:
        value = part()
        if value is not None and part not in known:
            known.add(weakref.ref(value, known.discard))


class Advancing(saving):
    """A context for a second run that keeps no residuals: it builds a graph without tensors.

    Args:
        name: the name of the call in error messages.
        first_run: knows whether the run takes gradients itself, for which it keeps residuals.
    """

    __slots__ = ("_before", "_first_run", "_name", "_num_saves")

    def __init__(self, name: str, first_run: FirstRun) -> None:
        super().__init__(_nothing, _nothing)
        self._before: bool | None = None
        self._name = name
        self._first_run = first_run
        self._num_saves = 0

    def num_saves(self) -> int:
        """Return how many residuals the run has dropped so far."""
        return self._num_saves

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        self._pack, self._unpack = self._count, self._get
        super().__enter__()
        set_grad_enabled(True)

    def restore(self) -> None:
        if self._before is not None:
            set_grad_enabled(self._before)
            self._before = None
        super().restore()
        self._pack = self._unpack = _nothing  # or this object would hold itself: a reference cycle

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        super().leave(kind, value, traceback)
        self.restore()
        self._first_run.end(is_whole=kind is None)

    @never_compiled
    def _count(self, tensor: Tensor) -> Any:
        if type(tensor) is Tensor or not isinstance(tensor, nn.Parameter):
            self._num_saves += 1
        return tensor.detach() if self._first_run.keeps else None

    @never_compiled
    def _get(self, packed: Tensor | None) -> Tensor:
        self._first_run.asked(self._name)
        return cast("Tensor", packed)


@never_compiled
def _nothing(tensor: Tensor) -> Any:
    del tensor


class _Place:
    """A weakly referable object that stands for a place in code."""


@functools.cache
def place_of(name: str) -> object:
    """Return the object that stands for a place in code, by its file and line."""
    del name
    return _Place()
