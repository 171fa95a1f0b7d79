"""The settings around a region that affect the results of its code."""

from __future__ import annotations

import torch

from recoup._core.restoring import Restoring

__all__ = ["Ambient"]

_DEVICE_TYPES = ("cpu", "cuda")


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
    """The settings of autocast and of attention kernels in the first run of a region.

    Autocast is entered without its cache of weight copies: a cached copy would tie the second run
    to the graph of the code around it. The copies hold the same numbers either way.
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

    def entered(self) -> Restoring | None:
        """Return a context with the recorded settings; None if they are in force already."""
        now = _allowed()
        if self._autocast is None and now == self._allowed and not _is_autocast():
            return None
        casts = self._autocast or [(kind, False, None) for kind in _DEVICE_TYPES]
        return _Entered(
            self._allowed,
            [cast for cast in casts if cast[1] or torch.is_autocast_enabled(cast[0])],
        )


class _Entered(Restoring):
    """A context with the given attention kernels allowed and the given autocast settings."""

    __slots__ = ("_allowed", "_before", "_casts")

    def __init__(
        self, allowed: tuple[bool, ...], casts: list[tuple[str, bool, torch.dtype | None]]
    ) -> None:
        super().__init__()
        self._allowed = allowed
        self._casts = casts
        self._before: _Settings | None = None

    def __enter__(self) -> None:
        self._before = _Settings()
        if self._before.allowed != self._allowed:
            _allow(self._allowed)
        if not self._casts:
            return
        torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(False)
        for kind, is_enabled, dtype in self._casts:
            torch.set_autocast_enabled(kind, is_enabled)
            if dtype is not None:
                torch.set_autocast_dtype(kind, dtype)

    def restore(self) -> None:
        if self._before is not None:
            self._before.restore()
            self._before = None


class _Settings:
    """The current settings of autocast and of attention kernels, which it can restore."""

    __slots__ = ("_casts", "_has_cache", "_nesting", "allowed")

    def __init__(self) -> None:
        self.allowed = _allowed()
        self._casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _DEVICE_TYPES
        ]
        self._has_cache = torch.is_autocast_cache_enabled()
        self._nesting = _nesting()

    def restore(self) -> None:
        if _allowed() != self.allowed:
            _allow(self.allowed)
        for kind, is_enabled, dtype in self._casts:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._has_cache)
        for _ in range(_nesting() - self._nesting):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _nesting() -> int:
    """Return the depth of nested autocast contexts; at depth 0 torch clears its cache."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting
