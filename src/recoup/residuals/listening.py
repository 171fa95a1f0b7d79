"""Who is told, in each thread, what is saved in the seam and not kept."""

from __future__ import annotations

import threading
from typing import Any, Literal, Protocol

from torch import Tensor

__all__ = ["Listener", "Way", "here"]

Way = Literal["keep", "recompute", "regenerate", "invert", "offload"]


class Listener(Protocol):
    """What wants to be told."""

    def told(self, tensor: Tensor, slot: Any, way: Way) -> None:
        """Take note that autograd holds `slot` in the place of `tensor`."""
        ...


class _Here(threading.local):
    listener: Listener | None = None


here = _Here()
