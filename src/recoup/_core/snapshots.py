"""Copies of arguments that are no tensors and may change while a region runs, such as caches.

A second run gets the structure of such an argument as the first run found it: lists, dicts, sets
and attributes are copied, and the tensors in them are the same, without their history.
"""

from __future__ import annotations

import copy
import enum
import types
from typing import Any

import torch
from torch import Tensor, nn

_DEEPEST = 6
_ALONE = (
    bool, int, float, complex, str, bytes, type(None), type, enum.Enum, nn.Module, types.ModuleType,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, torch.dtype, torch.device,
    torch.Size, torch.Generator, range, slice,
)  # fmt: skip
# Packages whose objects are not copied.
_OF_NOBODY = frozenset(("builtins", "collections", "torch", "numpy", "threading", "logging"))


def is_left_alone(value: object) -> bool:
    """Whether a run cannot change `value`, or other code handles such a change."""
    return isinstance(value, _ALONE)


def copied(value: Any) -> Any:
    """Return a copy of `value`, with the tensors in it detached and parameters as they are."""
    return _copied(value, {}, 0)


def _is_a(value: Any, *kinds: type[Any]) -> bool:
    """Return `isinstance(value, kinds)`, for type checkers without narrowing the type."""
    return isinstance(value, kinds)


def _copied(value: Any, known: dict[int, Any], depth: int) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, nn.Parameter) or is_left_alone(value) or depth >= _DEEPEST:
        return value
    if isinstance(value, Tensor):
        made: Any = value.detach().requires_grad_(value.requires_grad)
    elif _is_a(value, tuple):
        items = [_copied(item, known, depth + 1) for item in value]
        made = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif _is_a(value, list, dict, set) or _is_users(value):
        made = known[id(value)] = copy.copy(value)
        if _is_a(made, list):
            made[:] = [_copied(item, known, depth + 1) for item in value]
        elif _is_a(made, dict):
            for key, item in value.items():
                dict.__setitem__(made, key, _copied(item, known, depth + 1))
        for key, item in list(getattr(value, "__dict__", {}).items()):
            made.__dict__[key] = _copied(item, known, depth + 1)
    else:
        return value
    known[id(value)] = made
    return made


def _is_users(value: object) -> bool:
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _OF_NOBODY
