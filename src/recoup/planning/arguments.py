"""The arguments that a model is planned with: what its forward takes.

NOTE [ What a call refuses ]

Rule 1. A signature does not say what a call takes: a decorator, a hook or a `__call__` may give the
        forward other arguments. So nothing is refused before the call. Where a call fails, and the
        signature does not fit what it was given, the error says what to type.
Rule 2. A dict alone is an argument, as in a call, unless its entries can be the keyword arguments
        and have the name of at least one parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.nn.parameter import is_lazy

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
    way_out = "Give its arguments as in training, after the model; the bytes of a plan are `budget`"
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


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (AttributeError, TypeError, ValueError):
        return None
