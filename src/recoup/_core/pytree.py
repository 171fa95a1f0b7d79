"""Nested values: the tensors in them, and their split into tensors and the rest.

`flatten` and `flatten_containers` split a value that is put together again later, as torch's pytree
does; `tensors_in` only finds tensors, in a fifth of the time, and is for calls of operators.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in cast("Iterable[Any]", value):
            _collect(item, found)
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            _collect(item, found)


class _Tensor:
    """A placeholder for a tensor."""


_TENSOR = _Tensor()
_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = (_Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Tree:
    """The structure and the other leaves of a nested value whose tensors were taken out."""

    __slots__ = ("_leaves", "_spec", "is_flat")

    def __init__(self, leaves: list[Any], spec: Any) -> None:
        self._leaves, self._spec = leaves, spec
        # Whether there is nothing beside tensors that could be changed.
        self.is_flat = spec is None or spec is tuple

    def matches(self, other: Tree) -> bool:
        """Whether `other` has the same structure and the same leaves other than tensors."""
        if self._spec != other._spec or len(self._leaves) != len(other._leaves):
            return False
        return all(a is b for a, b in zip(self._leaves, other._leaves, strict=True))

    def opaque(self) -> object | None:
        """Return a leaf that may contain tensors unseen, or None."""
        for leaf in self._leaves:
            if not isinstance(leaf, _PLAIN):
                return leaf
        return None

    def mapped(self, change: Callable[[Any], Any]) -> Tree:
        """Return a tree with `change` applied to each leaf that is not a tensor."""
        leaves = [leaf if leaf is _TENSOR else change(leaf) for leaf in self._leaves]
        return Tree(leaves, self._spec)

    def others(self) -> list[Any]:
        """Return the leaves that are not tensors."""
        return [leaf for leaf in self._leaves if leaf is not _TENSOR]

    def unflatten(self, tensors: tuple[Tensor, ...]) -> Any:
        """Put `tensors` back in their places."""
        if self._spec is None:
            return tensors[0]
        if self._spec is tuple:
            return tensors
        taken = iter(tensors)
        leaves = [next(taken) if leaf is _TENSOR else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)


class _Arguments(Tree):
    """The arguments of a call none of which is a container: the usual ones, without a walk."""

    __slots__ = ()

    def mapped(self, change: Callable[[Any], Any]) -> Tree:
        return _Arguments(super().mapped(change)._leaves, self._spec)

    def unflatten(self, tensors: tuple[Tensor, ...]) -> Any:
        """Return the arguments and the keyword arguments."""
        taken = iter(tensors)
        leaves = [next(taken) if leaf is _TENSOR else leaf for leaf in self._leaves]
        keys: tuple[str, ...] = self._spec
        num_args = len(leaves) - len(keys)
        return tuple(leaves[:num_args]), dict(zip(keys, leaves[num_args:], strict=True))


# The walk of torch's pytree costs tens of microseconds; most values do not need it.
BARE = Tree([], None)  # of a value that is one tensor
_TUPLE = Tree([], tuple)


def flatten(value: Any) -> tuple[tuple[Tensor, ...], Tree]:
    """Return the tensors of a nested value (tuples, lists, dicts, named tuples) and its tree."""
    if isinstance(value, Tensor):
        return (value,), BARE
    if are_tensors(value):
        return value, _TUPLE
    return _taken_apart(*tree_flatten(value))


def are_tensors(value: Any) -> TypeGuard[tuple[Tensor, ...]]:
    """Whether `value` is a tuple of tensors."""
    if type(value) is not tuple:
        return False
    for item in cast("tuple[Any, ...]", value):  # noqa: SIM110 - without a generator, for speed
        if not isinstance(item, Tensor):
            return False
    return True


def flatten_containers(value: Any) -> tuple[tuple[Tensor, ...], Tree]:
    """Do what `flatten` does, but treat all objects except tuples, lists and dicts as leaves.

    Other libraries may register their classes with torch's pytree. Unflattening gives a new object
    of such a class, so code that holds the original (a cache) would not see changes to it.
    """
    if are_tensors(value):
        return value, _TUPLE
    return _taken_apart(*tree_flatten(value, is_leaf=_is_no_container))


def flatten_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor, ...], Tree]:
    """Do what `flatten_containers` does for the pair of `args` and `kwargs`.

    If all are tensors without a keyword, the tree is flat and stands for `args` alone.
    """
    if not kwargs:
        for arg in args:
            if not isinstance(arg, Tensor):
                break
        else:
            return args, _TUPLE
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if not _is_no_container(leaf):
            return flatten_containers((args, kwargs))
    tensors = tuple([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tensors, _Arguments(leaves, tuple(kwargs))


def _is_no_container(value: Any) -> bool:
    return not isinstance(value, (tuple, list)) and type(value) not in _DICTS


def _taken_apart(leaves: list[Any], spec: Any) -> tuple[tuple[Tensor, ...], Tree]:
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    return tensors, Tree([_TENSOR if isinstance(x, Tensor) else x for x in leaves], spec)
