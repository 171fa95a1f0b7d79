"""NICE, RealNVP, Glow and Flow++: flows of couplings, for vectors and for images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

from torch.distributions import Distribution

from recoup import invertible
from recoup._arguments import check_choice, check_flag, check_whole
from recoup.flows.flow import Flow
from recoup.flows.latents import Logistic
from recoup.flows.networks import check_counts, check_shape, first_layers, steps_of
from recoup.schedules import Schedule
from recoup.schedules.memory import Memory

# Of the grid of exact couplings: 256 points or more between two levels, exact sums to 1024.
_FRACTION_BITS = 14
_MOST_LEVELS = 2**14


class NICE(Flow):
    """The flow of NICE, for samples of any shape: additive couplings of vectors, and one scaling.

    A sample is one vector; `num_couplings` additive couplings, which preserve volume, change its
    even and odd entries in turn, and an ActNorm at the end scales each entry: the only layer that
    changes volume. Every network sees half of the whole sample, so its size grows with the data's.

    With ``memory="constant"`` backward holds one coupling at a time, whatever the depth, and runs
    each network once more; the peak of "linear" grows with `num_couplings`. With ``exact=True``
    the couplings work on a grid, and their inverse is bitwise exact.

    The paper's size for MNIST is ``NICE((1, 28, 28), levels=256, width=1000, depth=5)``.

    Args:
        shape: Shape of one sample, of at least 2 values.
        levels: Number of grey levels of the data, 17 or 256 for instance; None for continuous data.
        num_couplings: Number of couplings.
        width: Width of their networks.
        depth: Number of hidden layers of their networks.
        exact: Whether the couplings work on a grid, see `recoup.invertible.AdditiveCoupling`.
        dropout: Probability of dropout inside the networks.
        num_classes: Number of classes of a conditional flow; None for no labels.
        memory: Memory mode of the chain, see `recoup.invertible.Chain`.
        base: Distribution of the latents, `Logistic` by default, as in the paper.

    Raises:
        ValueError: When an argument is out of its range.

    Example:
        >>> import torch
        >>> from recoup.flows import NICE
        >>> flow = NICE((1, 8, 8), levels=17, width=32, exact=True, memory="constant")
        >>> flow.bits_per_dim(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3])
        >>> flow.sample(2).shape
        torch.Size([2, 1, 8, 8])

    Dinh et al., "NICE", https://arxiv.org/abs/1410.8516.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        levels: int | None,
        num_couplings: int = 4,
        width: int = 64,
        depth: int = 3,
        exact: bool = False,
        dropout: float = 0.0,
        num_classes: int | None = None,
        memory: Memory = "linear",
        base: Distribution | None = None,
    ) -> None:
        check_counts(num_couplings=num_couplings, width=width, num_classes=num_classes)
        check_flag(exact=exact)
        flatten = invertible.Flatten(shape)
        size = flatten.shape.numel()
        if size < 2:
            raise ValueError(f"`shape` is {tuple(shape)}, but a coupling needs at least 2 values.")
        if levels is not None:
            check_whole(2, levels=levels)
        if exact and levels is not None and levels > _MOST_LEVELS:
            raise ValueError(
                f"`levels` is {levels}, but with `exact` at most {_MOST_LEVELS} can be told "
                "apart on the grid. Use `exact=False`, or fewer levels."
            )
        stages: list[invertible.InvertibleModule] = [] if levels is None else [_scaling(levels)]
        # The even entries first: the halves of a coupling are then the even and the odd ones.
        stages += [flatten, invertible.Permute([*range(0, size, 2), *range(1, size, 2)])]
        couple = partial(invertible.AdditiveCoupling, exact=exact, fraction_bits=_FRACTION_BITS)
        stages += steps_of(
            "vector", size, num_couplings, couple=couple, copies=1, before=lambda _: [],
            width=width, depth=depth, dropout=dropout, num_context=num_classes or 0,
        )  # fmt: skip
        chain = invertible.Chain(*stages, invertible.ActNorm(size), memory=memory)
        base = Logistic(0.0, 1.0) if base is None else base
        super().__init__(chain, shape=shape, levels=levels, base=base, num_classes=num_classes)


