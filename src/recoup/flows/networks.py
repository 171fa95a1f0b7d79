"""The networks inside couplings, steps of couplings over them, and what flows check when built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from recoup._arguments import check_real, check_whole, shown
from recoup.invertible import InvertibleModule, Logit, Normalize
from recoup.invertible.contract import sizes_of


class _Network(nn.Sequential):
    """Layers that end with one that starts at zero, and that may see a context."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        last: nn.Conv2d | nn.Linear,
        dropout: float,
        num_context: int,
    ) -> None:
        check_real(dropout=dropout)
        if not 0 <= dropout <= 1:
            raise ValueError(f"`dropout` is {dropout}, but must be a probability, from 0 to 1.")
        nn.init.zeros_(last.weight)
        if last.bias is not None:
            nn.init.zeros_(last.bias)
        super().__init__(*layers, *([nn.Dropout(dropout)] if dropout else []), last)
        self.num_context = num_context

    @property
    def takes_context(self) -> bool:
        """Whether `forward` takes a context."""
        return self.num_context > 0

    def forward(self, input: Tensor, context: Tensor | None = None) -> Tensor:
        """Map `input` ``(N, C, ...)`` to the output.

        The `context` is ``(N, num_context)``, the same at every position, or with the positions of
        the input.
        """
        return cast("Tensor", super().forward(_with_context(input, context, self.num_context)))


class ConvNetwork(_Network):
    """Three convolutions, 3x3, 1x1, 3x3, with ReLU between: the network of Glow's couplings.

    The last convolution starts at zero, so that a coupling over it starts as the identity. A
    larger `depth` puts residual blocks before it, as in the networks of RealNVP.

    Autograd keeps the input of each convolution: `width` channels at each position, three times,
    and twice more for each residual block.

    Args:
        in_channels: Channels of the input ``(N, in_channels, H, W)``.
        out_channels: Channels of the output; height and width do not change.
        width: Channels in between.
        depth: 1, or 1 and the number of residual blocks, of a 3x3 and a 1x1 convolution each.
        dropout: Probability with which a value in between is dropped, 0 for none.
        num_context: Channels of the context that `forward` takes beside the input; 0 for none.

    Raises:
        ValueError: When an argument is out of its range, or in forward, when a context is missing
            or has another shape.

    Example:
        >>> import torch
        >>> from recoup.flows import ConvNetwork
        >>> ConvNetwork(2, 4, width=8)(torch.zeros(1, 2, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
        >>> labels = torch.eye(10)[[3]]
        >>> ConvNetwork(2, 4, width=8, num_context=10)(torch.zeros(1, 2, 5, 5), labels).shape
        torch.Size([1, 4, 5, 5])

    Kingma and Dhariwal, "Glow", https://arxiv.org/abs/1807.03039, section 4; residual blocks as
    in Dinh et al., "Density estimation using Real NVP", https://arxiv.org/abs/1605.08803,
    section 4.1, without batch normalisation.
    """

    draws_only_in_modules: ClassVar[bool] = True  # only the dropout modules inside draw

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        width: int,
        depth: int = 1,
        dropout: float = 0.0,
        num_context: int = 0,
    ) -> None:
        check_counts(width=width, depth=depth)
        check_whole(in_channels=in_channels, out_channels=out_channels)
        check_whole(0, num_context=num_context)
        last = nn.Conv2d(width, out_channels, 3, padding=1)
        layers: list[nn.Module] = [
            nn.Conv2d(in_channels + num_context, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
            nn.ReLU(),
        ]
        for _ in range(depth - 1):
            layers += [_ResidualBlock(width), nn.ReLU()]
        super().__init__(layers, last, dropout, num_context)


class DenseNetwork(_Network):
    """Linear layers with ReLU between, for couplings of vectors.

    The last layer starts at zero, so that a coupling over it starts as the identity. Autograd
    keeps the input of each layer.

    Args:
        in_features: Size of the input ``(N, in_features)``.
        out_features: Size of the output.
        width: Size in between.
        depth: Number of layers before the last.
        dropout: Probability with which a value before the last layer is dropped, 0 for none.
        num_context: Size of the context that `forward` takes beside the input; 0 for none.

    Raises:
        ValueError: When an argument is out of its range, or in forward, when a context is missing
            or has another shape.

    Example:
        >>> import torch
        >>> from recoup.flows import DenseNetwork
        >>> DenseNetwork(2, 4, width=8)(torch.zeros(1, 2)).tolist()
        [[0.0, 0.0, 0.0, 0.0]]

    Dinh et al., "NICE", https://arxiv.org/abs/1410.8516, section 5.1.
    """

    draws_only_in_modules: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        width: int,
        depth: int = 2,
        dropout: float = 0.0,
        num_context: int = 0,
    ) -> None:
        check_counts(width=width, depth=depth)
        check_whole(in_features=in_features, out_features=out_features)
        check_whole(0, num_context=num_context)
        layers: list[nn.Module] = []
        size = in_features + num_context
        for _ in range(depth):
            layers += [nn.Linear(size, width), nn.ReLU()]
            size = width
        super().__init__(layers, nn.Linear(width, out_features), dropout, num_context)


