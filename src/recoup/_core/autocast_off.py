"""A context without autocast."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


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
