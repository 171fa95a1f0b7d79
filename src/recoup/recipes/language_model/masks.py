"""Dropout of activations with masks drawn once for a window, whatever its segments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

__all__ = ["DropoutKind", "Masks"]

DropoutKind = Literal["locked", "independent"]


class Masks:
    """The dropout masks of one window of text.

    Kept: a byte for each entry of a mask. A locked mask has the size of one time step, an
    independent one that of the window.

    Args:
        probabilities: for each place in the network, the probability that an entry is dropped,
            in ``[0, 1)``.
        masks: for each place, the entries to keep: ``(1, N, C)`` or ``(T, N, C)``.

    Source: Gal and Ghahramani, https://arxiv.org/abs/1512.05287, for locked masks.
    """

    def __init__(self, probabilities: Mapping[str, float], masks: Mapping[str, Tensor]) -> None:
        self._probabilities = probabilities
        self._masks = masks

    @classmethod
    def drawn(
        cls,
        kind: DropoutKind,
        probabilities: Mapping[str, float],
        sizes: Mapping[str, int],
        num_steps: int,
        batch_size: int,
        device: torch.device | str = "cpu",
    ) -> Masks:
        """Draw masks from the default generator.

        Args:
            kind: "locked" for one mask for all time steps (variational dropout), or "independent"
                for a mask of its own at each.
            probabilities: as above.
            sizes: number of channels at each place.
            num_steps: number of time steps of the window.
            batch_size: number of rows of the window.
            device: device of the activations.
        """
        length = 1 if kind == "locked" else num_steps
        masks = {
            place: torch.empty(
                (length, batch_size, sizes[place]), dtype=torch.bool, device=device
            ).bernoulli_(1 - p)
            for place, p in probabilities.items()
            if p
        }
        return cls(probabilities, masks)

    def between(self, start: int, stop: int) -> Masks:
        """Return the masks of the time steps from `start` to `stop`."""
        masks = {
            place: mask if len(mask) == 1 else mask[start:stop]
            for place, mask in self._masks.items()
        }
        return Masks(self._probabilities, masks)

    def drop(self, x: Tensor, place: str) -> Tensor:
        """Drop entries of activations ``(T, N, C)``, and scale up the others."""
        mask = self._masks.get(place)
        if mask is None:
            return x
        scale = 1 / (1 - self._probabilities[place])
        if len(mask) == 1:  # It is small: as numbers it needs one pass over `x`, not two.
            return x * (mask.to(x.dtype) * scale)
        return x * mask * scale
