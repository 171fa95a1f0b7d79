"""Weight norm: the direction and the magnitude of a weight as two parameters."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from recoup.weights.application import apply_to
from recoup.weights.choosing import ANY_WEIGHT, Where
from recoup.weights.normed import Product, lengths_of, product_of
from recoup.weights.reparametrization import Application, Drawn, Operands, Reparametrization


def weight_norm(module: nn.Module, pattern: Where = ANY_WEIGHT, dim: int | None = 0) -> nn.Module:
    """Give weights a magnitude of their own: forward uses ``g * v / ||v||``.

    The parameter `weight` becomes the direction v and remains the same object. A new parameter
    `weight_g` begins as ``||v||``, so that the output does not change at first; add it to existing
    optimizers, and wrap in DistributedDataParallel afterwards. Kept: nothing but these two.
    Backward pays two more products a weight.

    A `state_dict` has `weight_g` too; one without it can be loaded, and sets it to the norms.

    Args:
        module: the module, or a tree of modules.
        pattern: chooses parameters: a regular expression for the whole of their qualified names, a
            type of modules (its weights), a function ``(name, parameter, module) -> bool``, or a
            list of these. Frozen parameters, and those without floating-point numbers, are chosen
            by a function or by their name in full only. By default, all weights: names in which
            "weight" is a word.
        dim: the axis with a magnitude for each of its indices; None for a single magnitude.

    Returns:
        `module` itself.

    Raises:
        ValueError: when no parameter matches, or one has a weight norm already.
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
        if self.dim is None:
            return
        if type(self.dim) is not int or not -weight.dim() <= self.dim < weight.dim():
            raise ValueError(
                f"`dim` is {self.dim}, but `{name}` has shape {tuple(weight.shape)}, so it must be "
                f"from {-weight.dim()} to {weight.dim() - 1}, or None."
            )
        self.dim %= weight.dim()

    @property
    def axis(self) -> int:
        """The axis, as torch's operators have it."""
        return -1 if self.dim is None else self.dim

    def first_value(self, weight: Tensor) -> nn.Parameter:
        norms = lengths_of(weight.detach(), self.axis)
        return nn.Parameter(norms, requires_grad=weight.requires_grad)

    def removed_from(self, module: nn.Module, key: str) -> None:
        weight = module._parameters[key]
        if weight is not None and f"{key}_g" in module._parameters:  # a twin has the same ones
            with torch.no_grad():
                weight.copy_(self.compute(weight, self.operands(module, key), Drawn(self, 0, 1.0)))
        super().removed_from(module, key)

    def complete(self, module: nn.Module, key: str, weight: Tensor) -> Tensor:
        return lengths_of(weight.detach(), self.axis)

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
        return cast("Tensor", Product.apply(weight, own[0], self.axis, self.name))

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        return self.compute(weight, operands, drawn)

    def apply_by_operators(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        return product_of(weight, operands[0], self.axis)
