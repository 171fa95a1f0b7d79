"""AdditiveCoupling: add to one part what a network computes from the other."""

from __future__ import annotations

from torch import Tensor, nn

from recoup.invertible.coupling import Condition, Coupling, Partition, takes_a_context
from recoup.invertible.grid import check_bound, grid_bound, to_grid
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
        super().__init__(condition, split)
        if not 0 <= fraction_bits <= 20:
            raise ValueError(
                f"`fraction_bits` is {fraction_bits}, but must be from 0 to 20. Use 12, with which "
                "float32 reaches to 4096."
            )
        self.network = network
        self.g = g
        self.exact = exact
        self.fraction_bits = fraction_bits
        self.takes_context = takes_a_context(network) or takes_a_context(g)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Couple `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        given, changed = self._halves(self._entered(x))
        changed = changed + self._shift(self.network, given, changed, context)
        if self.g is not None:
            given = given + self._shift(self.g, changed, given, context)
        y = self._join(given, changed)
        if self.exact:
            check_bound(y, self.fraction_bits, type(self).__name__)
        return y, zero_log_det(x)

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        given, changed = self._halves(self._entered(y))
        if self.g is not None:
            given = given - self._shift(self.g, changed, given, context)
        changed = changed - self._shift(self.network, given, changed, context)
        x = self._join(given, changed)
        if self.exact:
            check_bound(x, self.fraction_bits, f"The inverse of {type(self).__name__}")
        return x, zero_log_det(y)

    def _entered(self, x: Tensor) -> Tensor:
        if not self.exact:
            return x
        if not x.is_floating_point() or grid_bound(x.dtype, self.fraction_bits) < 4:
            raise ValueError(
                f"`x` is of type {x.dtype}, but with `exact` and `fraction_bits` "
                f"{self.fraction_bits} it must be torch.float32 or torch.float64. Convert it, or "
                "use autocast, which leaves it as it is."
            )
        return to_grid(x, self.fraction_bits)

    def _shift(
        self, network: nn.Module, given: Tensor, changed: Tensor, context: Tensor | None
    ) -> Tensor:
        shift = self._ask(network, given, changed, 1, context)
        return to_grid(shift, self.fraction_bits) if self.exact else shift

    def extra_repr(self) -> str:
        """Show which part is the condition, and the grid."""
        grid = f", exact=True, fraction_bits={self.fraction_bits}" if self.exact else ""
        return super().extra_repr() + grid
