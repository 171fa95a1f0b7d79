"""Settings that affect the results of operators, autocast and attention, and contexts of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from recoup._core.devices import autocast_kinds

_autocast, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_sdpa = torch.backends.cuda
# What torch.backends.cuda asks, a call of Python less for each setting of each region.
_flash, _mem_efficient = torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled
_math, _cudnn = torch._C._get_math_sdp_enabled, torch._C._get_cudnn_sdp_enabled
Settings = tuple[tuple[bool, ...], tuple[torch.dtype, ...], tuple[bool, bool, bool, bool]]


def settings_now() -> Settings:
    """Return the settings that affect the results of operators."""
    kinds = autocast_kinds()
    kernels = _flash(), _mem_efficient(), _math(), _cudnn()
    return tuple(map(_autocast, kinds)), tuple(map(_autocast_dtype, kinds)), kernels


def _set(values: Settings) -> None:
    for kind, is_enabled, dtype in zip(autocast_kinds(), *values[:2], strict=True):
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    kernels = values[2]
    if kernels != settings_now()[2]:
        _sdpa.enable_flash_sdp(kernels[0])
        _sdpa.enable_mem_efficient_sdp(kernels[1])
        _sdpa.enable_math_sdp(kernels[2])
        _sdpa.enable_cudnn_sdp(kernels[3])


def with_settings(values: Settings) -> AbstractContextManager[object]:
    """Return a context with these settings."""
    return _in_settings(values) if True in values[0] or values != settings_now() else nullcontext()


@contextmanager
def _in_settings(values: Settings) -> Generator[None]:
    """A context with other settings.

    Autocast is entered without its cache of weight copies: a cached copy would tie the second run
    to the graph of the code around it. The copies hold the same numbers either way.
    """
    before, nesting = settings_now(), _autocast_nesting()
    has_cache = torch.is_autocast_cache_enabled()
    try:
        torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(False)
        _set(values)
        yield
    finally:
        _set(before)
        torch.set_autocast_cache_enabled(has_cache)
        for _ in range(_autocast_nesting() - nesting):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def settings_as_now() -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes contexts with the settings that are in force now."""
    values = settings_now()
    return lambda: with_settings(values)


def _autocast_nesting() -> int:
    """Return the depth of nested autocast contexts; at depth 0 torch clears its cache."""
    # Torch has no way to ask.
    both = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)
    return list(map(operator.call, both))[1]


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which no operator on a type of device casts its inputs.

    Args:
        device_type: "cpu", "cuda" or another.
    """
    if torch.compiler.is_compiling():  # the compiler knows torch's own context
        return torch.autocast(device_type, enabled=False)
    return _off(device_type) if torch.is_autocast_enabled(device_type) else nullcontext()


@contextmanager
def _off(device_type: str) -> Generator[None]:
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, True)


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Generator[Any]:
    """A context in which an attribute has another value; entering it returns the one before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)
