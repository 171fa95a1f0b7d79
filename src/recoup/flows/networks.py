"""The networks inside couplings, and the context that they see: class labels as one-hot rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from recoup._arguments import check_real, check_whole, shown


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
        """Map `input` to the output.

        Args:
            input: Shape ``(N, C, ...)``, with the channels or features of the input.
            context: Shape ``(N, num_context)``, the same at every position, or
                ``(N, num_context, ...)`` with the positions of the input.
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
        _check(width, depth, num_context)
        check_whole(in_channels=in_channels, out_channels=out_channels)
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
        _check(width, depth, num_context)
        check_whole(in_features=in_features, out_features=out_features)
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
        super().__init__(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, input: Tensor) -> Tensor:
        return input + cast("Tensor", super().forward(input))


def check_layers(**counts: int) -> None:
    """Raise ValueError unless each argument is a number of layers that can be made."""
    check_whole(**counts)
    for name, value in counts.items():
        if value > 10_000:  # they are made one by one
            raise ValueError(f"`{name}` is {value}, but must be at most 10,000.")


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


def _check(width: int, depth: int, num_context: int) -> None:
    check_whole(width=width)
    check_whole(0, num_context=num_context)
    check_layers(depth=depth)


def check_labels(labels: object, num_classes: int, num_samples: int, name: str = "labels") -> None:
    """Raise ValueError unless `labels`, in errors `name`, are `num_samples` of the classes."""
    needed = f"this flow has {num_classes} classes: give whole numbers, 0 to {num_classes - 1},"
    if (
        not isinstance(labels, Tensor)
        or labels.shape != (num_samples,)
        or labels.is_floating_point()
        or labels.is_complex()
        or labels.dtype == torch.bool
    ):
        of_tensor = isinstance(labels, Tensor)
        got = (
            f"of type {labels.dtype} and shape {tuple(labels.shape)}"
            if of_tensor
            else shown(labels)
        )
        raise ValueError(
            f"`{name}` is {got}, but {needed} of shape ({num_samples},), one a sample."
        )
    # On CUDA this synchronises; without it a wrong label would be a fatal device error.
    if num_samples and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"`{name}` holds {int(labels.min())} to {int(labels.max())}, but {needed} or build "
            "the flow with a larger `num_classes`."
        )
