"""Sizes beside those of a step: budgets, what is alive before it, and batches that are larger."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from recoup._core.pytree import flatten, tensors_in
from recoup._core.storage_tracking import bytes_of
from recoup.memory import format_bytes, parse_bytes

__all__ = ["ArgumentSizes", "check_budget_of", "checked_budget", "standing_bytes"]


def checked_budget(budget: int | str) -> int:
    """Return the bytes of a budget.

    Raises:
        ValueError: `budget` is not a number of bytes.
    """
    return parse_bytes(budget, name="budget")


def check_budget_of(budget_of: str) -> None:
    """Raise a ValueError if `budget_of` is unknown."""
    if budget_of not in ("step", "total"):
        raise ValueError(f'`budget_of` is {budget_of!r}, but must be "step" or "total".')


def standing_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of parameters, buffers and the optimizer state after its first step."""
    own = bytes_of((*model.parameters(), *model.buffers()))
    return own if optimizer is None else own + _state_bytes(optimizer)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    if optimizer.state:
        return bytes_of(tensors_in(cast("Any", optimizer.state)))
    try:
        return bytes_of(tensors_in(_stepped_without_memory(optimizer)))
    except Exception as error:
        raise ValueError(
            f"`optimizer` is a {type(optimizer).__name__} that has not stepped yet, and the size "
            f"of its state cannot be predicted ({error}). Step it once before planning."
        ) from error


def _stepped_without_memory(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """Return the state of a copy of `optimizer` after a step on meta tensors."""
    other: Any = copy.copy(optimizer)
    other.state = cast("Any", defaultdict)(dict)
    other.param_groups = []
    for group in optimizer.param_groups:
        empty = [nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
        for parameter in empty:
            parameter.grad = torch.empty_like(parameter)
        other.param_groups.append({**group, "params": empty})
    type(optimizer).step(other)
    return other.state


class ArgumentSizes:
    """The bytes of the arguments that a plan was made with, argument by argument.

    Args:
        args: the arguments.
        kwargs: the keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._planned = _argument_bytes(args, kwargs)
        self._has_warned = False

    def include(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let the plan be made for these arguments, too."""
        for key, num_bytes in _argument_bytes(args, kwargs).items():
            self._planned[key] = max(num_bytes, self._planned.get(key, 0))

    def warn_if_larger(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Warn once if the arguments are larger than those that the plan was made with."""
        if self._has_warned:
            return
        now = _argument_bytes(args, kwargs)
        shared = now.keys() & self._planned.keys()
        found, planned = (sum(sizes[key] for key in shared) for sizes in (now, self._planned))
        if found > planned > 0:
            self._has_warned = True
            warnings.warn(
                f"A planned {name} was given {format_bytes(found)} of arguments, "
                f"{found / planned:.3g} times as much as the plan was made for "
                f"({format_bytes(planned)}). Gradients are right, but this step may take more than "
                "the budget. Make the plan with the largest batch.",
                stacklevel=5,
            )


def _argument_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, int]:
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {key: sum(tensor.nbytes for tensor in flatten(value)[0]) for key, value in given}
