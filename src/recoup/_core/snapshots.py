"""Snapshots of arguments that are not tensors and change while a region runs, such as caches.

NOTE [ The arguments of a second run ]

Rule 1. The structure of an argument that is neither a tensor, a module nor plain is copied before
        the first run: lists, dicts, sets and attributes, and the tensors in them by reference.
        Copying too much costs time; copying too little would show a second run the changes of the
        first.
Rule 2. If the first run changed the object, each later run gets a copy of the copy. Otherwise it
        gets the object itself, as any function would.
Rule 3. Tensors in a copy are kept with their version, and detached: their history belongs to the
        first run.
"""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.saved_tensors import version_of
from recoup.errors import ChangedError

__all__ = ["Snapshot", "copied", "is_copied", "is_left_alone"]

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


def is_copied(value: object) -> bool:
    """Whether `value` is a container, or an object of the user, whose structure can be copied."""
    if isinstance(value, Tensor) or is_left_alone(value):
        return False
    return isinstance(value, (list, dict, set)) or _is_users(value)


class Snapshot:
    """A copy of an object from before a first run."""

    __slots__ = ("_before", "_name", "_now", "_versions")

    def __init__(self, value: object, name: str) -> None:
        self._now = value
        self._name = name
        self._versions: list[tuple[Tensor, int]] = []
        self._before: object | None = _copied(value, {}, 0, self._note)

    @property
    def has_changed(self) -> bool:
        """Whether the first run changed the object, once it has ended."""
        return self._before is not None

    @property
    def had_tensors(self) -> bool:
        """Whether there were tensors in the object, if the first run changed it."""
        return bool(self._versions)

    def first_run_ended(self) -> None:
        """Drop the copy if the first run did not change the object (See Rule 2)."""
        if _same(self._before, self._now, 0, set()):
            self._before = None
            self._versions.clear()

    def for_a_run(self) -> object:
        """Return the object, or the copy, that a later run gets (See Rule 2)."""
        if self._before is None:
            return self._now
        for tensor, version in self._versions:
            if version_of(tensor) != version:
                raise ChangedError(
                    f"A tensor of shape {tuple(tensor.shape)} in the {type(self._now).__name__} "
                    f"that {self._name} was given was changed in place between forward and "
                    "backward. Change a clone."
                )
        return _copied(self._before, {}, 0, _detached)

    def _note(self, tensor: Tensor) -> Tensor:
        self._versions.append((tensor, version_of(tensor)))
        return tensor


def copied(value: Any) -> Any:
    """Return a copy of `value` with all tensors but parameters detached, for a separate run."""
    return _copied(value, {}, 0, _detached)


def _detached(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copied(value: Any, known: dict[int, Any], depth: int, of: Callable[[Tensor], Tensor]) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Tensor):
        known[id(value)] = made = of(value)
        return made
    if is_left_alone(value) or depth >= _DEEPEST:
        return value
    if _is_a(value, list, dict, set) or _is_users(value):
        made = known[id(value)] = copy.copy(value)
        _fill(made, value, known, depth, of)
        return made
    if _is_a(value, tuple):
        items = [_copied(item, known, depth + 1, of) for item in value]
        made = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        known[id(value)] = made
        return made
    return value


def _fill(
    made: Any, value: Any, known: dict[int, Any], depth: int, of: Callable[[Tensor], Tensor]
) -> None:
    if _is_a(made, list):
        made[:] = [_copied(item, known, depth + 1, of) for item in value]
    elif _is_a(made, dict):
        for key, item in value.items():
            dict.__setitem__(made, key, _copied(item, known, depth + 1, of))
    for key, item in list(getattr(value, "__dict__", {}).items()):
        made.__dict__[key] = _copied(item, known, depth + 1, of)


def _is_a(value: Any, *kinds: type[Any]) -> bool:
    """Return `isinstance(value, kinds)`, for type checkers without narrowing the type."""
    return isinstance(value, kinds)


def _is_users(value: object) -> bool:
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _OF_NOBODY


def _same(before: Any, now: Any, depth: int, seen: set[int]) -> bool:
    if before is now or id(now) in seen or depth > _DEEPEST:
        return True
    if type(before) is not type(now) or isinstance(before, Tensor):
        return False
    seen.add(id(now))
    if _is_a(before, dict):
        if list(before) != list(now):
            return False
        if not all(_same(before[key], now[key], depth + 1, seen) for key in before):
            return False
    elif _is_a(before, list, tuple):
        if len(before) != len(now):
            return False
        if not all(_same(a, b, depth + 1, seen) for a, b in zip(before, now, strict=True)):
            return False
    elif _is_a(before, set) or not hasattr(before, "__dict__"):
        return bool(before == now)
    if hasattr(before, "__dict__"):
        return _same(vars(before), vars(now), depth + 1, seen)
    return True
