"""The settings around a region that change what its code computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["Ambient"]


def _autocast_of(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


class Ambient:
    """Autocast as it was when a region ran first, entered again when it runs again.

    Entered without autocast's cache of weight copies: a cached copy would tie the second run to
    the graph of whatever surrounds it. The copies hold the same numbers either way.
    """

    __slots__ = ("_autocast",)

    def __init__(self) -> None:
        types = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._autocast = tuple((kind, *_autocast_of(kind)) for kind in types)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the recorded settings where they differ from those in force."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                if enabled or _autocast_of(kind)[0]:
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            yield
