"""The memory alive before a step: parameters, buffers and the state of an optimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from recoup._core.pytree import tensors_in
from recoup._core.storage_tracking import bytes_of

__all__ = ["standing_bytes"]


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
            f"`optimizer` is a {type(optimizer).__name__} that has not stepped yet, and what its "
            f"state will be cannot be told ({error}). Step it once before."
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
