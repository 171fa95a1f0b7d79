"""Weight norm: the direction and the magnitude of a weight as two parameters."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import is_traced
from recoup._core.saved_tensors import Kept, is_transformed
from recoup._core.tensors import has_values
from recoup.weights.application import apply_to
from recoup.weights.choosing import ANY_WEIGHT, Where
from recoup.weights.reparametrization import Application, Drawn, Operands, Reparametrization
from recoup.weights.weight import is_plain


def weight_norm(module: nn.Module, pattern: Where = ANY_WEIGHT, dim: int | None = 0) -> nn.Module:
    """Give weights a magnitude of their own: forward uses ``g * v / ||v||``.

    The parameter `weight` becomes the direction v and remains the same object. A new parameter
    `weight_g` begins as ``||v||``, so that the output does not change at first; add it to existing
    optimizers, and wrap in DistributedDataParallel afterwards. Kept: nothing but these two.
    Backward pays two more products a weight.

    A `state_dict` has `weight_g` too: load one without it before this is applied.

    Args:
        module: the module, or a tree of modules.
        pattern: chooses parameters, as `pattern` of `weight_dropout` does; by default, all weights.
        dim: the axis with a magnitude for each of its indices; None for a single magnitude.

    Returns:
        `module` itself.

    Raises:
        ValueError: when no parameter matches, or one has a weight norm already or no entries.
        ChangedError: in backward, when a parameter has changed in place since forward.

    Example:
        >>> import recoup, torch
        >>> conv = recoup.weight_norm(torch.nn.Conv1d(4, 8, 3))
        >>> conv.weight_g.shape
        torch.Size([8, 1, 1])

    Source: Salimans and Kingma, "Weight normalization", https://arxiv.org/abs/1602.07868.
    """
    application = Application()
    return apply_to(module, pattern, lambda: WeightNorm(application, dim))


class WeightNorm(Reparametrization):
    """Weight norm: makes a weight the product of a magnitude and a direction."""

    kind = "weight_norm"
    order = 0
    is_random = False
    adds_parameters = True
    by_operators = True
    suffix = "_g"

    def __init__(self, application: Application, dim: int | None) -> None:
        super().__init__(application, "always")
        self.dim = dim
        self.name = "A weight"

    def __repr__(self) -> str:
        return f"weight_norm(dim={self.dim})"

    def fit(self, module: nn.Module, key: str, name: str) -> None:
        """Normalize `dim` for torch, or raise if the weight does not have it."""
        self.name = f"`{name}`"
        weight = cast("Tensor", module._parameters[key])
        if not weight.numel():
            raise ValueError(
                f"`{name}` has shape {tuple(weight.shape)}, and without entries a weight has no "
                "direction. Let `pattern` leave it out."
            )
        dim = self.dim
        if dim is not None:
            if type(dim) is not int or not -weight.dim() <= dim < weight.dim():
                raise ValueError(
                    f"`dim` is {dim}, but `{name}` has shape {tuple(weight.shape)}, so it must be "
                    f"from {-weight.dim()} to {weight.dim() - 1}, or None."
                )
            self.dim = dim % weight.dim()
        has_numbers = is_plain(weight) and has_values(weight)
        if has_numbers and not _lengths_of(weight.detach(), self.axis).all():
            raise ValueError(
                f"`{name}` has rows of zeros along `dim` ({self.dim}), as a layer that begins at "
                "zero and a padding row do, and these have no direction: it would be NaN. Give "
                "them values first, choose another `dim`, or let `pattern` leave it out."
            )

    @property
    def axis(self) -> int:
        """The axis, as torch's operators have it."""
        return -1 if self.dim is None else self.dim

    def first_value(self, weight: Tensor) -> nn.Parameter:
        norms = _lengths_of(weight.detach(), self.axis)
        return nn.Parameter(norms, requires_grad=weight.requires_grad)

    def removed_from(self, module: nn.Module, key: str) -> None:
        weight = module._parameters[key]
        if weight is not None and f"{key}_g" in module._parameters:  # a twin has the same ones
            with torch.no_grad():
                weight.copy_(self.compute(weight, self.operands(module, key), Drawn(self, 0, 1.0)))
        super().removed_from(module, key)

    def operands(self, module: nn.Module, key: str) -> Operands:
        norms: Tensor | None = getattr(module, f"{key}_g", None)
        if norms is None:
            raise ValueError(
                f"{self.name} has no magnitude `{key}_g` any more. If its norm was removed from a "
                "twin of this model (recoup.weights.twin), which has the same parameters, call "
                "recoup.weights.remove on this one, too."
            )
        return (norms,)

    def compute(self, weight: Tensor, own: Operands, drawn: Drawn, is_new: bool = False) -> Tensor:
        if is_transformed() or is_traced():
            return self.product(weight, own[0])
        return cast("Tensor", _Product.apply(weight, own[0], self.axis, self.name))

    def product(self, weight: Tensor, norms: Tensor) -> Tensor:
        """Return the product by differentiable operators of torch, which keep their residuals."""
        return _product_of(weight, norms, self.axis)


class _Product(torch.autograd.Function):
    """The product as torch computes it, with a correct second derivative and no copy of the weight.

    Without `save_for_backward`: a region around it would count the residuals, and a weight from
    before the region is made only in the region's second run.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, norms: Tensor, dim: int, name: str) -> Tensor:
        ctx.dim = dim
        ctx.kept = (  # detached, so that they stay what they were where `.data` is assigned
            Kept(weight.detach(), name, None), Kept(norms.detach(), f"An operand of {name}", None),
        )  # fmt: skip
        ctx.inputs = (weight, norms)
        ctx.is_fused = dim >= 0 and dim in (0, weight.dim() - 1) and weight.numel() > 0
        return _fused(weight, norms, dim)[0] if ctx.is_fused else _product_of(weight, norms, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, norms = (kept.get() for kept in ctx.kept)
        is_again = torch.is_grad_enabled()
        if ctx.is_fused and not is_again:
            lengths = _fused(weight, norms, ctx.dim)[1]
            gradient = gradients[0].to_dense() if gradients[0].is_sparse else gradients[0]
            given = (value.contiguous() for value in (gradient, weight, norms))
            backward = torch.ops.aten._weight_norm_interface_backward
            return (*backward(*given, lengths, ctx.dim), None, None)
        # The fused backward treats the lengths as constants, wrong for a second derivative.
        given = [
            value if is_again and value.requires_grad else value.detach().requires_grad_()
            for value in (ctx.inputs if is_again else (weight, norms))
        ]
        with torch.enable_grad():
            made = _product_of(given[0], given[1], ctx.dim)
        found = torch.autograd.grad(made, given, gradients[0], create_graph=is_again)
        return *found, None, None


def _fused(weight: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._weight_norm_interface(weight.contiguous(), norms.contiguous(), dim)


def _product_of(weight: Tensor, norms: Tensor, dim: int) -> Tensor:
    return weight * (norms / _lengths_of(weight, dim))


def _lengths_of(weight: Tensor, dim: int) -> Tensor:
    """Return the norms of a weight along all axes but `dim`; of the whole weight for -1."""
    return torch.norm_except_dim(weight, 2, dim) if weight.dim() else weight.abs()