class _ResidualBlock(nn.Sequential):
    """Add to the input what two convolutions compute from it."""

    draws_only_in_modules: ClassVar[bool] = True

    def __init__(self, width: int) -> None:
        first, second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        super().__init__(first, nn.ReLU(), second)

    def forward(self, input: Tensor) -> Tensor:
        return input + cast("Tensor", super().forward(input))


def _with_context(x: Tensor, context: Tensor | None, num_context: int) -> Tensor:
    """Append the context to the channels of `x`, at every position."""
    if num_context == 0:
        return x
    size = (x.shape[0], num_context)
    if context is None or context.shape not in (size, (*size, *x.shape[2:])):
        got = "None" if context is None else f"of shape {tuple(context.shape)}"
        raise ValueError(
            f"`context` is {got}, but this network needs {size} for an input of shape "
            f"{tuple(x.shape)}. Give a context, or build the network with `num_context` 0."
        )
    if context.dim() < x.dim():
        context = context.view(*size, *(1,) * (x.dim() - 2)).expand(*size, *x.shape[2:])
    return torch.cat((x, context.to(x.dtype)), dim=1)


# -- steps of couplings ----------------------------------------------------------------------------


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
    """Make steps: layers that `before` makes for a number of channels, and a coupling.

    Couplings split vectors, or the channels of images, in halves, or images as checkerboards; every
    second one changes the other part, if it `alternates`. `couple` makes one from its network,
    which has these `options` and returns so many `copies` of each value that is changed.
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
        where: Any = {"condition": "first" if is_first else "second"}
        stages += [couple(network, split="checkerboard" if is_board else "channels", **where)]
    return stages


# -- checks ----------------------------------------------------------------------------------------


def check_counts(*, width: int = 1, num_classes: int | None = None, **layers: int) -> None:
    """Raise ValueError unless every count is a whole number of at least 1; None is no class."""
    check_whole(width=width, num_classes=1 if num_classes is None else num_classes, **layers)
    for name, value in layers.items():
        if value > 10_000:  # they are made one by one
            raise ValueError(f"`{name}` is {value}, but must be at most 10,000.")


def check_shape(shape: Sequence[int], num_levels: int, *, least: int | None = 2) -> bool:
    """Return whether `shape` is that of images, or raise ValueError if it fits no flow.

    H and W of ``(C, H, W)`` can be halved `num_levels` times; D of ``(D,)`` is `least` or more,
    which is None where vectors are not taken.
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
    """Return the layer that maps dequantised data to where a flow starts; none without `levels`."""
    if alpha is not None:
        check_real(alpha=alpha)
    if levels is None:
        return []
    return [Normalize(0.5, 1.0) if alpha is None else Logit(alpha)]


def check_labels(labels: object, num_classes: int, num_samples: int, name: str = "labels") -> None:
    """Raise ValueError unless `labels`, in errors `name`, are `num_samples` of the classes."""
    needed = f"this flow has {num_classes} classes: give whole numbers, 0 to {num_classes - 1},"
    got, is_whole = "", False
    if isinstance(labels, Tensor):
        got = f"of type {labels.dtype} and shape {tuple(labels.shape)}"
        is_whole = not (labels.is_floating_point() or labels.is_complex())
        is_whole &= labels.dtype != torch.bool and labels.shape == (num_samples,)
    if not isinstance(labels, Tensor) or not is_whole:
        needed = f"{needed} of shape ({num_samples},), one a sample"
        raise ValueError(f"`{name}` is {got or shown(labels)}, but {needed}.")
    # On CUDA this synchronises; without it a wrong label would be a fatal device error.
    if num_samples and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"`{name}` holds {int(labels.min())} to {int(labels.max())}, but {needed} or build "
            "the flow with a larger `num_classes`."
        )
