"""Permute and Flip: change the order of the channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recoup.invertible.contract import InvertibleModule
from recoup.invertible.shapes import check_channels, check_not_batch, zero_log_det

__all__ = ["Flip", "Permute"]


class Permute(InvertibleModule):
    """Reorder the channels: channel i of the output is channel ``permutation[i]`` of the input.

    The order is fixed, a buffer in the state dict. Autograd keeps only the order.

    Args:
        permutation: The order as numbers from 0 to C - 1, or C itself for a random order from
            torch's default generator.

    Raises:
        ValueError: When `permutation` misses or repeats a number, or when the input has another
            number of channels.

    Example:
        >>> import torch
        >>> from recoup.invertible import Permute
        >>> y, log_det = Permute([2, 0, 1])(torch.tensor([[10.0, 20.0, 30.0]]))
        >>> y.tolist()
        [[30.0, 10.0, 20.0]]
    """

    permutation: Tensor

    def __init__(self, permutation: int | Sequence[int]) -> None:
        super().__init__()
        if isinstance(permutation, int):
            order = torch.randperm(permutation)
        else:
            order = torch.tensor(list(permutation), dtype=torch.int64)
        if order.sort().values.tolist() != list(range(order.numel())):
            raise ValueError(
                f"`permutation` is {order.tolist()}, but must hold each number from 0 to "
                f"{order.numel() - 1} once. Give the number of channels for a random order."
            )
        self.register_buffer("permutation", order)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reorder `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        check_channels(x, self.permutation.numel())
        return x.index_select(1, self.permutation), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        check_channels(y, self.permutation.numel())
        return y.index_select(1, self.permutation.argsort()), zero_log_det(y)

    def extra_repr(self) -> str:
        """Show the number of channels."""
        return str(self.permutation.numel())


class Flip(InvertibleModule):
    """Reverse the order along one dimension, so that the next coupling changes the other half.

    Autograd keeps nothing.

    Args:
        dim: The dimension to reverse; not 0, the batch.

    Raises:
        ValueError: When `dim` is the batch.

    Example:
        >>> import torch
        >>> from recoup.invertible import Flip
        >>> y, log_det = Flip()(torch.tensor([[1.0, 2.0, 3.0]]))
        >>> y.tolist()
        [[3.0, 2.0, 1.0]]
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        if dim == 0:
            raise ValueError("`dim` is 0, the batch; reversing it mixes samples. Use 1, channels.")
        self.dim = dim

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reverse `x` of shape ``(N, ...)``; returns ``(y, log_det)``."""
        check_not_batch(x, self.dim)
        return x.flip(self.dim), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` by reversing once more; returns ``(x, log_det)``."""
        check_not_batch(y, self.dim)
        return y.flip(self.dim), zero_log_det(y)

    def extra_repr(self) -> str:
        """Show the dimension."""
        return f"dim={self.dim}"
