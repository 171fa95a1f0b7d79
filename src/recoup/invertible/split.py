"""Split: turn half of the values into latents early."""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.invertible.contract import InvertibleModule
from recoup.invertible.shapes import check_not_batch, zero_log_det

__all__ = ["Split"]


class Split(InvertibleModule):
    """Cut a tensor in two: one part goes on, the other is a latent from here on.

    In a `Chain` the part that goes on is the input of the next stage, and the other part appears
    in the chain's output: the latents in the order in which they were split off, the last one at
    the end. Autograd keeps nothing.

    Args:
        dim: The dimension to cut; not 0, the batch. If its size is odd, the part that goes on
            gets the extra value.

    Raises:
        ValueError: When `dim` is the batch, or the input has fewer than 2 values along `dim`.

    Example:
        >>> import torch
        >>> from recoup.invertible import Split
        >>> (h, z), log_det = Split()(torch.zeros(5, 4, 2, 2))
        >>> h.shape, z.shape
        (torch.Size([5, 2, 2, 2]), torch.Size([5, 2, 2, 2]))

    Dinh et al., "Density estimation using Real NVP", https://arxiv.org/abs/1605.08803,
    section 3.6.
    """

    num_early = 1

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        if dim == 0:
            raise ValueError("`dim` is 0, the batch; samples must stay whole. Use 1, the channels.")
        self.dim = dim

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Cut `x` of shape ``(N, ...)``; returns ``((h, z), log_det)``."""
        check_not_batch(x, self.dim)
        if not -x.dim() < self.dim < x.dim() or x.shape[self.dim] < 2:
            raise ValueError(
                f"`x` has shape {tuple(x.shape)}, but Split needs at least 2 values along its "
                f"`dim` {self.dim}. Squeeze first, or use fewer levels."
            )
        h, z = x.tensor_split(2, dim=self.dim)
        # A latent lives as long as the loss. A view would keep the storage of x that long.
        return (h, z.clone()), zero_log_det(x)

    def inverse(self, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Concatenate ``(h, z)``; returns ``(x, log_det)``."""
        x = torch.cat(y, dim=self.dim)
        return x, zero_log_det(x)

    def extra_repr(self) -> str:
        """Show the dimension."""
        return f"dim={self.dim}"
