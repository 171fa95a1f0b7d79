"""What callers give, each kind checked in one place: tensors, names, groups, numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from recoup._arguments import is_real, shown
from recoup.errors import GradientError


def described(tensor: object) -> str:
    """Return the description of a tensor without a name in errors."""
    is_tensor = isinstance(tensor, Tensor)
    return f"a tensor of shape {(*tensor.shape,)}" if is_tensor else f"a {type(tensor).__name__}"


def tensors_in(argument: str, given: object) -> tuple[Tensor, ...]:
    """Return each tensor once, in order, from tensors or pairs of name and tensor."""
    if isinstance(given, Tensor | nn.Module | str) or not isinstance(given, Iterable):
        way_out = "[tensor]" if isinstance(given, Tensor) else "module.parameters()"
        raise ValueError(
            f"`{argument}` is {described(given)}, but must be tensors: give {way_out}."
        )
    found: dict[int, Tensor] = {}
    for each in cast("Iterable[Any]", given):
        tensor: Any = each
        if isinstance(each, tuple) and len(cast("tuple[Any, ...]", each)) == 2:
            _, tensor = cast("tuple[Any, Any]", each)
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"`{argument}` has {described(tensor)} in it, but must be tensors, or pairs of "
                "name and tensor: give module.parameters()."
            )
        found[id(tensor)] = tensor
    return tuple(found.values())


def parameters_of(params: Any, argument: str = "params") -> tuple[Tensor, ...]:
    """Return the parameters of an optimizer, or the tensors given, each once."""
    if not hasattr(params, "param_groups"):
        return tensors_in(argument, params)
    groups: list[dict[str, Any]] = params.param_groups
    return tuple({id(each): each for group in groups for each in group["params"]}.values())


def members_of(
    argument: str, groups: Sequence[Any], tensors: Iterable[Tensor]
) -> list[tuple[Tensor, ...]]:
    """Return the members of groups, or raise unless each of the tensors is in one group."""
    members = [parameters_of(group, argument) for group in groups]
    ids = [set(map(id, each)) for each in members]
    for tensor in tensors:
        num_members = sum(id(tensor) in each for each in ids)
        if num_members != 1:
            raise GradientError(
                f"{described(tensor).capitalize()} belongs to {num_members} of the {len(groups)} "
                f"`{argument}`, and must belong to one. Name it in one of them, or `discard` it."
            )
    return members


def refuse_any(tensors: Sequence[Tensor], optimizer: Any, words: str) -> None:
    """Raise GradientError if there are tensors; `{}` in `words` are their names, up to five.

    The names are those that `optimizer` has for them.
    """
    if not tensors:
        return
    names: dict[int, str] = {}
    for group in getattr(optimizer, "param_groups", ()):
        for name, each in zip(group.get("param_names", ()), group["params"], strict=False):
            names[id(each)] = f"`{name}`"
    listed = ", ".join(names.get(id(each), described(each)) for each in tensors[:5])
    more = f" and {len(tensors) - 5} more" if len(tensors) > 5 else ""
    raise GradientError(words.format(listed + more))


def scale_of(scaler: Any) -> float:
    """Return the scale of a GradScaler now."""
    if isinstance(scaler, type) or not hasattr(scaler, "get_scale"):
        raise ValueError(f"`scaler` is {shown(scaler)}, but must be a torch.amp.GradScaler.")
    return float(scaler.get_scale())


def number_in(needed: str, is_right: Callable[[float], bool], **given: object) -> float:
    """Return an argument as a number, or raise ValueError; for a tensor, this waits for the device.

    Args:
        needed: what it must be, in the error.
        is_right: whether a number is what it must be; NaN, for what is no number, is not.
        given: the argument.
    """
    ((name, value),) = given.items()
    is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    number = float(cast("Any", value)) if is_one or is_real(value) else math.nan
    if not is_right(number):
        raise ValueError(f"`{name}` is {shown(value)}, but must be {needed}.")
    return number


def weight_in(weight: object) -> float:
    """Return the weight of a batch, or raise ValueError; torch fills tensors with floats only."""
    needed = "a number above zero. A batch that counts for nothing is left out"
    return number_in(needed, lambda number: 0 < number < math.inf, weight=weight)
