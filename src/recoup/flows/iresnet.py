"""i-ResNet and Residual Flow: actnorm and invertible residual blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import nn
from torch.distributions import Distribution

from recoup import invertible
from recoup._arguments import check_real
from recoup.flows.flow import Flow
from recoup.flows.networks import check_counts, check_shape, first_layers
from recoup.invertible.residual import LogDet
from recoup.schedules.memory import Memory

_MOST_EXACT = 16  # values a sample, up to which "exact" costs no more than a series


class IResNet(Flow):
    """The flow of invertible residual networks, for images and for vectors.

    Each of the `num_levels` scales squeezes 2x2 pixels into channels and runs ActNorm and
    ``x + g(x)`` `num_steps` times; no channel is split off early. `g` consists, for images, of a
    3x3, a 1x1 and a 3x3 convolution, for vectors of `depth` hidden layers, with `LipSwish` between;
    an ActNorm ends the flow. With ``log_det="unbiased"`` this is a Residual Flow.

    Inverting the blocks in backward would save nothing, so ``memory="constant"`` recomputes each
    from its input, as "inputs" does without a warning; the tape of a block is so much larger than
    its input that "sqrt" and "log" take more. `sample` and `inverse` iterate each block's network
    until they converge, some dozens of times.

    Args:
        shape: Shape of one sample: ``(C, H, W)``, H and W multiples of ``2**num_levels``, or
            ``(D,)``.
        levels: Number of grey levels of the data, 17 or 256 for instance; None for continuous data.
        num_levels: Number of scales; 1 for vectors.
        num_steps: Number of blocks in each scale.
        width: Channels, or features, inside the networks of the blocks.
        depth: Number of hidden layers of those networks.
        coefficient: Bound on the Lipschitz constant of each layer. That of a block is at most
            ``coefficient ** (depth + 1)``.
        log_det: "exact", "series" or "unbiased", see `recoup.invertible.InvertibleResidual`; None
            for "exact" up to 16 values a sample, and "unbiased" above.
        num_terms: Number of terms of the series, the least for "unbiased"; for "series" 8 or more
            are usual.
        alpha: With `levels`, the margin of the `Logit` that comes first; None to only shift the
            data to the middle, ``[-0.5, 0.5]``.
        tolerance: The error at which the inverse of a block ends, see `InvertibleResidual`; None
            for that of its type.
        memory: Memory mode of the chain, see `recoup.invertible.Chain`.
        base: Distribution of the latents, standard normal by default.

    Raises:
        ValueError: When an argument is out of its range.

    Example:
        >>> import torch
        >>> from recoup.flows import IResNet
        >>> flow = IResNet((2,), levels=None, num_steps=2, width=8, memory="sqrt")
        >>> flow.log_prob(torch.zeros(3, 2)).shape
        torch.Size([3])
        >>> flow.sample(4).shape
        torch.Size([4, 2])

    Behrmann et al., "Invertible residual networks", https://arxiv.org/abs/1811.00995; Chen et al.,
    "Residual flows for invertible generative modeling", https://arxiv.org/abs/1906.02735.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        levels: int | None,
        num_levels: int = 1,
        num_steps: int = 8,
        width: int = 64,
        depth: int = 2,
        coefficient: float = 0.9,
        log_det: LogDet | None = None,
        num_terms: int = 4,
        alpha: float | None = 0.05,
        tolerance: float | None = None,
        memory: Memory = "linear",
        base: Distribution | None = None,
    ) -> None:
        check_counts(num_levels=num_levels, num_steps=num_steps, width=width, depth=depth)
        check_real(coefficient=coefficient)
        is_image = check_shape(shape, num_levels, least=1)
        if not is_image and num_levels != 1:
            raise ValueError(
                f"`num_levels` is {num_levels}, but vectors, as of `shape` {tuple(shape)}, have "
                "one scale: `num_levels` 1."
            )
        if log_det is None:
            log_det = "exact" if math.prod(shape) <= _MOST_EXACT else "unbiased"
        stages = first_layers(levels, alpha)
        # Above the square of the constant, so that the variance is bounded for any weights.
        lipschitz = coefficient ** (depth + 1)
        size = shape[0]
        for _ in range(num_levels):
            if is_image:
                stages += [invertible.Squeeze()]
                size *= 4
            for _ in range(num_steps):
                network = _network(size, width, depth, coefficient, is_image=is_image)
                stages += [
                    invertible.ActNorm(size),
                    invertible.InvertibleResidual(
                        network,
                        log_det=log_det,
                        num_terms=num_terms,
                        continuation=max(0.5, lipschitz),
                        tolerance=tolerance,
                    ),
                ]
        stages += [invertible.ActNorm(size)]
        chain = invertible.Chain(*stages, memory=memory)
        super().__init__(chain, shape=shape, levels=levels, base=base)


def _network(
    size: int, width: int, depth: int, coefficient: float, *, is_image: bool
) -> nn.Sequential:
    """Make the network of a block: Lipschitz layers with `LipSwish` between."""
    sizes = [size, *(width,) * depth, size]
    layers: list[nn.Module] = []
    for index, (before, after) in enumerate(itertools.pairwise(sizes)):
        layers += [invertible.LipSwish()] if index else []
        # 3x3 at both ends, where there are few channels, and 1x1 in between.
        kernel = 3 if index in (0, depth) else 1
        layers += [
            invertible.LipschitzConv2d(
                before, after, kernel, padding=kernel // 2, coefficient=coefficient
            )
            if is_image
            else invertible.LipschitzLinear(before, after, coefficient=coefficient)
        ]
    return nn.Sequential(*layers)
