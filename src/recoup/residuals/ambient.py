"""The settings around a region that change what its code computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

__all__ = ["Ambient"]

_DEVICE_TYPES = ("cpu", "cuda")
_NOTHING = nullcontext()


def _is_autocast() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in _DEVICE_TYPES)


class Ambient:
    """Autocast as it was when a region ran first, entered again when it runs again.

    Entered without autocast's cache of weight copies: a cached copy would tie the second run to
    the graph of whatever surrounds it. The copies hold the same numbers either way.
    """

    __slots__ = ("_autocast",)

    def __init__(self) -> None:
        self._autocast: list[tuple[str, bool, torch.dtype]] | None = None
        if _is_autocast():
            self._autocast = [
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _DEVICE_TYPES
            ]

    def entered(self) -> AbstractContextManager[object]:
        """Return a context with the recorded settings."""
        if self._autocast is None and not _is_autocast():
            return _NOTHING
        stack = ExitStack()
        for kind, enabled, dtype in self._autocast or [(k, False, None) for k in _DEVICE_TYPES]:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                )
        return stack
