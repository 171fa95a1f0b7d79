"""Couplings: one half of the channels decides how the other half is changed."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

from recoup.invertible.contract import InvertibleModule
from recoup.invertible.shapes import zero_log_det

__all__ = ["AdditiveCoupling", "AffineCoupling"]

Half = Literal["first", "second"]


class _Coupling(InvertibleModule):
    """Cut dimension 1 into the half that conditions and the half that is changed."""

    def __init__(self, condition: Half) -> None:
        super().__init__()
        if condition not in ("first", "second"):
            raise ValueError(f'`condition` is {condition!r}, but must be "first" or "second".')
        self.condition: Half = condition

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dim() < 2 or x.shape[1] < 2:
            raise ValueError(
                f"`x` has shape {tuple(x.shape)}, but a coupling needs (N, C, ...) with C of at "
                f"least 2. For images of one channel, put `Squeeze()` before the coupling."
            )
        # Views, and of one split: backward then joins two gradients, where two slices would pad
        # each with zeros and add. An odd channel goes to the first half.
        middle = (x.shape[1] + 1) // 2
        first, second = cast("tuple[Tensor, Tensor]", x.split((middle, x.shape[1] - middle), dim=1))
        return (first, second) if self.condition == "first" else (second, first)

    def _join(self, given: Tensor, changed: Tensor) -> Tensor:
        halves = (given, changed) if self.condition == "first" else (changed, given)
        return torch.cat(halves, dim=1)

    def _ask(self, network: nn.Module, given: Tensor, changed: Tensor, copies: int) -> Tensor:
        """Run `network` on `given` for `copies` values an entry of `changed`."""
        values = self.evaluate(network, given)
        needed = (changed.shape[0], copies * changed.shape[1], *changed.shape[2:])
        if values.shape != needed:
            raise ValueError(
                f"The network of {type(self).__name__} returned shape {tuple(values.shape)} for "
                f"an input of shape {tuple(given.shape)}, but {tuple(needed)} is needed. "
                f"Give it {needed[1]} output channels and keep the other sizes."
            )
        # Networks may run in half precision under autocast; the coupling stays in x's own type,
        # or the inverse would not find its way back.
        return values if values.dtype is changed.dtype else values.to(changed.dtype)

    def extra_repr(self) -> str:
        """Show which half conditions."""
        return f"condition={self.condition!r}"


class AdditiveCoupling(_Coupling):
    """Add to one half of the channels what a network computes from the other half.

    With one network ``y1 = x1, y2 = x2 + network(x1)``. With a second one, ``g``, the given half is
    changed too, ``y1 = x1 + g(y2)``: a reversible residual block. Volume is kept, so `log_det` is
    zero. The networks need not be invertible; each runs once in forward and once in inverse.

    Autograd keeps what the networks keep, and of its own nothing.

    Args:
        network: Maps the conditioning half to a shift of the shape of the other half. The first
            half of C channels has ``(C + 1) // 2``, the second ``C // 2``.
        g: Optional second network, from the changed half to a shift of the conditioning half.
        condition: Which half `network` sees, "first" or "second". With "second" and `g`, this is
            the block of RevNets: ``y1 = x1 + network(x2), y2 = x2 + g(y1)``.

    Raises:
        ValueError: When `condition` is neither, when the input has fewer than 2 channels, or when a
            network returns another shape than needed.

    Example:
        >>> import torch
        >>> from recoup.invertible import AdditiveCoupling
        >>> layer = AdditiveCoupling(torch.nn.Linear(2, 2))
        >>> y, log_det = layer(torch.ones(1, 4))
        >>> torch.allclose(layer.inverse(y)[0], torch.ones(1, 4)), log_det.tolist()
        (True, [0.0])

    Dinh et al., "NICE", https://arxiv.org/abs/1410.8516; Gomez et al., "The Reversible Residual
    Network", https://arxiv.org/abs/1707.04585.
    """

    def __init__(
        self, network: nn.Module, g: nn.Module | None = None, *, condition: Half = "first"
    ) -> None:
        super().__init__(condition)
        self.network = network
        self.g = g

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Couple `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        given, changed = self._halves(x)
        changed = changed + self._ask(self.network, given, changed, 1)
        if self.g is not None:
            given = given + self._ask(self.g, changed, given, 1)
        return self._join(given, changed), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        given, changed = self._halves(y)
        if self.g is not None:
            given = given - self._ask(self.g, changed, given, 1)
        changed = changed - self._ask(self.network, given, changed, 1)
        return self._join(given, changed), zero_log_det(y)


class AffineCoupling(_Coupling):
    """Scale and shift one half of the channels by what a network computes from the other half.

    ``y1 = x1, y2 = x2 * exp(log_scale) + shift`` with ``shift, raw = network(x1).chunk(2, dim=1)``
    and ``log_scale = bound * tanh(raw / bound)``. The scale stays between ``exp(-bound)`` and
    ``exp(bound)`` whatever the network says, so one layer of the inverse never magnifies an error
    by more than ``exp(bound)``; a network of zeros makes the identity. The network need not be
    invertible; it runs once in forward and once in inverse.

    Autograd keeps what the network keeps, the input, and two tensors of the size of the changed
    half.

    Args:
        network: Maps the conditioning half to twice the channels of the other half. The first half
            of C channels has ``(C + 1) // 2``, the second ``C // 2``.
        condition: Which half the network sees, "first" or "second".
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
        self, network: nn.Module, *, condition: Half = "first", bound: float = 2.0
    ) -> None:
        super().__init__(condition)
        if not bound > 0:
            raise ValueError(f"`bound` is {bound}, but must be above 0; 2.0 is usual.")
        self.network = network
        self.bound = bound

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Couple `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        given, changed = self._halves(x)
        shift, log_scale = self._shift_and_log_scale(given, changed)
        changed = torch.addcmul(shift, changed, log_scale.exp())
        return self._join(given, changed), log_scale.flatten(1).sum(1)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        given, changed = self._halves(y)
        shift, log_scale = self._shift_and_log_scale(given, changed)
        changed = (changed - shift) * (-log_scale).exp()
        return self._join(given, changed), -log_scale.flatten(1).sum(1)

    def _shift_and_log_scale(self, given: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
        shift, raw = self._ask(self.network, given, changed, 2).chunk(2, dim=1)
        return shift, self.bound * torch.tanh(raw / self.bound)

    def extra_repr(self) -> str:
        """Show which half conditions, and the bound."""
        return f"{super().extra_repr()}, bound={self.bound:g}"
