"""The listener of a thread: called for each tensor that autograd saves but recoup does not keep."""

from __future__ import annotations

import threading
from typing import Any, Literal, Protocol

from torch import Tensor

from recoup._core.restoring import Restoring

__all__ = ["Listener", "Way", "heard_by", "here"]

Way = Literal["keep", "recompute", "regenerate", "invert", "offload"]


class Listener(Protocol):
    """An object that is called for each saved tensor that is not kept."""

    def told(self, tensor: Tensor, slot: Any, way: Way) -> None:
        """Note that autograd holds `slot` in place of `tensor`."""
        ...


class _Here(threading.local):
    listener: Listener | None = None


here = _Here()


class heard_by(Restoring):  # noqa: N801 - it reads as what it does
    """A context in which `listener` is called; entering it returns the previous listener."""

    __slots__ = ("_before", "_is_entered", "_listener")

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._before: Listener | None = None
        self._is_entered = False

    def __enter__(self) -> Listener | None:
        self._before = before = here.listener
        self._is_entered = True
        here.listener = self._listener
        return before

    def restore(self) -> None:
        if self._is_entered:
            here.listener = self._before
            self._is_entered = False
