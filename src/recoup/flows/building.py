"""The shared parts of flow builders: checks of arguments, and steps of alternating couplings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from recoup._arguments import check_real, check_whole
from recoup.flows.networks import ConvNetwork, DenseNetwork, check_layers
from recoup.invertible import ActNorm, InvertibleConv1x1, InvertibleModule, Logit, Normalize
from recoup.invertible.contract import sizes_of

__all__ = ["Steps", "check_counts", "check_images", "check_shape", "first_layers"]


def check_counts(*, width: int = 1, num_classes: int | None = None, **layers: int) -> None:
    """Raise ValueError unless every count is a whole number of at least 1.

    Args:
        width: the width of networks.
        num_classes: the number of classes; None without labels.
        layers: numbers of what is made one by one, at most 10,000.
    """
    check_layers(**layers)
    check_whole(width=width, num_classes=1 if num_classes is None else num_classes)


def check_images(shape: Sequence[int], num_levels: int) -> None:
    """Raise ValueError unless `shape` is (C, H, W) and can be halved `num_levels` times."""
    sizes_of(shape)
    if num_levels > 20:
        raise ValueError(f"`num_levels` is {num_levels}, but images have at most 20 levels.")
    factor = 2**num_levels
    if len(shape) != 3 or min(shape) < 1 or shape[1] % factor or shape[2] % factor:
        raise ValueError(
            f"`shape` is {tuple(shape)}, but with `num_levels` {num_levels} it must be (C, H, W) "
            f"with H and W multiples of {factor}. Pad or crop the images, or use fewer levels."
        )


def check_shape(shape: Sequence[int], num_levels: int) -> None:
    """Raise ValueError unless `shape` is (D,), a vector, or passes `check_images`."""
    if len(sizes_of(shape)) != 1:
        check_images(shape, num_levels)
    elif shape[0] < 2:
        raise ValueError(
            f"`shape` is {tuple(shape)}, but a coupling needs at least 2 values: one half decides "
            f"how the other is changed."
        )


def first_layers(levels: int | None, alpha: float | None) -> list[InvertibleModule]:
    """Return the layer that maps dequantised data to where a flow starts; none without `levels`.

    It is a `Logit` with the margin `alpha`, or, if that is None, a shift to ``[-0.5, 0.5]``.
    """
    if alpha is not None:
        check_real(alpha=alpha)
    if levels is None:
        return []
    return [Normalize(0.5, 1.0) if alpha is None else Logit(alpha)]


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
        >>> from recoup.flows.building import Steps
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
