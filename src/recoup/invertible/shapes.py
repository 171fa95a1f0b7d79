"""Shape helpers of invertible layers: channels are dimension 1, positions the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from recoup._arguments import is_whole, shown

__all__ = [
    "check_channels",
    "check_not_batch",
    "num_positions",
    "per_channel",
    "per_sample",
    "sizes_of",
    "zero_log_det",
]


def sizes_of(shape: Any) -> torch.Size:
    """Return `shape` as a size, or raise ValueError unless it holds sizes of at least 1."""
    sizes: Sequence[int] = cast("Any", shape) if isinstance(shape, list | tuple) else ()
    if not sizes or not all(is_whole(size) for size in sizes):
        raise ValueError(
            f"`shape` is {shown(cast('object', shape))}, but must hold at least one size, each at "
            "least 1."
        )
    return torch.Size(sizes)


def num_positions(x: Tensor) -> int:
    """Count the positions that share one channel: ``H * W`` for images, 1 for vectors."""
    return math.prod(x.shape[2:])


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """View `values` of shape ``(C,)`` so that it broadcasts over `x` of shape ``(N, C, ...)``."""
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def per_sample(values: Tensor) -> Tensor:
    """Sum `values` of shape ``(N, ...)`` over all but the batch, to ``(N,)``."""
    return values.sum(tuple(range(1, values.dim())))


def zero_log_det(x: Tensor) -> Tensor:
    """Return the log-determinant of a map that preserves volume: zeros of shape ``(N,)``."""
    return x.new_zeros(x.shape[0])


def check_channels(x: Tensor, num_channels: int) -> None:
    """Raise ValueError unless `x` has the shape ``(N, num_channels, ...)``."""
    if x.dim() < 2 or x.shape[1] != num_channels:
        raise ValueError(
            f"`x` has shape {tuple(x.shape)}, but this layer needs (N, {num_channels}, ...). "
            f"Build the layer with `num_channels` equal to the size of dimension 1."
        )


def check_not_batch(x: Tensor, dim: int) -> None:
    """Raise ValueError if `dim`, counted from the end, is the batch dimension of `x`."""
    if dim == -x.dim():
        raise ValueError(
            f"`dim` {dim} is the batch of `x` of shape {tuple(x.shape)}; samples must stay whole. "
            f"Use 1, the channels."
        )
