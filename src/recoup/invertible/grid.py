"""Values on a fixed-point grid, on which addition is exact."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recoup._core.saved_tensors import grad_mode
from recoup.errors import GridError

__all__ = ["check_bound", "grid_bound", "to_grid"]


def to_grid(x: Tensor, fraction_bits: int) -> Tensor:
    """Round `x` to multiples of ``2**-fraction_bits``; the gradient goes straight through.

    The step is a power of two, so that scaling by it is exact. Autograd keeps nothing.
    """
    scale = 2.0**fraction_bits
    with grad_mode(False):
        change = (x * scale).round_().div_(scale).sub_(x)  # exact, as the two are close
    return x + change


def grid_bound(dtype: torch.dtype, fraction_bits: int) -> float:
    """Return the magnitude below which `dtype` holds every multiple of ``2**-fraction_bits``."""
    significant_bits = 1 - int(math.log2(torch.finfo(dtype).eps))
    return 2.0 ** (significant_bits - fraction_bits)


def check_bound(y: Tensor, fraction_bits: int, name: str) -> None:
    """Raise a GridError if a value of `y` is beyond the bound within which sums are exact."""
    if not y.is_floating_point() or y.numel() == 0:
        return
    bound = grid_bound(y.dtype, fraction_bits)
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
