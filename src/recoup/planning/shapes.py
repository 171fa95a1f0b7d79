"""The shapes and sizes of arguments: which plan serves a call, and whether a batch is larger."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import ge
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from recoup._core.devices import autocast_kinds
from recoup._core.pytree import flatten
from recoup.memory import format_bytes
from recoup.planning.forwards import Args

__all__ = ["ArgumentShapes", "ArgumentSizes", "shapes_of"]

_MOST_VALUES = 1024  # that are looked at within the objects of an argument


class ArgumentShapes(NamedTuple):
    """The shapes of the tensors among the arguments of a call.

    Args:
        family: what is the same for all calls that one plan may serve: the names of the arguments,
            their flags and strings, the types of their tensors, the autocast in force, and which
            parameters require gradients.
        shapes: the shape of each tensor.
        training: which modules are in training mode; a plan for them serves evaluation, too.
    """

    family: tuple[object, ...]
    shapes: tuple[tuple[int, ...], ...]
    training: tuple[bool, ...] = ()

    def cover(self, other: ArgumentShapes) -> bool:
        """Whether a step of `other`, a call of the same family, takes no more bytes."""
        return (
            self.family == other.family
            and all(map(ge, self.training, other.training))
            and all(all(map(ge, *pair)) for pair in zip(self.shapes, other.shapes, strict=True))
        )

    def share_of(self, other: ArgumentShapes) -> float:
        """Return the least number of entries of a tensor of `other`, relative to the own one."""
        pairs = zip(self.shapes, other.shapes, strict=True)
        shares = (math.prod(theirs) / max(math.prod(own), 1) for own, theirs in pairs)
        return min(shares, default=1.0)

    def growth_to(self, other: ArgumentShapes) -> float:
        """Return how many times as many bytes a step of `other` may take, roughly.

        They grow with the square of a dimension that is larger (attention). It is infinite for a
        call of another family.
        """
        if self.family != other.family:
            return math.inf
        pairs = zip(self.shapes, other.shapes, strict=True)
        return max((_growth(mine, theirs) for mine, theirs in pairs), default=math.inf)

    def __str__(self) -> str:
        shown = [" x ".join(map(str, shape)) or "scalar" for shape in self.shapes]
        return ", ".join(dict.fromkeys(shown))


def shapes_of(model: nn.Module, args: Args, kwargs: Mapping[str, Any]) -> ArgumentShapes:
    """Return the shapes of the arguments of a call of `model`.

    Numbers are left out, since they count steps and batches.
    """
    modules = list(model.modules())
    family: list[object] = [*map(_autocast, autocast_kinds())]
    family.append(
        tuple(p.requires_grad for each in modules for p in each.parameters(recurse=False))
    )
    shapes: list[tuple[int, ...]] = []
    for name, leaf in _leaves("", {**dict(enumerate(args)), **kwargs}):
        if isinstance(leaf, Tensor):
            family.append((name, *_kind(leaf)))
            shapes.append(tuple(leaf.shape))
        elif isinstance(leaf, (bool, str, type(None))):
            family.append((name, leaf))
    training = tuple(each.training for each in modules)
    return ArgumentShapes(tuple(family), tuple(shapes), training)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value with their places, in one order however a dict is made."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        for key in sorted(entries, key=str):
            yield from _leaves(f"{name}[{key!r}]", entries[key])
    elif isinstance(value, (tuple, list)):
        for place, each in enumerate(cast("Sequence[Any]", value)):
            yield from _leaves(f"{name}[{place}]", each)
    else:
        tensors, tree = flatten(value)
        for place, each in enumerate([*tensors, *tree.others()]):
            yield f"{name}.{place}", each


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tensor.ndim, tensor.requires_grad


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _growth(shape: tuple[int, ...], other: tuple[int, ...]) -> float:
    ratios = [theirs / max(mine, 1) for mine, theirs in zip(shape, other, strict=True)]
    return math.prod(ratio * max(ratio, 1.0) for ratio in ratios)


class ArgumentSizes:
    """The bytes of the arguments that a plan was made with, argument by argument.

    Args:
        args: the arguments.
        kwargs: the keyword arguments.
    """

    def __init__(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        self._planned = _argument_bytes(args, kwargs)
        self._has_warned = False

    def include(self, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Let the plan be made for these arguments, too."""
        for key, num_bytes in _argument_bytes(args, kwargs).items():
            self._planned[key] = max(num_bytes, self._planned.get(key, 0))

    def warn_if_larger(self, name: str, args: Args, kwargs: Mapping[str, Any]) -> None:
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


def _argument_bytes(args: Args, kwargs: Mapping[str, Any]) -> dict[int | str, int]:
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {key: sum(tensor.nbytes for tensor in _tensors_in(value)) for key, value in given}


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value, and those in attributes of objects in it."""
    tensors, tree = flatten(value)
    found, waiting, seen = [*tensors], tree.others(), set[int]()
    for each in waiting:  # which grows
        if isinstance(each, Tensor):
            found.append(each)
        elif id(each) not in seen and len(waiting) < _MOST_VALUES:
            seen.add(id(each))
            waiting += _entries_of(each)
    return found


def _entries_of(value: Any) -> Iterable[Any]:
    """Return the values in a container, or the attributes of an object, without code of its own."""
    if isinstance(value, (nn.Module, type, FunctionType, ModuleType)):
        return ()
    entries: Any = value
    if not isinstance(value, (dict, list, tuple)):
        try:
            entries = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return ()
    if len(entries) > _MOST_VALUES:
        return ()
    return cast("dict[Any, Any]", entries).values() if isinstance(entries, dict) else entries
