"""The losses of a step: the scalars that are differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from recoup._core.pytree import flatten

__all__ = ["Losses", "losses_from", "losses_of_several"]

Losses = Callable[[Any], Sequence[Tensor]]


def losses_from(loss: Callable[[Any], Any] | None) -> Losses:
    """Return a function from the output of the model to one scalar or several.

    Without `loss`, the loss is the attribute or entry `loss` of the output, if it is a scalar. Else
    it consists of the differentiable tensors in the output: scalars as they are, and the sum of
    the absolute values of others.

    Args:
        loss: a function from the output to a scalar or several; None to find the loss.
    """
    if loss is None:
        return _found

    def given(output: Any) -> Sequence[Tensor]:
        losses = loss(output)
        is_several = isinstance(losses, (tuple, list))
        several: list[Any] = list(cast("list[Any]", losses)) if is_several else [losses]
        for each in several:
            if not isinstance(each, Tensor) or each.numel() != 1:
                shown = (
                    f"a tensor of shape {tuple(each.shape)}"
                    if isinstance(each, Tensor)
                    else f"a {type(each).__name__}"
                )
                raise ValueError(
                    f"`loss` returned {shown}, but must return a scalar tensor or a tuple of them."
                )
        return _differentiable(several)

    return given


def losses_of_several(loss: Callable[..., Any] | None) -> Losses:
    """Return a function from a list of outputs, one of each forward of a step, to their losses.

    Args:
        loss: a function with as many arguments as there are outputs; None to find the loss of each.
    """
    if loss is not None:
        return losses_from(lambda outputs: loss(*outputs))
    return lambda outputs: [each for output in outputs for each in _found(output)]


def _found(output: Any) -> Sequence[Tensor]:
    named: Any = (
        cast("Any", output).get("loss")
        if isinstance(output, Mapping)
        else getattr(output, "loss", None)
    )
    if isinstance(named, Tensor) and named.numel() == 1:
        return _differentiable([named])
    tensors, _ = flatten(output)
    wanted = [t for t in tensors if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    return _differentiable([t if t.numel() == 1 else t.abs().sum() for t in wanted])


def _differentiable(losses: list[Tensor]) -> Sequence[Tensor]:
    found = [loss for loss in losses if loss.requires_grad]
    if not found and torch.is_inference_mode_enabled():
        raise ValueError(
            "There are no gradients in `torch.inference_mode`, so there is no backward to plan "
            "for. Call it outside."
        )
    if not found:
        raise ValueError(
            "`model` returned nothing that requires a gradient for these arguments, so there is no "
            "backward to plan for. Let its parameters require gradients, or give `loss`."
        )
    return found
