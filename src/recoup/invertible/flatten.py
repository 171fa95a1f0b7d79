"""Flatten: turn each sample into a vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recoup.invertible.contract import InvertibleModule
from recoup.invertible.shapes import zero_log_det

__all__ = ["Flatten"]


class Flatten(InvertibleModule):
    """Turn samples of any shape into vectors: ``(N, *shape)`` becomes ``(N, D)``.

    The order is that of memory: the last dimension runs fastest. Autograd keeps nothing.

    Args:
        shape: Shape of one sample, without the batch; `inverse` needs it.

    Raises:
        ValueError: When a size of `shape` is below 1, or the input has another shape.

    Example:
        >>> import torch
        >>> from recoup.invertible import Flatten
        >>> y, log_det = Flatten((1, 2, 2))(torch.arange(4.0).view(1, 1, 2, 2))
        >>> y.tolist()
        [[0.0, 1.0, 2.0, 3.0]]
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = torch.Size(shape)
        if not self.shape or min(self.shape) < 1:
            raise ValueError(
                f"`shape` is {tuple(shape)}, but must hold at least one size, each at least 1."
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Flatten `x` of shape ``(N, *shape)``; returns ``(y, log_det)``."""
        self._check("x", x, self.shape)
        return x.reshape(x.shape[0], self.shape.numel()), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, D)``; returns ``(x, log_det)``."""
        self._check("y", y, (self.shape.numel(),))
        return y.reshape(y.shape[0], *self.shape), zero_log_det(y)

    def _check(self, name: str, value: Tensor, shape: Sequence[int]) -> None:
        if tuple(value.shape[1:]) != tuple(shape):
            raise ValueError(
                f"`{name}` has shape {tuple(value.shape)}, but Flatten for `shape` "
                f"{tuple(self.shape)} needs (N, {', '.join(map(str, shape))}). Build the layer "
                f"with the `shape` of one sample."
            )

    def extra_repr(self) -> str:
        """Show the shape."""
        return str(tuple(self.shape))
