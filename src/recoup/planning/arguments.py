"""The arguments that a model is planned with: what its forward takes, and what is told if not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

from recoup.planning.forwards import Args, Kwargs


def checked_arguments(model: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the arguments and keyword arguments that a model is called with.

    One dict alone has the keyword arguments (a batch of transformers) if the forward has a
    parameter by one of its keys; else it is an argument (sentence-transformers).

    Args:
        model: the model.
        args: its arguments, as they were given.
        kwargs: its keyword arguments, likewise.

    Raises:
        ValueError: `model` is no module, or its forward does not take the arguments.
    """
    check_module(model)
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise ValueError(
            f"`model` is a {type(model).__name__} without a `forward`. Plan a module that training "
            "calls; the `training_step` of a LightningModule is planned by the trainer's callback "
            "recoup.integrations.lightning.MemoryBudget."
        )
    signature = _signature(model.forward)
    if signature is None:
        return args, kwargs
    taken = signature.parameters
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        given = cast("Mapping[Any, Any]", args[0])
        if not _names_of(model).isdisjoint(given):
            args, kwargs = (), dict(given)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    kind = type(model).__name__
    for name in () if takes_any else kwargs:
        if name not in taken:
            raise ValueError(
                f"`{name}` is no option of recoup.plan, and the forward of {kind} takes no "
                f"`{name}`. The bytes are `budget`; the model takes {', '.join(taken)}."
            )
    if not vars(model)["_forward_pre_hooks"]:  # which may give it others
        way_out = "Give its arguments as in training, after the model"
        check_takes(model, args, kwargs, f"The forward of {kind}", way_out)
    return args, kwargs


def _names_of(model: nn.Module) -> set[str]:
    """Return the names of what a forward takes, or else of what the one takes that it passes to."""
    for module in model.modules():  # wrappers pass on anything (peft)
        signature = _signature(module.forward)
        named = () if signature is None else signature.parameters.values()
        names = {
            each.name for each in named if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }
        if names:
            return names
    return set()


def check_module(model: Any) -> None:
    """Raise ValueError if a model is no module."""
    if isinstance(model, type):
        raise ValueError(f"`model` is the class {model.__name__}, but must be a module of it.")
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model` is a {type(model).__name__}, but must be a torch.nn.Module.")


def check_takes(
    function: Callable[..., Any], args: Args, kwargs: Kwargs, name: str, way_out: str
) -> None:
    """Raise ValueError if a function or a module cannot be called with some arguments.

    Args:
        function: the function.
        args: the arguments.
        kwargs: the keyword arguments.
        name: what begins the error.
        way_out: what ends it.
    """
    signature = _signature(function.forward if isinstance(function, nn.Module) else function)
    if signature is None:
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values())) or "nothing"
        num, plural = len(args), "" if len(args) == 1 else "s"
        given = ", ".join(([f"{num} argument{plural}"] if args else []) + list(kwargs)) or "nothing"
        raise ValueError(f"{name} takes ({takes}), but got {given}: {error}. {way_out}.") from None


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
