"""The observer of a thread: called for each tensor that autograd saves and recoup does not keep."""

from __future__ import annotations

import threading
from typing import Any, Literal, Protocol

from torch import Tensor

from recoup._core.restoring import Restoring

__all__ = ["SaveObserver", "Way", "current", "observed_by"]

Way = Literal["keep", "recompute", "regenerate", "invert", "offload"]


class SaveObserver(Protocol):
    """An object that is called for each saved tensor that is not kept."""

    def saved(self, tensor: Tensor, slot: Any, way: Way) -> None:
        """Note that autograd holds `slot` in place of `tensor`."""
        ...


class _Current(threading.local):
    observer: SaveObserver | None = None


current = _Current()


class observed_by(Restoring):  # noqa: N801 - it reads as what it does
    """A context in which `observer` is called; entering it returns the previous observer."""

    __slots__ = ("_is_entered", "_observer", "_previous")

    def __init__(self, observer: SaveObserver) -> None:
        super().__init__()
        self._observer = observer
        self._previous: SaveObserver | None = None
        self._is_entered = False

    def __enter__(self) -> SaveObserver | None:
        self._previous = previous = current.observer
        self._is_entered = True
        current.observer = self._observer
        return previous

    def restore(self) -> None:
        if self._is_entered:
            current.observer = self._previous
            self._is_entered = False
