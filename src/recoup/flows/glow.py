"""Glow: actnorm, 1x1 convolution and coupling, at several scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch.distributions import Distribution

from recoup import invertible
from recoup._arguments import check_choice
from recoup.flows.building import check_counts, check_shape, first_layers, steps_of
from recoup.flows.flow import Flow
from recoup.schedules.memory import Memory


class Glow(Flow):
    """The flow of Glow, for images.

    Each of the `num_levels` scales squeezes 2x2 pixels into channels, runs ActNorm, an
    invertible 1x1 convolution and a coupling `num_steps` times, and, except the last, sends half
    of the channels to the latents.

    With ``memory="constant"`` backward holds one step at a time, whatever the depth, and runs
    each network once more; the peak of "linear" grows with ``num_levels * num_steps``.

    Args:
        shape: Shape ``(C, H, W)`` of one image; H and W multiples of ``2**num_levels``.
        levels: Number of grey levels of the data, 17 or 256 for instance; None for continuous
            data, which are then taken as they are.
        num_levels: Number of scales.
        num_steps: Number of steps in each scale.
        width: Channels inside the networks of the couplings.
        coupling: "affine" or "additive".
        conv1x1: "plain" or "lu", the form in which the 1x1 convolutions are learned.
        alpha: With `levels`, the margin of the `Logit` that comes first; None to only shift the
            data to the middle, ``[-0.5, 0.5]``.
        dropout: Probability of dropout inside the networks.
        num_classes: Number of classes of a conditional flow; None for no labels.
        memory: Memory mode of the chain, see `recoup.invertible.Chain`.
        base: Distribution of the latents, standard normal by default.

    Raises:
        ValueError: When an argument is out of its range.

    Example:
        >>> import torch
        >>> from recoup.flows import Glow
        >>> flow = Glow((1, 8, 8), levels=17, num_steps=2, width=8, memory="constant")
        >>> flow.bits_per_dim(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3])
        >>> flow.sample(2, temperature=0.7).shape
        torch.Size([2, 1, 8, 8])

    Kingma and Dhariwal, "Glow", https://arxiv.org/abs/1807.03039.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        levels: int | None,
        num_levels: int = 2,
        num_steps: int = 4,
        width: int = 64,
        coupling: Literal["affine", "additive"] = "affine",
        conv1x1: Literal["plain", "lu"] = "plain",
        alpha: float | None = 0.05,
        dropout: float = 0.0,
        num_classes: int | None = None,
        memory: Memory = "linear",
        base: Distribution | None = None,
    ) -> None:
        check_counts(num_levels=num_levels, num_steps=num_steps, num_classes=num_classes)
        check_choice("affine", "additive", coupling=coupling)
        check_choice("plain", "lu", conv1x1=conv1x1)
        check_shape(shape, num_levels, least=None)
        couple, copies = (
            (invertible.AffineCoupling, 2)
            if coupling == "affine"
            else (invertible.AdditiveCoupling, 1)
        )
        mix = invertible.InvertibleConv1x1 if conv1x1 == "plain" else invertible.InvertibleConv1x1LU
        stages = first_layers(levels, alpha)
        num_channels = shape[0]
        for level in range(num_levels):
            num_channels *= 4
            stages += [invertible.Squeeze()]
            stages += steps_of(
                "channels", num_channels, num_steps, couple=couple, copies=copies,
                before=lambda size: [invertible.ActNorm(size), mix(size)], alternates=False,
                width=width, dropout=dropout, num_context=num_classes or 0,
            )  # fmt: skip
            if level < num_levels - 1:
                stages += [invertible.Split()]
                num_channels //= 2
        chain = invertible.Chain(*stages, memory=memory)
        super().__init__(chain, shape=shape, levels=levels, base=base, num_classes=num_classes)
