"""The observer of a thread: called for each tensor that autograd saves and recoup does not keep."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from torch import Tensor

Way = Literal["keep", "recompute", "regenerate", "invert", "offload"]


class SaveObserver(Protocol):
    """An object that is called for each saved tensor that is not kept."""

    def saved(self, tensor: Tensor, slot: Any, way: Way) -> None:
        """Note that autograd holds `slot` in place of `tensor`."""
        ...


class _Current(threading.local):
    observer: SaveObserver | None = None


current = _Current()


@contextmanager
def observed_by(observer: SaveObserver) -> Generator[SaveObserver | None]:
    """Call `observer` in this context; entering it returns the previous observer."""
    previous, current.observer = current.observer, observer
    try:
        yield previous
    finally:
        current.observer = previous
