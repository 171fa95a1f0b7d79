"""The arguments that a model is planned with: what its forward takes, and what memory they need.

A signature does not say what a call takes: a decorator, a hook or a `__call__` may give the forward
other arguments. So nothing is refused before the call; an error of the call gets a note.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import ge
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recoup._core.devices import autocast_kinds
from recoup._core.pytree import flatten
from recoup.planning.forwards import Args, Kwargs

_MOST_VALUES = 1024  # that are looked at within the objects of an argument
Shape = tuple[int, ...]


def example_arguments(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the arguments and keyword arguments that a model is called with.

    One dict alone has the keyword arguments (a batch of transformers) if the forward takes its
    entries by name; else it is an argument (sentence-transformers).
    """
    check_module(model)
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        given = dict(cast("Mapping[Any, Any]", args[0]))
        if _takes_entries(model, given):
            return (), given
    return args, kwargs


def built_arguments(model: nn.Module, parts: Sequence[Any]) -> tuple[Args, Kwargs]:
    """Return the arguments that a function has built, of which a last dict has keyword arguments.

    Such a dict alone is an argument if the forward takes it, and not its entries by name.
    """
    *args, last = parts or ({},)
    if not isinstance(last, dict):
        return example_arguments(model, tuple(parts), {})
    kwargs = cast("Kwargs", last)
    if kwargs and not args and not _fits(model, (), kwargs) and _fits(model, (kwargs,), {}):
        return (kwargs,), {}
    return example_arguments(model, tuple(args), kwargs)


def model_and_arguments(built: Any, name: str = "`build`") -> tuple[nn.Module, Args, Kwargs]:
    """Return the model and the arguments that a function of this name has built."""
    is_several = isinstance(built, (tuple, list))
    parts: list[Any] = [*cast("Any", built)] if is_several else [built]
    if not parts or not isinstance(parts[0], nn.Module):
        raise ValueError(
            f"{name} returned a {type(built).__name__}, but must return a model and its "
            "arguments: (model, argument, ...)."
        )
    return parts[0], *built_arguments(parts[0], parts[1:])


