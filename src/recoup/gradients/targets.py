"""The tensors that gradients belong to, as a caller names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

__all__ = ["named_in", "parameters_of", "said"]


def said(tensor: Tensor) -> str:
    """Return the description of a tensor without a name in errors."""
    return f"a tensor of shape {tuple(tensor.shape)}"


def named_in(argument: str, given: object) -> dict[Tensor, str]:
    """Return each tensor once, in order, from tensors or pairs of name and tensor.

    Returns:
        The tensors, each with its name in errors.
    """
    if isinstance(given, Tensor | nn.Module):
        way = "[tensor]" if isinstance(given, Tensor) else "module.parameters()"
        raise ValueError(
            f"`{argument}` is a {type(given).__name__}, but must be tensors: give {way}."
        )
    found: dict[Tensor, str] = {}
    for each in cast("Iterable[Any]", given):
        is_named = isinstance(each, tuple) and len(cast("tuple[Any, ...]", each)) == 2
        tensor = cast("object", each[1] if is_named else each)
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"`{argument}` has a {type(tensor).__name__} in it, but must be tensors, or pairs "
                "of name and tensor. Give model.parameters()."
            )
        found[tensor] = f"`{each[0]}`" if is_named else said(tensor)
    return found


def parameters_of(params: Any) -> dict[Tensor, str]:
    """Return the parameters of an optimizer, or the tensors given, each with its name in errors."""
    if not hasattr(params, "param_groups"):
        return named_in("params", params)
    names: dict[Tensor, str] = {}
    for group in cast("list[dict[str, Any]]", params.param_groups):
        known: list[str] = group.get("param_names", [])
        for place, parameter in enumerate(cast("list[Tensor]", group["params"])):
            names[parameter] = f"`{known[place]}`" if known else said(parameter)
    return names
