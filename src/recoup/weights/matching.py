"""Choosing parameters of a tree: by patterns, types of modules, functions, or lists of these."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from recoup.weights.parametrized_module import attached_to

__all__ = ["DTYPES", "Named", "Where", "check_is_module", "matching", "named", "suited"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Where = str | type[nn.Module] | Callable[[str, nn.Parameter, nn.Module], bool] | Sequence[Any]


class Named(NamedTuple):
    """A parameter by its qualified name, and by its name in the module that owns it."""

    name: str
    owner: nn.Module
    key: str
    parameter: nn.Parameter


def matching(module: nn.Module, where: Where, argument: str = "pattern") -> list[Named]:
    """Return the parameters that `where` chooses, those of a shared module once.

    Args:
        module: the tree.
        where: a regular expression that matches the whole of a qualified name, a type of modules
            (whose weights are chosen), a function from a qualified name, the parameter and the
            module that owns it to a bool, or a list of these.
        argument: the name of `where` in error messages.

    Raises:
        ValueError: when `where`, or an entry of it, is none of these or chooses nothing.
    """
    return [each for each, _ in _chosen(module, where, argument)]


def suited(module: nn.Module, where: Where) -> tuple[list[Named], dict[str, str]]:
    """Return the parameters to reparametrize, and why others are left out, by name.

    A pattern or a type leaves out what has no floating-point type, is frozen, or was added by a
    reparametrization. A parameter that a name in full or a function chooses is meant.
    """
    found: list[Named] = []
    left_out: dict[str, str] = {}
    for each, is_meant in _chosen(module, where, "pattern"):
        if not is_meant and each.parameter.dtype not in DTYPES:
            left_out[each.name] = f"is {each.parameter.dtype}"
        elif not is_meant and not each.parameter.requires_grad:
            left_out[each.name] = "requires no gradient"
        elif not is_meant and _is_added(each):
            left_out[each.name] = "belongs to a reparametrization"
        else:
            found.append(each)
    if not found:
        name, reason = next(iter(left_out.items()))
        raise ValueError(
            f"`{name}` {reason}, and `pattern` matches nothing else. Choose floating-point "
            "parameters that require a gradient; for another one give its name in full."
        )
    return found, left_out


def _chosen(module: nn.Module, where: Where, argument: str) -> list[tuple[Named, bool]]:
    """Return what `where` chooses, and whether it means just that parameter."""
    check_is_module(module)
    candidates = list(named(module))
    entries: list[Any] = [*cast("Any", where)] if isinstance(where, (list, tuple)) else [where]
    if not entries:
        raise ValueError(f"`{argument}` is {where!r}, which chooses nothing. Give one pattern.")
    found: dict[int, bool] = {}  # by the place among the candidates
    for entry in entries:
        chooses = _choice(entry, argument)
        places = [place for place, each in enumerate(candidates) if chooses(each)]
        if not places:
            raise _chooses_nothing(module, entry, argument, candidates)
        for place in places:
            is_meant = _is_function(entry) or entry == candidates[place].name
            found[place] = found.get(place, False) or is_meant
    uses: dict[tuple[int, str], tuple[Named, bool]] = {}
    for place in sorted(found):
        each = candidates[place]
        uses.setdefault((id(each.owner), each.key), (each, found[place]))
    return list(uses.values())


def _choice(entry: Any, argument: str) -> Callable[[Named], bool]:
    """Return, as a function, whether an entry of `where` chooses a parameter."""
    if _is_type(entry):
        return lambda each: isinstance(each.owner, entry) and _is_weight(each)
    if _is_function(entry):
        return lambda each: bool(entry(each.name, each.parameter, each.owner))
    try:
        pattern: re.Pattern[str] = re.compile(entry)
        pattern.fullmatch("")  # a pattern of bytes compiles, too
    except (re.error, TypeError) as error:
        raise ValueError(
            f"`{argument}` is {entry!r}, but must be a regular expression, a type of modules, a "
            f"function of (name, parameter, module), or a list of these: {error}."
        ) from None
    return lambda each: pattern.fullmatch(each.name) is not None


def _is_weight(each: Named) -> bool:
    return "weight" in each.key and not _is_added(each)


def _is_added(each: Named) -> bool:
    """Whether it is the magnitude of a weight norm, or the deviation of a weight's noise."""
    attached = attached_to(each.owner)
    weights = {} if attached is None else attached.weights
    return any(each.key in step.added(key) for key, w in weights.items() for step in w.steps)


def _is_type(entry: object) -> bool:
    return isinstance(entry, type) and issubclass(entry, nn.Module)


def _is_function(entry: object) -> bool:
    return callable(entry) and not isinstance(entry, type)


def _chooses_nothing(
    module: nn.Module, entry: Any, argument: str, candidates: list[Named]
) -> ValueError:
    names = ", ".join(each.name for each in candidates[:8]) or "none"
    more = ", ..." if len(candidates) > 8 else ""
    how = "It must match the whole of a qualified name; there" if type(entry) is str else "There"
    return ValueError(
        f"`{argument}` {getattr(entry, '__name__', repr(entry))} matches no parameter of "
        f"{type(module).__name__}. {how} are: {names}{more}"
    )


def named(module: nn.Module) -> Iterator[Named]:
    """Yield the parameters of a tree, each under all of its names."""
    named_modules = cast("Any", module.named_modules)  # torch's annotation is incomplete
    modules: Iterator[tuple[str, nn.Module]] = named_modules(remove_duplicate=False)
    for prefix, owner in modules:
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                yield Named(f"{prefix}.{key}" if prefix else key, owner, key, parameter)


def check_is_module(module: object) -> None:
    """Raise if `module` is not a module."""
    if not isinstance(module, nn.Module):
        got = module.__name__ if isinstance(module, type) else type(module).__name__
        raise ValueError(f"`module` is {got}, but must be an nn.Module (an instance, not a class).")
