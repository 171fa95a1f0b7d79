"""Settings that affect the results of operators: autocast, attention, where tensors are made."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._device import DeviceContext

from recoup._core.devices import autocast_kinds

_autocast, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_sdpa = torch.backends.cuda
# What torch.backends.cuda asks, a call of Python less for each setting of each region.
_flash, _mem_efficient = torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled
_math, _cudnn = torch._C._get_math_sdp_enabled, torch._C._get_cudnn_sdp_enabled
_num_function_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack")  # noqa: B009
_function_mode_at: Callable[[int], Any] = getattr(torch._C, "_get_function_stack_at")  # noqa: B009
# Whether `__torch_function__` is called: torch leaves it out while the backward of a subclass runs.
_subclasses: Callable[[], Any] = getattr(torch._C, "_get_torch_function_state")  # noqa: B009
_set_subclasses: Callable[[Any], None] = getattr(torch._C, "_set_torch_function_state")  # noqa: B009
Settings = tuple[
    tuple[bool, ...], tuple[torch.dtype, ...], tuple[bool, bool, bool, bool], torch.device | None,
    object,
]  # fmt: skip


def _default_device() -> torch.device | None:
    """Return the default device of this thread; hooks of autograd run without one."""
    for place in range(_num_function_modes()):
        mode = _function_mode_at(place)
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def settings_now() -> Settings:
    """Return the settings that affect the results of operators."""
    kinds = autocast_kinds()
    kernels = _flash(), _mem_efficient(), _math(), _cudnn()
    device = _default_device() if _num_function_modes() else None
    autocast = tuple(map(_autocast, kinds)), tuple(map(_autocast_dtype, kinds))
    return *autocast, kernels, device, _subclasses()


def _choose(kernels: tuple[bool, bool, bool, bool]) -> None:
    """Let attention choose among these kernels."""
    if kernels != settings_now()[2]:
        _sdpa.enable_flash_sdp(kernels[0])
        _sdpa.enable_mem_efficient_sdp(kernels[1])
        _sdpa.enable_math_sdp(kernels[2])
        _sdpa.enable_cudnn_sdp(kernels[3])


def with_settings(values: Settings) -> AbstractContextManager[object]:
    """Return a context with these settings."""
    # Torch runs hooks without the default device.
    is_set = True in values[0] or values[3] is not None
    return _in_settings(values) if is_set or values != settings_now() else nullcontext()


@contextmanager
def _in_settings(values: Settings) -> Generator[None]:
    """A context with other settings.

    Autocast is entered without its cache of weight copies: a cached copy would tie the second run
    to the graph of the code around it. The copies hold the same numbers either way.
    """
    _, _, before, device, subclasses = settings_now()
    with ExitStack() as contexts:
        for kind, is_enabled, dtype in zip(autocast_kinds(), *values[:2], strict=True):
            contexts.enter_context(torch.autocast(kind, dtype, is_enabled, cache_enabled=False))
        if device is not None or values[3] is not None:
            contexts.enter_context(torch.device(values[3] or "cpu"))
        contexts.callback(_set_subclasses, subclasses)
        _set_subclasses(values[4])
        contexts.callback(_choose, before)
        _choose(values[2])
        yield


def settings_as_now() -> Callable[[], AbstractContextManager[object]]:
    """Return a function that makes contexts with the settings that are in force now."""
    values = settings_now()
    return lambda: with_settings(values)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context in which no operator on a type of device casts its inputs."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Generator[Any]:
    """A context in which an attribute has another value; entering it returns the one before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield before
    finally:
        setattr(owner, name, before)
