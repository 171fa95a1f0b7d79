"""Latents of a flow: one tensor, or a tuple of them where its chain splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["Latents", "as_latents", "as_tuple", "chosen", "temperature_of_each"]

Latents = Any  # a tensor, or a tuple of them where the chain splits: pyright cannot say which


def as_tuple(latents: Latents) -> tuple[Tensor, ...]:
    """Return latents as a tuple, even if they are one tensor."""
    return (latents,) if isinstance(latents, Tensor) else tuple(latents)


def as_latents(parts: Sequence[Tensor]) -> Latents:
    """Undo `as_tuple`: return the parts in the form that a chain's inverse takes."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def temperature_of_each(
    temperature: float | Sequence[float] | Tensor, num_latents: int
) -> tuple[float, ...]:
    """Return one temperature per latent.

    Raises:
        ValueError: When the number of temperatures is not that of the latents.
    """
    if isinstance(temperature, Tensor):
        temperature = [float(value) for value in temperature.flatten()]
        temperature = temperature[0] if len(temperature) == 1 else temperature
    if not isinstance(temperature, Sequence):
        return (temperature,) * num_latents
    if len(temperature) != num_latents:
        raise ValueError(
            f"`temperature` has {len(temperature)} numbers, but this flow has {num_latents} "
            f"latents. Give one number for all, or one for each, in the order of `forward`."
        )
    return tuple(temperature)


def chosen(indices: int | Sequence[int], num_latents: int) -> frozenset[int]:
    """Return the indices of the chosen latents, counted from the front.

    Raises:
        ValueError: When an index is out of range for `num_latents` latents.
    """
    given = (indices,) if isinstance(indices, int) else tuple(indices)
    for index in given:
        if not -num_latents <= index < num_latents:
            raise ValueError(
                f"`indices` holds {index}, but this flow has {num_latents} latents. Give numbers "
                f"from 0, the first to be split off, to {num_latents - 1}."
            )
    return frozenset(index % num_latents for index in given)
