"""AffineCoupling: scale and shift one part by what a network computes from the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recoup._arguments import check_real
from recoup.invertible.coupling import Condition, Coupling, Partition
from recoup.invertible.shapes import per_sample

__all__ = ["AffineCoupling"]


class AffineCoupling(Coupling):
    """Scale and shift one half of the channels by what a network computes from the other half.

    ``y1 = x1, y2 = x2 * exp(log_scale) + shift`` with ``shift, raw = network(x1).chunk(2, dim=1)``
    and ``log_scale = bound * tanh(raw / bound)``. The scale stays between ``exp(-bound)`` and
    ``exp(bound)`` whatever the network returns, so the inverse of one layer never magnifies an
    error by more than ``exp(bound)``; a network that returns zeros gives the identity. The network
    need not be invertible; it runs once in forward and once in inverse. With a second one, ``g``,
    the given half is then changed in the same way by what ``g`` computes from ``y2``.

    Autograd keeps what the networks keep, the input, and two tensors of the size of each half that
    is changed.

    Args:
        network: Maps the conditioning half to twice the channels of the other half. The first half
            of C channels has ``(C + 1) // 2``, the second ``C // 2``.
        g: Optional second network, from the changed half to twice the channels of the other.
        condition: Which half `network` sees, "first" or "second".
        split: "channels", or "checkerboard" for images: see `Coupling`.
        bound: The largest absolute log-scale, above 0.

    Raises:
        ValueError: When an argument is out of range, when the input has fewer than 2 channels, or
            when the network returns another shape than needed.

    Example:
        >>> import torch
        >>> from recoup.invertible import AffineCoupling
        >>> layer = AffineCoupling(torch.nn.Linear(2, 4))
        >>> y, log_det = layer(torch.ones(1, 4))
        >>> torch.allclose(layer.inverse(y)[0], torch.ones(1, 4)), log_det.shape
        (True, torch.Size([1]))

    Dinh et al., "Density estimation using Real NVP", https://arxiv.org/abs/1605.08803.
    """

    def __init__(
        self,
        network: nn.Module,
        g: nn.Module | None = None,
        *,
        condition: Condition = "first",
        split: Partition = "channels",
        bound: float = 2.0,
    ) -> None:
        super().__init__(network, g, condition, split)
        check_real(bound=bound)
        if not bound > 0:
            raise ValueError(f"`bound` is {bound}, but must be above 0; 2.0 is usual.")
        self.bound = bound

    def _change(
        self, network: nn.Module, given: Tensor, changed: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        shift, scale, log_det = self._evaluate_network(
            network, given, changed, 2, context, self._shift_scale_and_log_det
        )
        return torch.addcmul(shift, changed, scale), log_det

    def _change_back(
        self, network: nn.Module, given: Tensor, changed: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        shift, scale, log_det = self._evaluate_network(
            network, given, changed, 2, context, self._shift_scale_and_log_det
        )
        return (changed - shift) / scale, -log_det

    def _shift_scale_and_log_det(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shift, raw = values.chunk(2, dim=1)
        log_scale = self.bound * torch.tanh(raw / self.bound)
        return shift, log_scale.exp(), per_sample(log_scale)

    def extra_repr(self) -> str:
        """Show which half is the condition, and the bound."""
        return f"{super().extra_repr()}, bound={self.bound:g}"
