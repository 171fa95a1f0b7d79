"""AdditiveCoupling: add to one part what a network computes from the other."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from recoup._arguments import check_flag, check_whole
from recoup._core.saved_tensors import grad_mode
from recoup.errors import GridError
from recoup.invertible.coupling import Condition, Coupling, Partition
from recoup.invertible.shapes import zero_log_det

__all__ = ["AdditiveCoupling"]


class AdditiveCoupling(Coupling):
    """Add to one half of the channels what a network computes from the other half.

    With one network ``y1 = x1, y2 = x2 + network(x1)``. With a second one, ``g``, the given half is
    changed too, ``y1 = x1 + g(y2)``: a reversible residual block. It preserves volume, so `log_det`
    is zero. The networks need not be invertible; each runs once in forward and once in inverse.

    With ``exact=True`` values lie on a grid of multiples of ``2**-fraction_bits``: the input and
    what the networks return are rounded to it (their gradients go straight through), and the sum of
    two such numbers is exact while it is below ``2**(24 - fraction_bits)`` in float32. So `inverse`
    is bitwise exact if the networks are bitwise reproducible: for the same batch on the same
    device, with deterministic kernels (which may round differently for another batch size). This
    holds through any number of such couplings and of layers that only move values (`Permute`,
    `Flip`, `Squeeze`, `Split`, `Flatten`), and constant memory then gives bitwise the gradients of
    the other modes. Each call computes the largest magnitude of its output once, to check the
    bound. Layers that multiply (`ActNorm`, 1x1 convolutions) leave the grid: put them after the
    last coupling.

    Autograd keeps what the networks keep, and nothing else.

    Args:
        network: Maps the conditioning half to a shift of the shape of the other half. The first
            half of C channels has ``(C + 1) // 2``, the second ``C // 2``.
        g: Optional second network, from the changed half to a shift of the conditioning half.
        condition: Which half `network` sees, "first" or "second". With "second" and `g`, this is
            the block of RevNets: ``y1 = x1 + network(x2), y2 = x2 + g(y1)``.
        split: "channels", or "checkerboard" for images: see `Coupling`.
        exact: Whether values lie on a grid, so that the inverse is exact to the bit.
        fraction_bits: Number of binary digits after the point on the grid.

    Raises:
        ValueError: When an argument is out of range, when the input has fewer than 2 channels or,
            with `exact`, is of half precision, or when a network returns another shape than needed.
        GridError: When a value is so large that sums on the grid are not exact.

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
        self,
        network: nn.Module,
        g: nn.Module | None = None,
        *,
        condition: Condition = "first",
        split: Partition = "channels",
        exact: bool = False,
        fraction_bits: int = 12,
    ) -> None:
        super().__init__(network, g, condition, split)
        check_flag(exact=exact)
        check_whole(0, fraction_bits=fraction_bits)
        if fraction_bits > 20:
            raise ValueError(
                f"`fraction_bits` is {fraction_bits}, but must be from 0 to 20. Use 12, with which "
                "float32 reaches to 4096."
            )
        self.exact = exact
        self.fraction_bits = fraction_bits

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Couple `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        if not self.exact:
            return super().forward(x, context)
        y, log_det = super().forward(self._input_on_grid(x), context)
        _check_bound(y, self.fraction_bits, type(self).__name__)
        return y, log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        if not self.exact:
            return super().inverse(y, context)
        x, log_det = super().inverse(self._input_on_grid(y), context)
        _check_bound(x, self.fraction_bits, f"The inverse of {type(self).__name__}")
        return x, log_det

    def _change(
        self, network: nn.Module, given: Tensor, changed: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return changed + self._shift(network, given, changed, context), zero_log_det(changed)

    def _change_back(
        self, network: nn.Module, given: Tensor, changed: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return changed - self._shift(network, given, changed, context), zero_log_det(changed)

    def _shift(
        self, network: nn.Module, given: Tensor, changed: Tensor, context: Tensor | None
    ) -> Tensor:
        then = partial(_to_grid, fraction_bits=self.fraction_bits) if self.exact else None
        return self._evaluate_network(network, given, changed, 1, context, then)

    def _input_on_grid(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or _grid_bound(x.dtype, self.fraction_bits) < 4:
            raise ValueError(
                f"`x` is of type {x.dtype}, but with `exact` and `fraction_bits` "
                f"{self.fraction_bits} it must be torch.float32 or torch.float64. Convert it, or "
                "use autocast, which leaves it as it is."
            )
        return _to_grid(x, self.fraction_bits)

    def extra_repr(self) -> str:
        """Show which part is the condition, and the grid."""
        grid = f", exact=True, fraction_bits={self.fraction_bits}" if self.exact else ""
        return super().extra_repr() + grid


def _to_grid(x: Tensor, fraction_bits: int) -> Tensor:
    """Round `x` to multiples of ``2**-fraction_bits``; the gradient goes straight through.

    The step is a power of two, so that scaling by it is exact. Autograd keeps nothing.
    """
    scale = 2.0**fraction_bits
    with grad_mode(False):
        change = (x * scale).round_().div_(scale).sub_(x)  # exact, as the two are close
    return x + change


def _grid_bound(dtype: torch.dtype, fraction_bits: int) -> float:
    """Return the magnitude below which `dtype` holds every multiple of ``2**-fraction_bits``."""
    significant_bits = 1 - int(math.log2(torch.finfo(dtype).eps))
    return 2.0 ** (significant_bits - fraction_bits)


def _check_bound(y: Tensor, fraction_bits: int, name: str) -> None:
    """Raise a GridError if a value of `y` is beyond the bound within which sums are exact."""
    if not y.is_floating_point() or y.numel() == 0:
        return
    bound = _grid_bound(y.dtype, fraction_bits)
    largest = float(y.detach().abs().max())
    if not largest < bound:
        needed = math.frexp(largest)[1] if math.isfinite(largest) else None
        way_out = (
            "Values are not finite: look for what made them so."
            if needed is None
            else f"Use `fraction_bits={max(0, fraction_bits - (needed - int(math.log2(bound))))}` "
            "for a coarser grid that reaches further, or double precision."
        )
        raise GridError(
            f"{name} made a value of {largest:.6g}, but with `fraction_bits` {fraction_bits} sums "
            f"in {y.dtype} are exact below {bound:g} only. {way_out}"
        )
