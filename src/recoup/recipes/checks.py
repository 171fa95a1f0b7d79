"""Checks of settings and options, with errors that name them."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

__all__ = [
    "check_at_least",
    "check_not_negative",
    "check_probabilities",
    "device_checked",
    "move_to_device",
]


def check_at_least(least: int, **values: int | None) -> None:
    """Raise a ValueError unless all values are at least `least`; None passes."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"`{name}` is {value}, but must be at least {least}.")


def check_not_negative(**values: float) -> None:
    """Raise a ValueError unless all values are at least 0, and finite."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"`{name}` is {value}, but must be at least 0, and finite.")


def check_probabilities(**values: float) -> None:
    """Raise a ValueError unless all values are at least 0 and less than 1."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"`{name}` is {value}, but must be at least 0 and less than 1.")


def move_to_device(module: nn.Module, device: str) -> None:
    """Move a module to the device given as ``--device``.

    Raises:
        ValueError: When torch cannot use the device here.
    """
    with device_checked(device):
        module.to(device)
        next(module.parameters()).cpu()  # Some devices, such as meta, hold no values.


@contextmanager
def device_checked(device: str) -> Generator[None]:
    """Turn the errors of moving tensors to the device given as ``--device`` into a ValueError."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # torch raises either
        raise ValueError(f"`--device` is {device}, which torch cannot use here.") from error
