"""Fixed maps that bring data into the range in which a flow starts: Normalize and Logit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from recoup._arguments import check_real
from recoup.invertible.contract import InvertibleModule, check_channels, num_positions, per_channel

__all__ = ["Logit", "Normalize"]


def _numbers(name: str, given: Any) -> list[float]:
    """The numbers of `mean` or `std`; one that is no number is an error."""
    if isinstance(given, Tensor):
        given = cast("Any", given.tolist())
    values = cast("Sequence[Any]", given if isinstance(given, list | tuple) else [given])
    for each in values:
        if not isinstance(each, float):  # those are looked at together
            check_real(**{name: each})
    if not values:
        raise ValueError(f"`{name}` is empty, but must hold a number, or one for each channel.")
    return [float(each) for each in values]


class Normalize(InvertibleModule):
    """Subtract a fixed mean and divide by a fixed standard deviation, per channel or for all.

    Both are buffers in the state dict. Autograd keeps these two and nothing else.

    Args:
        mean: One number, or C numbers for an input of shape ``(N, C, ...)``.
        std: One number or C numbers, not 0.

    Raises:
        ValueError: When `std` holds a 0 or either is not finite, when the two are of different
            lengths above 1, or when the input has another number of channels.

    Example:
        >>> import torch
        >>> from recoup.invertible import Normalize
        >>> y, log_det = Normalize(0.5, 2.0)(torch.ones(1, 3))
        >>> y.tolist()
        [[0.25, 0.25, 0.25]]
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        means, stds = (
            torch.tensor(_numbers(name, value), dtype=torch.float64)
            for name, value in (("mean", mean), ("std", std))
        )
        if not bool(means.isfinite().all() and stds.isfinite().all() and (stds != 0).all()):
            raise ValueError(
                f"`mean` is {means.tolist()} and `std` is {stds.tolist()}, but all must be finite "
                f"and no `std` may be 0. For a constant channel use a `std` of 1."
            )
        if means.numel() != stds.numel() and 1 not in (means.numel(), stds.numel()):
            raise ValueError(
                f"`mean` has {means.numel()} and `std` {stds.numel()} numbers; give one number, "
                f"or one a channel, for each."
            )
        dtype = torch.get_default_dtype()
        size = max(means.numel(), stds.numel())
        self.register_buffer("mean", means.to(dtype).expand(size).clone())
        self.register_buffer("std", stds.to(dtype).expand(size).clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        self._check(x)
        return (x - per_channel(self.mean, x)) / per_channel(self.std, x), -self._log_std(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        self._check(y)
        x = torch.addcmul(per_channel(self.mean, y), y, per_channel(self.std, y))
        return x, self._log_std(y)

    def _check(self, x: Tensor) -> None:
        check_channels(x, x.shape[1] if self.mean.numel() == 1 and x.dim() > 1 else len(self.mean))

    def _log_std(self, x: Tensor) -> Tensor:
        repeats = num_positions(x) * (x.shape[1] // self.std.numel())
        return (self.std.abs().log().sum() * repeats).expand(x.shape[0])


class Logit(InvertibleModule):
    """Map the unit interval to all real numbers: ``logit(alpha + (1 - 2 * alpha) * x)``.

    `alpha` keeps the images of 0 and 1 finite. Autograd keeps the shrunk input and the output.

    Args:
        alpha: How far the ends are moved in, at least 0 and below 0.5. With 0 the data must not
            contain 0 or 1.

    Raises:
        ValueError: When `alpha` is out of range.

    Example:
        >>> import torch
        >>> from recoup.invertible import Logit
        >>> y, log_det = Logit()(torch.tensor([[0.0, 0.5, 1.0]]))
        >>> [round(v, 3) for v in y[0].tolist()]
        [-2.944, 0.0, 2.944]

    Dinh et al., "Density estimation using Real NVP", https://arxiv.org/abs/1605.08803,
    section 4.1, here symmetric.
    """

    def __init__(self, alpha: float = 0.05) -> None:
        super().__init__()
        check_real(alpha=alpha)
        if not 0 <= alpha < 0.5:
            raise ValueError(f"`alpha` is {alpha}, but must be at least 0 and below 0.5.")
        self.alpha = alpha

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map `x` of shape ``(N, ...)``, in the unit interval; returns ``(y, log_det)``."""
        y = torch.logit(self.alpha + (1 - 2 * self.alpha) * x)
        return y, self._log_det(y)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, ...)``; returns ``(x, log_det)``."""
        x = (torch.sigmoid(y) - self.alpha) / (1 - 2 * self.alpha)
        return x, -self._log_det(y)

    def _log_det(self, y: Tensor) -> Tensor:
        # -log(s) - log(1 - s) with s = sigmoid(y), but from y: s rounds to 1 when y is large.
        slopes = 2 * functional.softplus(y) - y
        return (slopes + math.log(1 - 2 * self.alpha)).flatten(1).sum(1)

    def extra_repr(self) -> str:
        """Show alpha."""
        return f"alpha={self.alpha:g}"
