"""Checks of settings and options, with errors that name them."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path

from torch import nn

from recoup.memory.figures import check_format, require_matplotlib

__all__ = [
    "OfAnotherTypeError",
    "check_at_least",
    "check_not_negative",
    "check_outputs",
    "check_probabilities",
    "device_checked",
    "move_to_device",
]


class OfAnotherTypeError(ValueError, TypeError):
    """A setting is of another type. A command line gives none; a damaged checkpoint may."""


def check_at_least(least: int, **values: int | None) -> None:
    """Raise a ValueError unless all values are whole and at least `least`; None passes."""
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, Integral):
            raise OfAnotherTypeError(f"`{name}` is {value!r}, but must be a whole number.")
        if value < least:
            raise ValueError(f"`{name}` is {value}, but must be at least {least}.")


def check_not_negative(**values: float) -> None:
    """Raise a ValueError unless all values are at least 0, and finite."""
    _check_numbers(values)
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"`{name}` is {value}, but must be at least 0, and finite.")


def check_probabilities(**values: float) -> None:
    """Raise a ValueError unless all values are at least 0 and less than 1."""
    _check_numbers(values)
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"`{name}` is {value}, but must be at least 0 and less than 1.")


def _check_numbers(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if not isinstance(value, Real):
            raise OfAnotherTypeError(f"`{name}` is {value!r}, but must be a number.")


def check_outputs(*paths: Path | None, figure: Path | None = None) -> None:
    """Raise before the measurements, not after them, if a file cannot be written.

    Args:
        paths: The files to be written; None for those that are not. Their folders are made.
        figure: That of them which is a figure.

    Raises:
        ImportError: When matplotlib is needed and not installed.
        ValueError: When a path is a folder, not of a picture, or may not be written.
    """
    if figure is not None:
        check_format(figure.suffix)
        require_matplotlib()
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{path} is a folder, but must be a file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{path} may not be written here. Give another file.")


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
