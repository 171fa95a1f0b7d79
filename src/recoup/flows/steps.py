"""Alternating couplings: the steps of RealNVP and Flow++."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from recoup.flows.networks import ConvNetwork, DenseNetwork
from recoup.invertible import ActNorm, InvertibleConv1x1, InvertibleModule

__all__ = ["Steps"]


@dataclass(frozen=True)
class Steps:
    """A builder of steps: an ActNorm, optionally a mixing of the channels, and a coupling.

    Args:
        couple: Makes a coupling from its network, `condition` and `split`.
        copies: Number of values that the coupling needs for each value that it changes.
        width: Width of the networks.
        depth: Depth of the networks.
        dropout: Probability of dropout inside the networks.
        num_context: Channels of the context of the networks.
        mixes: Whether an `InvertibleConv1x1` mixes the channels, if there is more than one.

    Example:
        >>> from recoup.flows.steps import Steps
        >>> from recoup.invertible import AffineCoupling
        >>> [type(layer).__name__ for layer in Steps(AffineCoupling, 2, 8, 2).on_vectors(5, 1)]
        ['ActNorm', 'AffineCoupling']
    """

    couple: Callable[..., InvertibleModule]
    copies: int
    width: int
    depth: int
    dropout: float = 0.0
    num_context: int = 0
    mixes: bool = False

    def on_boards(self, num_channels: int, num_steps: int) -> list[InvertibleModule]:
        """Make `num_steps` steps whose couplings split images as checkerboards."""
        parts = (num_channels, num_channels)
        return self._alternating(ConvNetwork, num_channels, parts, num_steps, "checkerboard")

    def on_channels(self, num_channels: int, num_steps: int) -> list[InvertibleModule]:
        """Make `num_steps` steps whose couplings split images in halves of the channels."""
        return self._alternating(ConvNetwork, num_channels, _halves(num_channels), num_steps)

    def on_vectors(self, size: int, num_steps: int) -> list[InvertibleModule]:
        """Make `num_steps` steps whose couplings split vectors in halves."""
        return self._alternating(DenseNetwork, size, _halves(size), num_steps)

    def _alternating(
        self,
        kind: Callable[..., nn.Module],
        num_channels: int,
        parts: tuple[int, int],
        num_steps: int,
        split: str = "channels",
    ) -> list[InvertibleModule]:
        options: dict[str, Any] = {
            "width": self.width,
            "depth": self.depth,
            "dropout": self.dropout,
            "num_context": self.num_context,
        }
        stages: list[InvertibleModule] = []
        for step in range(num_steps):
            given, changed = parts if step % 2 == 0 else parts[::-1]
            stages += [ActNorm(num_channels)]
            if self.mixes and num_channels > 1:
                stages += [InvertibleConv1x1(num_channels)]
            network = kind(given, self.copies * changed, **options)
            condition = "first" if step % 2 == 0 else "second"
            stages += [self.couple(network, condition=condition, split=split)]
        return stages


def _halves(size: int) -> tuple[int, int]:
    return (size + 1) // 2, size // 2
