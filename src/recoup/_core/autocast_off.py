"""A context without autocast, which is restored even if it is cut off, as torch's own is not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from recoup._core.restoring import Restoring

__all__ = ["without_autocast"]


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which no operator on a type of device casts its inputs.

    Args:
        device_type: "cpu", "cuda" or another.
    """
    if torch.compiler.is_compiling():  # the compiler knows torch's own context
        return torch.autocast(device_type, enabled=False)
    return _Off(device_type) if torch.is_autocast_enabled(device_type) else nullcontext()


class _Off(Restoring):
    __slots__ = ("_device_type", "_is_entered")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._is_entered = False

    def __enter__(self) -> None:
        self._is_entered = True
        torch.set_autocast_enabled(self._device_type, False)

    def restore(self) -> None:
        if self._is_entered:
            torch.set_autocast_enabled(self._device_type, True)
            self._is_entered = False
