"""The tensors that gradients belong to, as a caller names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from recoup._arguments import shown

__all__ = ["check_scaler", "described", "names_of", "parameters_of", "tensors_in"]


def described(tensor: Tensor) -> str:
    """Return the description of a tensor without a name in errors."""
    return f"a tensor of shape {tuple(tensor.shape)}"


def tensors_in(argument: str, given: object) -> tuple[Tensor, ...]:
    """Return each tensor once, in order, from tensors or pairs of name and tensor."""
    if isinstance(given, Tensor | nn.Module):
        way_out = "[tensor]" if isinstance(given, Tensor) else "module.parameters()"
        raise ValueError(
            f"`{argument}` is a {type(given).__name__}, but must be tensors: give {way_out}."
        )
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise ValueError(
            f"`{argument}` is {shown(given)}, but must be tensors. Give model.parameters()."
        )
    found: dict[int, Tensor] = {}
    for each in cast("Iterable[Any]", given):
        tensor = each[1] if not isinstance(each, Tensor) and _is_named(each) else each
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"`{argument}` has a {type(tensor).__name__} in it, but must be tensors, or pairs "
                "of name and tensor. Give model.parameters()."
            )
        found[id(tensor)] = tensor
    return tuple(found.values())


def check_scaler(scaler: object) -> None:
    """Raise ValueError unless `scaler` is like a GradScaler."""
    if isinstance(scaler, type) or not hasattr(scaler, "get_scale"):
        raise ValueError(f"`scaler` is {shown(scaler)}, but must be a torch.amp.GradScaler.")


def parameters_of(params: Any, argument: str = "params") -> tuple[Tensor, ...]:
    """Return the parameters of an optimizer, or the tensors given, each once."""
    if not hasattr(params, "param_groups"):
        return tensors_in(argument, params)
    groups: list[dict[str, Any]] = params.param_groups
    return tuple({id(each): each for group in groups for each in group["params"]}.values())


def names_of(optimizer: Any, tensors: Iterable[Tensor]) -> str:
    """Return the names that `optimizer` has for tensors, for an error; of many, the first five."""
    names: dict[int, str] = {}
    for group in getattr(optimizer, "param_groups", ()):
        for name, each in zip(group.get("param_names", ()), group["params"], strict=False):
            names[id(each)] = f"`{name}`"
    listed = [names.get(id(each), described(each)) for each in tensors]
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + more


def _is_named(given: Any) -> bool:
    return isinstance(given, tuple) and len(cast("tuple[Any, ...]", given)) == 2
