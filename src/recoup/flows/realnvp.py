"""RealNVP: affine couplings on checkerboards and on channels, at several scales."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch.distributions import Distribution

from recoup import invertible
from recoup.flows.building import check_counts, check_shape, first_layers, steps_of
from recoup.flows.flow import Flow
from recoup.schedules.memory import Memory


class RealNVP(Flow):
    """The flow of RealNVP, for images and for vectors.

    Each of the `num_levels` scales but the last runs `num_steps` affine couplings on
    checkerboards, squeezes 2x2 pixels into channels, runs `num_steps` more on halves of the
    channels, and sends half of the channels to the latents; the last runs `num_steps` couplings on
    checkerboards alone. Couplings change the two parts in turn, and an ActNorm precedes each
    coupling where the paper has batch normalisation. A vector has one scale of `num_steps`
    couplings on its halves.

    With ``memory="constant"`` backward holds one step at a time, whatever the depth, and runs
    each network once more; the peak of "linear" grows with ``num_levels * num_steps``.

    The paper's size for CIFAR-10 is ``RealNVP((3, 32, 32), levels=256, num_levels=2, num_steps=4,
    width=64, depth=8)``, except that the paper has one coupling of each kind less at the first
    scale.

    Args:
        shape: Shape ``(C, H, W)`` of one image, H and W multiples of ``2**num_levels``; or
            ``(D,)`` of one vector, D at least 2.
        levels: Number of grey levels of the data, 17 or 256 for instance; None for continuous
            data, which are then taken as they are.
        num_levels: Number of scales of images.
        num_steps: Number of couplings of each kind at each scale.
        width: Channels inside the networks of the couplings.
        depth: Depth of these networks, see `ConvNetwork` and `DenseNetwork`.
        alpha: With `levels`, the margin of the `Logit` that comes first.
        dropout: Probability of dropout inside the networks.
        num_classes: Number of classes of a conditional flow; None for no labels.
        memory: Memory mode of the chain, see `recoup.invertible.Chain`.
        base: Distribution of the latents, standard normal by default.

    Raises:
        ValueError: When an argument is out of its range.

    Example:
        >>> import torch
        >>> from recoup.flows import RealNVP
        >>> flow = RealNVP((1, 8, 8), levels=17, width=8, memory="constant")
        >>> flow.bits_per_dim(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3])
        >>> RealNVP((2,), levels=None, num_steps=6).sample(5).shape
        torch.Size([5, 2])

    Dinh et al., "Density estimation using Real NVP", https://arxiv.org/abs/1605.08803.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        levels: int | None,
        num_levels: int = 2,
        num_steps: int = 4,
        width: int = 64,
        depth: int = 2,
        alpha: float = 0.05,
        dropout: float = 0.0,
        num_classes: int | None = None,
        memory: Memory = "linear",
        base: Distribution | None = None,
    ) -> None:
        check_counts(num_levels=num_levels, num_steps=num_steps, num_classes=num_classes)
        is_image = check_shape(shape, num_levels)
        steps = partial(
            steps_of, couple=invertible.AffineCoupling, copies=2, before=_before, width=width,
            depth=depth, dropout=dropout, num_context=num_classes or 0,
        )  # fmt: skip
        stages = first_layers(levels, alpha)
        size = shape[0]
        for _ in range(num_levels - 1 if is_image else 0):
            stages += [
                *steps("checkerboard", size, num_steps),
                invertible.Squeeze(),
                *steps("channels", 4 * size, num_steps),
                invertible.Split(),
            ]
            size *= 2
        stages += steps("checkerboard" if is_image else "vector", size, num_steps)
        chain = invertible.Chain(*stages, memory=memory)
        super().__init__(chain, shape=shape, levels=levels, base=base, num_classes=num_classes)


def _before(num_channels: int) -> list[invertible.InvertibleModule]:
    return [invertible.ActNorm(num_channels)]
