"""Squeeze: trade height and width for channels."""

from __future__ import annotations

from torch import Tensor

from recoup.invertible.contract import InvertibleModule
from recoup.invertible.shapes import zero_log_det

__all__ = ["Squeeze"]


class Squeeze(InvertibleModule):
    """Turn each patch of ``factor x factor`` pixels into ``factor * factor`` channels.

    ``(N, C, H, W)`` becomes ``(N, C * factor**2, H / factor, W / factor)``: space to depth. The
    channels of one patch are neighbours, row by row. Autograd keeps nothing.

    Args:
        factor: Side of a patch in pixels.

    Raises:
        ValueError: When `factor` is below 1, when a height or width is not a multiple of it, or,
            in inverse, when the channels are not a multiple of its square.

    Example:
        >>> import torch
        >>> from recoup.invertible import Squeeze
        >>> y, log_det = Squeeze()(torch.arange(16.0).view(1, 1, 4, 4))
        >>> y[0, :, 0, 0].tolist()
        [0.0, 1.0, 4.0, 5.0]

    Dinh et al., "Density estimation using Real NVP", https://arxiv.org/abs/1605.08803,
    section 3.6.
    """

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        if factor < 1:
            raise ValueError(f"`factor` is {factor}, but must be at least 1; 2 is usual.")
        self.factor = factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Squeeze `x` of shape ``(N, C, H, W)``; returns ``(y, log_det)``."""
        if x.dim() != 4 or x.shape[2] % self.factor or x.shape[3] % self.factor:
            raise ValueError(
                f"`x` has shape {tuple(x.shape)}, but Squeeze with `factor` {self.factor} needs "
                f"(N, C, H, W) with H and W multiples of {self.factor}. Crop or pad the images, "
                f"or use fewer levels."
            )
        n, c, h, w = x.shape
        f = self.factor
        # Written out, as `pixel_unshuffle` does not reshape an empty batch.
        patches = x.reshape(n, c, h // f, f, w // f, f).permute(0, 1, 3, 5, 2, 4)
        return patches.reshape(n, c * f * f, h // f, w // f), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, H, W)``; returns ``(x, log_det)``."""
        if y.dim() != 4 or y.shape[1] % self.factor**2:
            raise ValueError(
                f"`y` has shape {tuple(y.shape)}, but the inverse of Squeeze with `factor` "
                f"{self.factor} needs (N, C, H, W) with C a multiple of {self.factor**2}."
            )
        n, c, h, w = y.shape
        f = self.factor
        patches = y.reshape(n, c // (f * f), f, f, h, w).permute(0, 1, 4, 2, 5, 3)
        return patches.reshape(n, c // (f * f), h * f, w * f), zero_log_det(y)

    def extra_repr(self) -> str:
        """Show the factor."""
        return f"factor={self.factor}"
