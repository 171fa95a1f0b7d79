"""The settings around a region that change what its code computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

__all__ = ["Ambient"]

_DEVICE_TYPES = ("cpu", "cuda")
_NOTHING = nullcontext()


def _is_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


_sdpa = torch.backends.cuda  # which kernels of scaled dot product attention are allowed


def _allowed() -> tuple[bool, ...]:
    return (
        _sdpa.flash_sdp_enabled(),
        _sdpa.mem_efficient_sdp_enabled(),
        _sdpa.math_sdp_enabled(),
        _sdpa.cudnn_sdp_enabled(),
    )


def _allow(allowed: tuple[bool, ...]) -> None:
    _sdpa.enable_flash_sdp(allowed[0])
    _sdpa.enable_mem_efficient_sdp(allowed[1])
    _sdpa.enable_math_sdp(allowed[2])
    _sdpa.enable_cudnn_sdp(allowed[3])


class Ambient:
    """Autocast, and the choice of attention kernels, as they were when a region ran first.

    Autocast is entered without its cache of weight copies: a cached copy would tie the second run
    to the graph of whatever surrounds it. The copies hold the same numbers either way.
    """

    __slots__ = ("_allowed", "_autocast")

    def __init__(self) -> None:
        self._allowed = _allowed()
        self._autocast: list[tuple[str, bool, torch.dtype]] | None = None
        if _is_autocast():
            self._autocast = [
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _DEVICE_TYPES
            ]

    def entered(self) -> AbstractContextManager[object]:
        """Return a context with the recorded settings."""
        now = _allowed()
        if self._autocast is None and now == self._allowed and not _is_autocast():
            return _NOTHING
        stack = ExitStack()
        if now != self._allowed:
            _allow(self._allowed)
            stack.callback(_allow, now)
        for kind, enabled, dtype in self._autocast or [(k, False, None) for k in _DEVICE_TYPES]:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                )
        return stack
