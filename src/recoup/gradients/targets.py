"""What callers give: tensors, parameters by name, scalers and numbers, each checked in one place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import Tensor, nn

from recoup._arguments import is_real, shown

__all__ = [
    "check_scaler",
    "described",
    "names_of",
    "number_in",
    "parameters_of",
    "targets_by_name",
    "tensors_in",
    "weight_in",
]


def described(tensor: object) -> str:
    """Return the description of a tensor without a name in errors."""
    return (
        f"a tensor of shape {tuple(tensor.shape)}"
        if isinstance(tensor, Tensor)
        else f"a {type(tensor).__name__}"
    )


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
        is_named = isinstance(each, tuple) and len(cast("tuple[Any, ...]", each)) == 2
        tensor: Any = each[1] if is_named else each
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"`{argument}` has a {type(tensor).__name__} in it, but must be tensors, or pairs "
                "of name and tensor. Give model.parameters()."
            )
        found[id(tensor)] = tensor
    return tuple(found.values())


def parameters_of(params: Any, argument: str = "params") -> tuple[Tensor, ...]:
    """Return the parameters of an optimizer, or the tensors given, each once."""
    if not hasattr(params, "param_groups"):
        return tensors_in(argument, params)
    groups: list[dict[str, Any]] = params.param_groups
    return tuple({id(each): each for group in groups for each in group["params"]}.values())


def targets_by_name(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module by name, a tied one under each of its names."""
    return dict(module.named_parameters(remove_duplicate=False))


def names_of(optimizer: Any, tensors: Iterable[Tensor]) -> str:
    """Return the names that `optimizer` has for tensors, for an error; of many, the first five."""
    names: dict[int, str] = {}
    for group in getattr(optimizer, "param_groups", ()):
        for name, each in zip(group.get("param_names", ()), group["params"], strict=False):
            names[id(each)] = f"`{name}`"
    listed = [names.get(id(each), described(each)) for each in tensors]
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return ", ".join(listed[:5]) + more


def check_scaler(scaler: object) -> None:
    """Raise ValueError unless `scaler` is like a GradScaler."""
    if isinstance(scaler, type) or not hasattr(scaler, "get_scale"):
        raise ValueError(f"`scaler` is {shown(scaler)}, but must be a torch.amp.GradScaler.")


def number_in(needed: str, is_right: Callable[[float], bool], **given: object) -> float:
    """Return an argument as a number, or raise ValueError; for a tensor, this waits for the device.

    Args:
        needed: what it must be, in the error.
        is_right: whether a number is what it must be; NaN is not.
        given: the argument.
    """
    ((name, value),) = given.items()
    number = math.nan
    if is_real(value) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
        number = float(value)
    if not is_right(number):
        raise ValueError(f"`{name}` is {shown(value)}, but must be {needed}.")
    return number


def weight_in(weight: object) -> float:
    """Return the weight of a batch, or raise ValueError; torch fills tensors with floats only."""
    needed = "a number above zero. A batch that counts for nothing is left out"
    return number_in(needed, lambda number: 0 < number < math.inf, weight=weight)
