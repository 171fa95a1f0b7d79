"""Dequantize: whole grey levels become real numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recoup.invertible.contract import InvertibleModule
from recoup.residuals.seeds import draw_seed
from recoup.residuals.sources import own_generator

__all__ = ["Dequantize"]


class Dequantize(InvertibleModule):
    """Add uniform noise to whole numbers and scale to the unit interval: ``(x + u) / levels``.

    With it a density over real numbers bounds the probability of discrete data:
    ``E[log p(y) + log_det] <= log P(x)``. `inverse` rounds down and finds the data again exactly.

    The noise follows from one seed a call, an int64 from torch's default CPU generator, so that a
    replay of the layer needs 8 bytes. Its values lie in the middle of a fine grid of equal cells:
    noise of full resolution would now and then be rounded up to the next level. Autograd keeps
    nothing.

    Args:
        levels: The number of grey levels; the data are 0 to ``levels - 1``.

    Raises:
        ValueError: When `levels` is below 1.

    Example:
        >>> import torch
        >>> from recoup.invertible import Dequantize
        >>> layer = Dequantize(17)
        >>> y, log_det = layer(torch.tensor([[0, 16, 3]]))
        >>> layer.inverse(y)[0].tolist()
        [[0.0, 16.0, 3.0]]

    Theis et al., "A note on the evaluation of generative models",
    https://arxiv.org/abs/1511.01844, section 3.1.
    """

    def __init__(self, levels: int) -> None:
        super().__init__()
        if levels < 1:
            raise ValueError(f"`levels` is {levels}, but must be at least 1: 256 for 8-bit images.")
        self.levels = levels

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantise `x` ``(N, ...)`` of whole numbers, of any type; returns ``(y, log_det)``."""
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        y = (x + self._noise(x, dtype)) / self.levels
        return y, self._log_det(y)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Round `y` of shape ``(N, ...)`` down to a level; returns ``(x, log_det)``, x floating."""
        x = (y * self.levels).floor().clamp(0, self.levels - 1)
        return x, -self._log_det(y)

    def _noise(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        # Half a cell is four times the rounding error at the highest level, which is more than
        # the addition, the division and the way back can lose together.
        cells = max(1, int(0.125 / (torch.finfo(dtype).eps * self.levels)))
        generator = own_generator(x.device, draw_seed())
        cell = torch.randint(cells, x.shape, generator=generator, device=x.device)
        return cell.to(dtype).add_(0.5).div_(cells)

    def _log_det(self, y: Tensor) -> Tensor:
        return y.new_full((y.shape[0],), -math.prod(y.shape[1:]) * math.log(self.levels))

    def extra_repr(self) -> str:
        """Show the number of levels."""
        return f"levels={self.levels}"