def _scaling(levels: int) -> invertible.Normalize:
    """Centre the unit interval, about 4 wide, with the level boundaries between grid points.

    The distance of two levels becomes a power of two, and their boundary the middle of two points
    of the grid: so a coupling that rounds to the grid moves no value to another level.
    """
    width = levels * 2.0 ** round(math.log2(4 / levels))
    return invertible.Normalize(0.5 - 2.0 ** -(_FRACTION_BITS + 1) / width, 1 / width)


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
        levels: Number of grey levels of the data, 17 or 256 for instance; None for continuous data.
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
            steps_of, couple=invertible.AffineCoupling, copies=2, before=_act_norm, width=width,
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


class Glow(Flow):
    """The flow of Glow, for images.

    Each of the `num_levels` scales squeezes 2x2 pixels into channels, runs ActNorm, an
    invertible 1x1 convolution and a coupling `num_steps` times, and, except the last, sends half
    of the channels to the latents.

    With ``memory="constant"`` backward holds one step at a time, whatever the depth, and runs
    each network once more; the peak of "linear" grows with ``num_levels * num_steps``.

    Args:
        shape: Shape ``(C, H, W)`` of one image; H and W multiples of ``2**num_levels``.
        levels: Number of grey levels of the data, 17 or 256 for instance; None for continuous data.
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
        is_affine = coupling == "affine"
        couple = invertible.AffineCoupling if is_affine else invertible.AdditiveCoupling
        mix = invertible.InvertibleConv1x1 if conv1x1 == "plain" else invertible.InvertibleConv1x1LU
        stages = first_layers(levels, alpha)
        num_channels = shape[0]
        for level in range(num_levels):
            if level:
                stages += [invertible.Split()]
                num_channels //= 2
            num_channels *= 4
            stages += [invertible.Squeeze()]
            stages += steps_of(
                "channels", num_channels, num_steps, couple=couple, copies=1 + is_affine,
                before=lambda size: [invertible.ActNorm(size), mix(size)], alternates=False,
                width=width, dropout=dropout, num_context=num_classes or 0,
            )  # fmt: skip
        chain = invertible.Chain(*stages, memory=memory)
        super().__init__(chain, shape=shape, levels=levels, base=base, num_classes=num_classes)


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
        levels: Number of grey levels of the data, 17 or 256 for instance; None for continuous data.
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
        check_flag(variational=variational)
        is_image = check_shape(shape, num_levels)
        steps = partial(
            steps_of, couple=partial(invertible.MixtureCoupling, num_components=num_components),
            copies=3 * num_components + 2, before=_mixed, width=width, depth=depth,
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


def _act_norm(num_channels: int) -> list[invertible.InvertibleModule]:
    return [invertible.ActNorm(num_channels)]


def _mixed(num_channels: int) -> list[invertible.InvertibleModule]:
    mixing = [invertible.InvertibleConv1x1(num_channels)] if num_channels > 1 else []
    return [*_act_norm(num_channels), *mixing]


def _dequantize(
    shape: Sequence[int], levels: int | None, width: int, dropout: float, memory: Memory
) -> invertible.VariationalDequantize:
    if levels is None or len(shape) != 3:
        raise ValueError(
            f"`variational` is for images of grey levels, but `shape` is {tuple(shape)} and "
            f"`levels` is {levels}. Give both, or leave `variational` out."
        )
    c = shape[0]
    couplings = steps_of(
        "checkerboard", c, 4, couple=invertible.AffineCoupling, copies=2, before=lambda _: [],
        width=width, dropout=dropout, num_context=c,
    )  # fmt: skip
    # A schedule is made for one chain, so the chain of the noise does not get it.
    memory = "linear" if isinstance(memory, Schedule) else memory
    return invertible.VariationalDequantize(levels, invertible.Chain(*couplings, memory=memory))
