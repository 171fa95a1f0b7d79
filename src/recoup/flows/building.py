"""The shared parts of flow builders: checks of arguments, and steps of alternating couplings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from recoup._arguments import check_real, check_whole
from recoup.flows.networks import ConvNetwork, DenseNetwork, check_layers
from recoup.invertible import InvertibleModule, Logit, Normalize
from recoup.invertible.contract import sizes_of


def check_counts(*, width: int = 1, num_classes: int | None = None, **layers: int) -> None:
    """Raise ValueError unless every count is a whole number of at least 1.

    Args:
        width: the width of networks.
        num_classes: the number of classes; None without labels.
        layers: numbers of what is made one by one, at most 10,000.
    """
    check_layers(**layers)
    check_whole(width=width, num_classes=1 if num_classes is None else num_classes)


def check_shape(shape: Sequence[int], num_levels: int, *, least: int | None = 2) -> bool:
    """Return whether `shape` is that of images, or raise ValueError if it fits no flow.

    Args:
        shape: ``(C, H, W)``, with H and W that can be halved `num_levels` times; or ``(D,)``.
        num_levels: the number of scales of images.
        least: the least D; None where vectors are not taken.
    """
    sizes = sizes_of(shape)
    if len(sizes) == 1 and least is not None:
        if sizes[0] < least:
            raise ValueError(
                f"`shape` is {tuple(shape)}, but a coupling needs at least 2 values: one half "
                "decides how the other is changed."
            )
        return False
    if num_levels > 20:
        raise ValueError(f"`num_levels` is {num_levels}, but images have at most 20 levels.")
    factor = 2**num_levels
    if len(sizes) != 3 or sizes[1] % factor or sizes[2] % factor:
        raise ValueError(
            f"`shape` is {tuple(shape)}, but with `num_levels` {num_levels} it must be (C, H, W) "
            f"with H and W multiples of {factor}{'' if least is None else ', or (D,)'}. Pad or "
            "crop the images, or use fewer levels."
        )
    return True


def first_layers(levels: int | None, alpha: float | None) -> list[InvertibleModule]:
    """Return the layer that maps dequantised data to where a flow starts; none without `levels`.

    It is a `Logit` with the margin `alpha`, or, if that is None, a shift to ``[-0.5, 0.5]``.
    """
    if alpha is not None:
        check_real(alpha=alpha)
    if levels is None:
        return []
    return [Normalize(0.5, 1.0) if alpha is None else Logit(alpha)]


def steps_of(
    split: Literal["vector", "channels", "checkerboard"],
    num_channels: int,
    num_steps: int,
    *,
    couple: Callable[..., InvertibleModule],
    copies: int,
    before: Callable[[int], list[InvertibleModule]],
    alternates: bool = True,
    **options: Any,
) -> list[InvertibleModule]:
    """Make steps: layers that `before` makes, and a coupling.

    Args:
        split: What the couplings split: vectors in halves, images in halves of the channels or as
            checkerboards.
        num_channels: Number of channels, or size of the vectors.
        num_steps: Number of steps.
        couple: Makes a coupling from its network, `condition` and `split`.
        copies: Number of values that the coupling needs for each value that it changes.
        before: Makes the layers before a coupling, for a number of channels.
        alternates: Whether every second coupling changes the other part.
        options: Options of the networks.

    Example:
        >>> from recoup.flows.building import steps_of
        >>> from recoup.invertible import AffineCoupling, Flip
        >>> options = {"couple": AffineCoupling, "copies": 2, "before": lambda _: [Flip()]}
        >>> [type(each).__name__ for each in steps_of("vector", 5, 1, width=8, **options)]
        ['Flip', 'AffineCoupling']
    """
    is_board = split == "checkerboard"
    kind = DenseNetwork if split == "vector" else ConvNetwork
    parts = (num_channels,) * 2 if is_board else ((num_channels + 1) // 2, num_channels // 2)
    stages: list[InvertibleModule] = []
    for step in range(num_steps):
        is_first = step % 2 == 0 or not alternates
        given, changed = parts if is_first else parts[::-1]
        stages += before(num_channels)
        network = kind(given, copies * changed, **options)
        condition = "first" if is_first else "second"
        stages += [
            couple(network, condition=condition, split="checkerboard" if is_board else "channels")
        ]
    return stages
