"""The arguments that a model is planned with: what its forward takes, their shapes and sizes.

NOTE [ What a call refuses ]

Rule 1. A signature does not say what a call takes: a decorator, a hook or a `__call__` may give the
        forward other arguments. So nothing is refused before the call. Where a call fails, and the
        signature does not fit what it was given, the error says what to type.
Rule 2. A dict alone is an argument, as in a call, unless its entries can be the keyword arguments
        and have the name of at least one parameter.
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

from recoup._core.devices import autocast_kinds
from recoup._core.pytree import flatten
from recoup.memory import format_bytes
from recoup.planning.forwards import Args, Kwargs


def example_arguments(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the arguments and keyword arguments that a model is called with.

    One dict alone has the keyword arguments (a batch of transformers) if the forward takes its
    entries by name; else it is an argument (sentence-transformers).

    Args:
        model: the model.
        args: its arguments, as they were given.
        kwargs: its keyword arguments, likewise.

    Raises:
        ValueError: `model` is no module.
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

    Args:
        model: the model.
        parts: what the function returned, beside the model.

    Raises:
        ValueError: `model` is no module.
    """
    *args, last = parts or ({},)
    if not isinstance(last, dict):
        return example_arguments(model, tuple(parts), {})
    kwargs = cast("Kwargs", last)
    if kwargs and not args and not _fits(model, (), kwargs) and _fits(model, (kwargs,), {}):
        return (kwargs,), {}
    return example_arguments(model, tuple(args), kwargs)


def model_and_arguments(built: Any, name: str = "`build`") -> tuple[nn.Module, Args, Kwargs]:
    """Return the model, its arguments and its keyword arguments, which a function has built.

    Args:
        built: what it returned: ``(model, *args)``, of which a last dict has keyword arguments.
        name: the name of the function in errors.
    """
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
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "`model` has parameters on the meta device. Allocate them first: "
            'model.to_empty(device="cpu").'
        )
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ValueError(
            "`model` is a DistributedDataParallel or DataParallel, whose steps wait for other "
            "ranks. Plan for `model.module`, on every rank."
        )


def explain_model(model: nn.Module, args: Args, kwargs: Kwargs, error: Exception) -> None:
    """Raise ValueError if a model has failed because it does not take the arguments.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        error: what it has raised.
    """
    kind = type(model).__name__
    # As torch says it; a forward that is inherited may pass it on (that of a LightningModule).
    if str(error) == f'Module [{kind}] is missing the required "forward" function':
        raise ValueError(
            f"`model` is a {kind} without a `forward`. Plan a module that training calls; the "
            "`training_step` of a LightningModule is planned by the trainer's callback "
            "recoup.integrations.lightning.MemoryBudget."
        ) from error
    if isinstance(error, TypeError):
        signature = _signature(model)
        taken = kwargs if signature is None else signature.parameters
        for name in kwargs:
            if name not in taken and not _takes_any_keyword(signature):
                raise ValueError(
                    f"`{name}` is no option of recoup.plan, and the forward of {kind} takes no "
                    f"`{name}`. The bytes are `budget`; the model takes {', '.join(taken)}."
                ) from error
        way_out = "Give its arguments as in training, after the model"
        explain_call(model, args, kwargs, error, f"The forward of {kind}", way_out)
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        names = next(_names_in(model), set[str]())
        if not names.isdisjoint(cast("Mapping[Any, Any]", args[0])):
            error.add_note(
                f"The dict was given to the forward of {kind} as its one argument. It has the "
                "keyword arguments where the forward can be called with all of its entries by name "
                f"(it takes {', '.join(sorted(names))})."
            )


def explain_call(
    function: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
    error: Exception,
    name: str,
    way_out: str,
) -> None:
    """Raise ValueError if a call has failed because of its arguments (See Rule 1).

    Args:
        function: the function or module.
        args: the arguments.
        kwargs: the keyword arguments.
        error: what it has raised.
        name: what begins the error.
        way_out: what ends it.
    """
    signature = _signature(function)
    if signature is None or not isinstance(error, TypeError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as why:
        takes = ", ".join(map(str, signature.parameters.values())) or "nothing"
        num, plural = len(args), "" if len(args) == 1 else "s"
        given = ", ".join(([f"{num} argument{plural}"] if args else []) + list(kwargs)) or "nothing"
        raise ValueError(f"{name} takes ({takes}), but got {given}: {why}. {way_out}.") from error


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


def _takes_any_keyword(signature: inspect.Signature | None) -> bool:
    given = () if signature is None else signature.parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in given)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (AttributeError, TypeError, ValueError):
        return None


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
    return {key: sum(tensor.nbytes for tensor in tensors_within(value)) for key, value in given}


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