def check_module(model: Any) -> None:
    """Raise ValueError if a model is no module."""
    if isinstance(model, type):
        raise ValueError(f"`model` is the class {model.__name__}, but must be a module of it.")
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model` is a {type(model).__name__}, but must be a torch.nn.Module.")


def check_plannable(model: Any) -> None:
    """Raise ValueError if no plan can be made for a model, whatever its arguments are."""
    check_module(model)
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise ValueError(
            f"`model` is a {type(model).__name__} with parameters that are not initialized (of a "
            "LazyLinear, for example): the first forward makes them. Run one before: "
            "with torch.no_grad(): model(...)."
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "`model` has parameters on the meta device. Allocate them first: "
            'model.to_empty(device="cpu").'
        )
    if any(p.grad_fn is not None for p in model.parameters()):
        raise ValueError(
            f"`model` is a {type(model).__name__} whose weights were computed (by functional_call "
            "they are given such): planning would run backward through what computed them. Plan, "
            "or run a first step, outside of that."
        )
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ValueError(
            "`model` is a DistributedDataParallel or DataParallel, whose steps wait for other "
            "ranks. Plan for `model.module`, on every rank."
        )


def explain_model(model: nn.Module, args: Args, kwargs: Kwargs, error: Exception) -> None:
    """Add to an error what to type, if a model may not take what it was called with."""
    may_be = not _fits(model, args, kwargs) or any(isinstance(each, dict) for each in args)
    if (may_be and isinstance(error, TypeError)) or isinstance(error, NotImplementedError):
        given = ", ".join([*(type(each).__name__ for each in args), *kwargs]) or "nothing"
        error.add_note(
            f"The forward of {type(model).__name__} was given: {given}. Give its arguments as in "
            "training, after the model (a dict alone has keyword arguments where the forward can "
            "be called with all of its entries by name); the bytes of a plan are `budget`. The "
            "`training_step` of a LightningModule is planned by the trainer's callback "
            "recoup.integrations.lightning.MemoryBudget."
        )


def _takes_entries(model: nn.Module, entries: dict[Any, Any]) -> bool:
    """Whether the entries of a dict can be keyword arguments, and one has the name of a parameter.

    A wrapper that passes on anything (peft) takes what the one takes that it passes to.
    """
    names = next(_names_in(model), set[str]())
    if names.isdisjoint(entries) or not all(isinstance(key, str) for key in entries):
        return False
    return _fits(model, (), entries)


def _fits(model: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Whether the signature of the forward of a model is known, and fits the arguments."""
    signature = _signature(model)
    try:
        if signature is not None:
            signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return signature is not None


def _names_in(model: nn.Module) -> Iterator[set[str]]:
    """Yield the names of the parameters of the forwards in a model that have some."""
    for module in model.modules():
        signature = _signature(module)
        named = () if signature is None else signature.parameters.values()
        names = {
            each.name for each in named if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        if names:
            yield names


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (AttributeError, TypeError, ValueError):
        return None


# -- what the memory of a step depends on ----------------------------------------------------------


class ArgumentShapes(NamedTuple):
    """What the memory of a step depends on: the shapes of a call's arguments, gradients and modes.

    Args:
        family: what is the same for all calls that one plan may serve: the names of the arguments,
            their flags and strings, the types of their tensors, and the autocast in force.
        shapes: the shape of each tensor, by its place.
        inputs: the places of the tensors that require gradients.
        trained: the bytes of each parameter that requires a gradient, at least 1; 0 of others.
        training: which modules are in training mode; a plan for them serves evaluation, too.
    """

    family: tuple[object, ...]
    shapes: dict[str, Shape]
    inputs: frozenset[str]
    trained: tuple[int, ...]
    training: tuple[bool, ...]

    def cover(self, other: ArgumentShapes) -> bool:
        """Whether a step of `other` takes no more bytes."""
        return (
            self.family == other.family
            and self.inputs >= other.inputs
            and _cover(self.trained, other.trained)
            and _cover(self.training, other.training)
            and all(_cover(*pair) for pair in self._pairs(other))
        )

    @property
    def has_backward(self) -> bool:
        """Whether an input or a parameter requires a gradient."""
        return bool(self.inputs) or any(self.trained)

    def _pairs(self, other: ArgumentShapes) -> Iterator[tuple[Shape, Shape]]:
        """Yield the shapes of each tensor that both have; of other dimensions, how many entries."""
        for place, own in self.shapes.items():
            theirs = other.shapes.get(place)
            if theirs is not None:
                is_alike = len(own) == len(theirs)
                yield (own, theirs) if is_alike else ((math.prod(own),), (math.prod(theirs),))

    def share_of(self, other: ArgumentShapes) -> float:
        """Return the least number of entries of a tensor of `other`, relative to the own one."""
        shares = (math.prod(theirs) / max(math.prod(own), 1) for own, theirs in self._pairs(other))
        return min(shares, default=1.0)

    def growth_to(self, other: ArgumentShapes) -> float:
        """Return how many times as many bytes a step of `other` may take, roughly.

        They grow with the square of a dimension that is larger (attention).
        """
        return max((_growth(*pair) for pair in self._pairs(other)), default=math.inf)

    def __str__(self) -> str:
        return ", ".join(dict.fromkeys(map(_shown, self.shapes.values())))

    def excess_of(self, other: ArgumentShapes, model: nn.Module, room: float) -> str:
        """Return what a step of `other` needs more bytes for; empty if it is nothing that is known.

        Shapes that have as many entries may take `room` times the bytes.
        """
        nums = [(len(each.trained), len(each.training)) for each in (self, other)]
        if nums[0] != nums[1]:
            is_more = sum(other.trained) > sum(self.trained)
            return "with more parameters than it was planned with" if is_more else ""
        modules = dict(cast("Iterable[tuple[str, Any]]", model.named_modules()))
        names = [f"{own}.{key}".lstrip(".") for own, m in modules.items() for key in m._parameters]
        for name, was, is_now in zip(names, self.trained, other.trained, strict=True):
            if is_now > was > 0:
                return f"with a `{name}` of more bytes than when it was planned"
            if is_now > was:
                return f"with `{name}` requiring a gradient, which it did not when it was planned"
        for name, was, is_now in zip(modules, self.training, other.training, strict=True):
            if is_now > was:
                return f"with `{name}` in training mode, in which it was not when it was planned"
        for place, shape in other.shapes.items():
            if place not in self.shapes:
                return f"with an argument of {_shown(shape)} that it was not planned with"
        larger = (pair for pair in self._pairs(other) if not _cover(*pair))
        own, theirs = next(larger, ((), ()))
        if theirs and self.growth_to(other) > room:
            return f"with an argument of {_shown(theirs)} where the plan is for {_shown(own)}"
        return ""


def _cover(own: Sequence[int], others: Sequence[int]) -> bool:
    return len(own) == len(others) and all(map(ge, own, others))


def _growth(own: Shape, theirs: Shape) -> float:
    ratios = [b / max(a, 1) for a, b in zip(own, theirs, strict=True)]
    return math.prod(ratio * max(ratio, 1.0) for ratio in ratios)


def _shown(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def shapes_of(model: nn.Module, args: Args, kwargs: Mapping[str, Any]) -> ArgumentShapes:
    """Return the shapes of the arguments of a call of `model`.

    Numbers are left out, since they count steps and batches.
    """
    family: list[object] = [*map(_autocast, autocast_kinds())]
    shapes: dict[str, Shape] = {}
    inputs: list[str] = []
    for place, leaf in _leaves("", {**dict(enumerate(args)), **kwargs}):
        if isinstance(leaf, Tensor):
            family.append((place, leaf.dtype, leaf.device, leaf.ndim))
            shapes[place] = tuple(leaf.shape)
            if leaf.requires_grad:
                inputs.append(place)
        elif isinstance(leaf, (bool, str, type(None))):
            family.append((place, leaf))
    modules: list[Any] = list(model.modules())
    own = [each for module in modules for each in module._parameters.values()]
    trained = tuple([0 if p is None or not p.requires_grad else max(p.nbytes, 1) for p in own])
    training = tuple([each.training for each in modules])
    return ArgumentShapes(tuple(family), shapes, frozenset(inputs), trained, training)


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
        others = flatten(value)[1].others()
        for place, each in enumerate([*tensors_within(value), *others]):
            yield f"{name}.{place}", each


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class PlannedArguments:
    """The shapes of the arguments that a plan was made with, to warn of larger ones.

    It holds no model: whoever holds it (a follower) must not keep one alive. `room` is how many
    times the bytes of the planned step the budget leaves to a step; infinite without a budget.
    """

    def __init__(
        self, model: nn.Module, args: Args, kwargs: Mapping[str, Any], room: float
    ) -> None:
        self._room = room
        self._shapes = [shapes_of(model, args, kwargs)]
        self._has_warned = False

    def include(self, shapes: ArgumentShapes) -> None:
        """Let the plan be made for these arguments, too."""
        self._shapes = [*(each for each in self._shapes if not shapes.cover(each)), shapes]

    def warn_if_larger(self, model: nn.Module, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Warn once if a step with the arguments may take more bytes than the planned one."""
        if self._has_warned or self._room == math.inf:
            return
        shapes = shapes_of(model, args, kwargs)
        if any(each.cover(shapes) for each in self._shapes):
            return
        excesses = [each.excess_of(shapes, model, self._room) for each in self._shapes]
        if all(excesses):
            self._has_warned = True
            warnings.warn(
                f"A planned {type(model).__name__} was called {excesses[-1]}. Gradients are "
                "right, but this step may take more than the budget. Make the plan with the "
                "largest batch, the longest rows and the parameters that are trained, or give "
                "`replan=True`.",
                stacklevel=5,
            )


def tensors_within(value: Any) -> list[Tensor]:
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
