"""Checks of the arguments of the flow builders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex, cast

__all__ = ["check_counts", "check_images", "check_shape"]


def check_counts(**counts: int) -> None:
    """Raise ValueError unless every count is a whole number of at least 1."""
    for name, value in counts.items():
        given = cast("object", value)
        is_whole = isinstance(given, SupportsIndex) and not isinstance(given, bool)
        if not is_whole or value < 1:
            raise ValueError(f"`{name}` is {given!r}, but must be a whole number, at least 1.")


def check_images(shape: Sequence[int], num_levels: int) -> None:
    """Raise ValueError unless `shape` is (C, H, W) and can be halved `num_levels` times."""
    factor = 2**num_levels
    if len(shape) != 3 or min(shape) < 1 or shape[1] % factor or shape[2] % factor:
        raise ValueError(
            f"`shape` is {tuple(shape)}, but with `num_levels` {num_levels} it must be (C, H, W) "
            f"with H and W multiples of {factor}. Pad or crop the images, or use fewer levels."
        )


def check_shape(shape: Sequence[int], num_levels: int) -> None:
    """Raise ValueError unless `shape` is (D,), a vector, or passes `check_images`."""
    if len(shape) != 1:
        check_images(shape, num_levels)
    elif shape[0] < 2:
        raise ValueError(
            f"`shape` is {tuple(shape)}, but a coupling needs at least 2 values: one half decides "
            f"how the other is changed."
        )
