"""The product of a magnitude and a direction: a weight under weight norm, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recoup._core.saved_tensors import Kept


class Product(torch.autograd.Function):
    """The product as torch computes it, with a correct second derivative and no copy of the weight.

    It does not use `save_for_backward`: a region around it would count the residuals, and a weight
    that was made before the region began is made only in the region's second run.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, norms: Tensor, dim: int, name: str) -> Tensor:
        ctx.dim = dim
        ctx.kept = (Kept(weight, name, None), Kept(norms, f"An operand of {name}", None))
        ctx.inputs = (weight, norms)
        ctx.is_fused = dim >= 0 and dim in (0, weight.dim() - 1) and weight.numel() > 0
        return _fused(weight, norms, dim)[0] if ctx.is_fused else product_of(weight, norms, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, norms = (kept.get() for kept in ctx.kept)
        is_again = torch.is_grad_enabled()
        if ctx.is_fused and not is_again:
            lengths = _fused(weight, norms, ctx.dim)[1]
            given = (value.contiguous() for value in (gradients[0], weight, norms))
            backward = torch.ops.aten._weight_norm_interface_backward
            return (*backward(*given, lengths, ctx.dim), None, None)
        # The fused backward treats the lengths as constants, wrong for a second derivative.
        wants = tuple(value.requires_grad for value in ctx.inputs)
        if is_again:
            weight, norms = ctx.inputs
        else:
            weight = weight.detach().requires_grad_(wants[0])
            norms = norms.detach().requires_grad_(wants[1])
        with torch.enable_grad():
            made = product_of(weight, norms, ctx.dim)
        wanted = [value for value, want in zip((weight, norms), wants, strict=True) if want]
        found = iter(torch.autograd.grad(made, wanted, gradients[0], create_graph=is_again))
        of_weight = next(found) if wants[0] else None
        return of_weight, next(found) if wants[1] else None, None, None


def _fused(weight: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._weight_norm_interface(weight.contiguous(), norms.contiguous(), dim)


def product_of(weight: Tensor, norms: Tensor, dim: int) -> Tensor:
    """Return the product by differentiable operators of torch, which keep their residuals."""
    return weight * (norms / lengths_of(weight, dim))


def lengths_of(weight: Tensor, dim: int) -> Tensor:
    """Return the norms of a weight along all axes but `dim`; of the whole weight for -1."""
    return torch.norm_except_dim(weight, 2, dim) if weight.dim() else weight.abs()
