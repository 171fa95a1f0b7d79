"""FlowPlusPlus: couplings by mixtures of logistics, and learned dequantization."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch.distributions import Distribution

from recoup import invertible
from recoup.flows.building import check_counts, check_shape, first_layers, steps_of
from recoup.flows.flow import Flow
from recoup.flows.networks import ConvNetwork
from recoup.schedules import Schedule
from recoup.schedules.memory import Memory


class FlowPlusPlus(Flow):
    """The flow of Flow++, for images and for vectors.

    A step is an ActNorm, an invertible 1x1 convolution and a `MixtureCoupling`. Each of the
    `num_levels` scales runs `num_steps` steps on checkerboards; between two scales 2x2 pixels are
    squeezed into channels, and half as many steps run on halves of the channels. The flow does not
    split: there is one latent. A vector has one scale of `num_steps` steps on its halves. With
    `variational` the noise of dequantization is learned too, by four affine couplings that see the
    image.

    With ``memory="constant"`` backward holds one step at a time, whatever the depth, searches the
    inverse of each mixture and runs each network once more; the peak of "linear" grows with
    ``num_levels * num_steps`` times the components.

    The paper's size for CIFAR-10 is about ``FlowPlusPlus((3, 32, 32), levels=256, width=96,
    depth=10, num_components=32, dropout=0.2, variational=True)``; its networks have gates and
    self-attention, which the networks here lack.

    Args:
        shape: Shape ``(C, H, W)`` of one image, H and W multiples of ``2**num_levels``; or
            ``(D,)`` of one vector, D at least 2.
        levels: Number of grey levels of the data, 17 or 256 for instance; None for continuous
            data, which are then taken as they are.
        num_levels: Number of scales of images.
        num_steps: Number of steps on checkerboards at each scale.
        width: Channels inside the networks of the couplings.
        depth: Depth of these networks, see `ConvNetwork` and `DenseNetwork`.
        num_components: Number of logistics in each mixture.
        alpha: With `levels`, the margin of the `Logit` that comes first.
        dropout: Probability of dropout inside the networks.
        num_classes: Number of classes of a conditional flow; None for no labels.
        variational: Whether dequantization is learned; for images with `levels`.
        memory: Memory mode of the chain, see `recoup.invertible.Chain`.
        base: Distribution of the latents, standard normal by default.

    Raises:
        ValueError: When an argument is out of its range.

    Example:
        >>> import torch
        >>> from recoup.flows import FlowPlusPlus
        >>> flow = FlowPlusPlus((1, 8, 8), levels=17, num_steps=2, width=8, variational=True)
        >>> flow.bits_per_dim(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3])
        >>> FlowPlusPlus((2,), levels=None).sample(5).shape
        torch.Size([5, 2])

    Ho et al., "Flow++", https://arxiv.org/abs/1902.00275.
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
        num_components: int = 8,
        alpha: float = 0.05,
        dropout: float = 0.0,
        num_classes: int | None = None,
        variational: bool = False,
        memory: Memory = "linear",
        base: Distribution | None = None,
    ) -> None:
        check_counts(num_levels=num_levels, num_steps=num_steps, num_components=num_components)
        check_counts(num_classes=num_classes)
        is_image = check_shape(shape, num_levels)
        steps = partial(
            steps_of, couple=partial(invertible.MixtureCoupling, num_components=num_components),
            copies=3 * num_components + 2, before=_before, width=width, depth=depth,
            dropout=dropout, num_context=num_classes or 0,
        )  # fmt: skip
        size = shape[0]
        stages = first_layers(levels, alpha)
        stages += steps("checkerboard" if is_image else "vector", size, num_steps)
        for _ in range(num_levels - 1 if is_image else 0):
            size *= 4
            stages += [
                invertible.Squeeze(),
                *steps("channels", size, (num_steps + 1) // 2),
                *steps("checkerboard", size, num_steps),
            ]
        noise = _dequantize(shape, levels, width, dropout, memory) if variational else None
        super().__init__(
            invertible.Chain(*stages, memory=memory), shape=shape, levels=levels, base=base,
            dequantize=noise, num_classes=num_classes,
        )  # fmt: skip


def _before(num_channels: int) -> list[invertible.InvertibleModule]:
    mixing = [invertible.InvertibleConv1x1(num_channels)] if num_channels > 1 else []
    return [invertible.ActNorm(num_channels), *mixing]


def _dequantize(
    shape: Sequence[int], levels: int | None, width: int, dropout: float, memory: Memory
) -> invertible.VariationalDequantize:
    if levels is None or len(shape) != 3:
        raise ValueError(
            f"`variational` is for images of grey levels, but `shape` is {tuple(shape)} and "
            f"`levels` is {levels}. Give both, or leave `variational` out."
        )
    c = shape[0]
    couplings = [
        invertible.AffineCoupling(
            ConvNetwork(c, 2 * c, width=width, dropout=dropout, num_context=c),
            condition=condition,
            split="checkerboard",
        )
        for condition in ("first", "second", "first", "second")
    ]
    # A schedule is made for one chain, so the chain of the noise does not get it.
    return invertible.VariationalDequantize(
        levels,
        invertible.Chain(*couplings, memory="linear" if isinstance(memory, Schedule) else memory),
    )
