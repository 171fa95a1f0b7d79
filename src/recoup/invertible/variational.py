"""VariationalDequantize: turn whole grey levels into real numbers by learned noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from recoup._core.random_sources import own_generator
from recoup._core.rng import draw_seed
from recoup.invertible.chain import Chain
from recoup.invertible.dequantize import Dequantize
from recoup.schedules.memory import Memory

__all__ = ["VariationalDequantize"]


class VariationalDequantize(Dequantize):
    """Add learned noise to whole numbers and scale to the unit interval: ``(x + u) / levels``.

    The noise is ``u = sigmoid(chain(eps, image))`` with standard normal eps, where the image is
    scaled to ``[-0.5, 0.5]``. Its log-density is subtracted, so that ``E[log p(y) + log_det]``
    bounds ``log P(x)`` from below for any noise, and noise that suits the density gives a tighter
    bound than uniform noise. The chain is trained with the flow, by the same loss.

    The noise is squeezed into an interval that ends a few rounding errors inside of 0 and 1, so
    that none is rounded to the next level. The bound accounts for the narrower interval, at 2e-4
    bits a value for 256 levels in float32; clamping the noise would break it. `inverse` rounds
    down, which recovers the data exactly, and inverts the chain for its log-determinant.

    The `memory` of the chain decides what autograd keeps and what backward pays. In a `Chain` in
    constant memory the layer is recomputed from the levels: the sum has too few digits to recover
    the noise from it.

    Args:
        levels: The number of grey levels, at least 2; the data are 0 to ``levels - 1``.
        chain: Maps noise of the data's shape to noise of the same shape, so a Squeeze must be
            undone in it and a Split is not allowed. Networks that take a context get the image
            ``(N, C, ...)``.

    Raises:
        ValueError: When `levels` is not a whole number above 1, when the chain changes the shape,
            or when the data are not levels, as in `Dequantize`.

    Example:
        >>> import torch
        >>> from recoup.flows import ConvNetwork
        >>> from recoup.invertible import AffineCoupling, Chain, VariationalDequantize
        >>> network = ConvNetwork(1, 2, width=8, num_context=1)
        >>> layer = VariationalDequantize(17, Chain(AffineCoupling(network, split="checkerboard")))
        >>> x = torch.full((3, 1, 4, 4), 16)
        >>> y, log_det = layer(x)
        >>> torch.equal(layer.inverse(y)[0], x.float()), log_det.shape
        (True, torch.Size([3]))

    Ho et al., "Flow++", https://arxiv.org/abs/1902.00275, section 3.1.
    """

    inverts_in_backward = False

    def __init__(self, levels: int, chain: Chain) -> None:
        super().__init__(levels)
        self.chain = chain

    @property
    def memory(self) -> Memory:
        """The memory mode of the chain; may be set at any time."""
        return self.chain.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self.chain.memory = memory

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantise `x` ``(N, ...)`` of whole numbers, of any type; returns ``(y, log_det)``."""
        self._look_at(x)
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        generator = own_generator(x.device, draw_seed())
        eps = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        z, log_det = self.chain(eps, *self._context(x))
        if not isinstance(z, Tensor) or z.shape != x.shape:
            shapes = z.shape if isinstance(z, Tensor) else [part.shape for part in z]
            raise ValueError(
                f"The chain of VariationalDequantize made noise of shape {shapes} for data of "
                f"shape {tuple(x.shape)}. Undo a Squeeze at its end, and use no Split."
            )
        margin = self._margin(x.dtype)
        y = (x + margin + (1 - 2 * margin) * torch.sigmoid(z)) / self.levels
        return y, self._entropy(eps, z, margin) + log_det + self._log_det(y)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Round `y` of shape ``(N, ...)`` down to a level; returns ``(x, log_det)``, x floating.

        The log-determinant is minus infinity where `forward` cannot produce such noise.
        """
        x, _ = super().inverse(y)
        margin = self._margin(y.dtype)
        unit = (y * self.levels - x - margin) / (1 - 2 * margin)
        tiny = torch.finfo(y.dtype).eps
        z = torch.logit(unit.clamp(tiny, 1 - tiny))
        eps, log_det = self.chain.inverse(z, *self._context(x))
        total = log_det - self._entropy(eps, z, margin) - self._log_det(y)
        is_inside = ((unit > 0) & (unit < 1)).flatten(1).all(1)
        return x, total.where(is_inside, -math.inf)

    def _context(self, x: Tensor) -> tuple[Tensor, ...]:
        return ((x + 0.5) / self.levels - 0.5,) if self.chain.takes_context else ()

    def _margin(self, dtype: torch.dtype) -> float:
        # The addition, the division and the inverse each lose half a rounding error of `levels`.
        return min(0.25, 2 * self.levels * torch.finfo(dtype).eps)

    def _entropy(self, eps: Tensor, z: Tensor, margin: float) -> Tensor:
        """Return minus the noise's log-density ``(N,)``, without the chain's log-determinant."""
        normal = 0.5 * eps.square() + 0.5 * math.log(2 * math.pi)
        slopes = z - 2 * functional.softplus(z)  # log of the sigmoid's derivative
        return (normal + slopes + math.log1p(-2 * margin)).flatten(1).sum(1)
