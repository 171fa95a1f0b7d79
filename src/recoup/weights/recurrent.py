"""The weights of a recurrent layer in one piece of memory, as cuDNN wants them.

NOTE [ One piece of memory ]

Rule 1. cuDNN runs a recurrent layer on one piece of memory with all of its weights. Those that were
        computed one by one it copies to such a piece in each forward, and autograd holds that: what
        nothing was to store would be stored. So they are copied here, to a piece that is made again
        in backward as any value is. The layer takes views of it, and cuDNN copies nothing.
Rule 2. Where each weight lies is what `flatten_parameters` of torch says. It leaves weights as they
        are where cuDNN does not run.
Rule 3. Nobody else sees the piece, so nothing changes it. Tensors that torch makes from its storage
        have versions of their own, which say nothing.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.devices import is_accelerator
from recoup._core.lazy_values import Source, as_value, keep
from recoup._core.saved_tensors import Packed, is_transformed, pair_in_force, storage_id
from recoup._core.tensors import Cast
from recoup.errors import ReplayError
from recoup.weights.steps import running_on

__all__ = ["in_one_piece"]


def in_one_piece(layer: nn.RNNBase, weights: list[Tensor]) -> list[Tensor]:
    """Return the weights of a layer in one piece if cuDNN runs it; else as they are."""
    is_computed = not all(isinstance(weight, nn.Parameter) for weight in weights)
    if not is_computed or not is_accelerator(weights[0].device) or is_transformed():
        return weights
    views = _laid_out(layer, weights)
    if len({storage_id(view) for view in views}) > 1:
        return weights
    views = list(cast("tuple[Tensor, ...]", _Laid.apply(views, *weights)))
    if torch.is_grad_enabled():
        piece = _Piece(layer, weights)
        views = [as_value(view, piece) for view in views]
    return views


def _laid_out(layer: nn.RNNBase, weights: list[Tensor]) -> list[Tensor]:
    """Return the weights without their graph, as views of one piece where cuDNN runs."""
    with torch._C.DisableTorchFunctionSubclass():
        views = [weight.data for weight in weights]  # with versions of their own
    with running_on(layer, views):
        nn.RNNBase.flatten_parameters(layer)  # which moves what is in the list
    return views


class _Laid(torch.autograd.Function):
    """Weights whose copies are given."""

    @staticmethod
    def forward(ctx: Any, views: list[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        del ctx, weights
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        del ctx
        return None, *gradients


class _Piece(Source):
    """The piece of memory, made from weights that are values, or are alive anyway."""

    def __init__(self, layer: nn.RNNBase, weights: list[Tensor]) -> None:
        super().__init__(f"The weights of a {type(layer).__name__}")
        self._layer = layer
        pair = pair_in_force()
        self._weights = [keep(weight, self.name, pair) for weight in weights]

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is of its type (See Rule 3)."""
        return tensor.dtype is self.dtype

    def slot(self, tensor: Tensor, cast: Cast | None = None) -> Packed:
        """Return what autograd saves in place of a view of the piece (See Rule 3)."""
        found = super().slot(tensor, cast)
        self._witness = None
        return found

    def make(self) -> None:
        """Lay the weights out again."""
        first, *others = _laid_out(self._layer, [each.get() for each in self._weights])
        if any(storage_id(each) != storage_id(first) for each in others):
            raise ReplayError(
                f"{self.name} were in one piece of memory in forward, as cuDNN wants them, and are "
                "not in backward. Leave torch.backends.cudnn as it was until backward has run."
            )
        self.give(first.new_empty(0).set_(first.untyped_storage()))
