"""Applying reparametrizations to the parameters of a module tree, listing and removing them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from recoup.weights.graph import register_operators
from recoup.weights.place import Place
from recoup.weights.reparametrization import Reparametrization
from recoup.weights.swapped import attach, attached_to, restore_class, swap_class

__all__ = ["Applied", "applied", "apply_to", "places_of", "remove"]


def apply_to(module: nn.Module, pattern: str, make: Callable[[], Reparametrization]) -> nn.Module:
    """Apply what `make` returns to each parameter of `module` that `pattern` matches.

    Everything is checked before anything is changed.
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"`module` is a {type(module).__name__}, but must be an nn.Module.")
    found = _matching(module, pattern)
    _check_module(module)
    register_operators()
    steps: list[Reparametrization] = []
    for each in found:
        step = make()
        _check_module(each.owner)
        _check(step, each)
        step.fit(each.parameter, each.name)
        steps.append(step)
    for step, (name, owner, key, _) in zip(steps, found, strict=True):
        places = attach(owner).places
        if key not in places:
            places[key] = Place(key, f"`{name}` of {type(module).__name__}")
        places[key].add(step)
        step.applied_to(owner, key)
        swap_class(owner)
    for part in _covering(module, {id(each.owner) for each in found}):
        attach(part).covered.append(steps[0].application)
        swap_class(part)
    return module


def _covering(module: nn.Module, owners: set[int]) -> Iterator[nn.Module]:
    """Yield the modules of the tree whose forwards give a draw to what is in them."""
    for part in module.modules():
        has_forward = type(part).forward is not nn.Module.forward and "forward" not in vars(part)
        if part is module or (has_forward and any(id(inner) in owners for inner in part.modules())):
            yield part


class _Named(NamedTuple):
    """A parameter by its qualified name, and by its name in the module that owns it."""

    name: str
    owner: nn.Module
    key: str
    parameter: nn.Parameter


def _matching(module: nn.Module, pattern: str) -> list[_Named]:
    """Return the parameters that match, those of a shared module once."""
    try:
        matches = re.compile(pattern).fullmatch
    except (re.error, TypeError) as error:
        raise ValueError(
            f"`pattern` is {pattern!r}, but must be a regular expression: {error}."
        ) from None
    named = list(_named(module))
    found: dict[tuple[int, str], _Named] = {}
    for each in named:
        if matches(each.name):
            found.setdefault((id(each.owner), each.key), each)
    if not found:
        names = ", ".join(each.name for each in named[:8]) or "none"
        more = ", ..." if len(named) > 8 else ""
        raise ValueError(
            f"`pattern` {pattern!r} matches no parameter of {type(module).__name__}. It must match "
            f"the whole of a qualified name; there are: {names}{more}"
        )
    return list(found.values())


def _named(module: nn.Module) -> Iterator[_Named]:
    named_modules = cast("Any", module.named_modules)  # torch says less of it than it knows
    modules: Iterator[tuple[str, nn.Module]] = named_modules(remove_duplicate=False)
    for prefix, owner in modules:
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                yield _Named(f"{prefix}.{key}" if prefix else key, owner, key, parameter)


def _check(step: Reparametrization, each: _Named) -> None:
    name, owner, key, parameter = each
    if is_lazy(parameter):
        raise ValueError(
            f"`{name}` has no shape yet. Run a batch through {type(owner).__name__} first."
        )
    if not parameter.is_floating_point():
        raise ValueError(
            f"`{name}` is not of a floating-point type, which {step.kind} needs. Let `pattern` "
            "leave it out."
        )
    attached = attached_to(owner)
    place = None if attached is None else attached.places.get(key)
    for other in () if place is None else place.steps:
        if other.kind == step.kind:
            raise ValueError(
                f"`{name}` has {other!r} already. Change what that was given (a 0-dim tensor, or a "
                "function of the step), or call recoup.weights.remove first."
            )


def _check_module(module: nn.Module) -> None:
    if "forward" in module.__dict__:
        raise ValueError(
            f"`module` has a {type(module).__name__} whose `forward` was replaced on the instance "
            "(a compiled or hooked module), so it cannot be extended. Apply before that is done."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError("`module` has a ScriptModule, which cannot be extended. Apply before.")


class Applied:
    """A reparametrization of one parameter.

    Attributes:
        name: the qualified name of the parameter.
        reparametrization: what is applied to it.
    """

    def __init__(self, name: str, reparametrization: Reparametrization) -> None:
        self.name = name
        self.reparametrization = reparametrization

    @property
    def step(self) -> int:
        """How many forwards in training there were; what `p` or `std` is called with."""
        return self.reparametrization.application.step

    @step.setter
    def step(self, step: int) -> None:
        self.reparametrization.application.step = step

    def __repr__(self) -> str:
        return f"{self.name}: {self.reparametrization!r}"


def applied(module: nn.Module) -> list[Applied]:
    """Return what is applied to which parameter of `module`, in the order in which it runs.

    Args:
        module: a module, or a tree of modules.

    Returns:
        An entry for each reparametrization of each use of a parameter. Its `step` can be set, which
        a schedule needs after training was resumed.

    Example:
        >>> import recoup, torch
        >>> conv = recoup.weight_norm(recoup.weight_noise(torch.nn.Conv1d(4, 8, 3), std=0.1))
        >>> recoup.weights.applied(conv)
        [weight: weight_norm(dim=0), weight: weight_noise(std=0.1)]
    """
    seen: set[int] = set()
    found: list[Applied] = []
    for name, place in _places(module):
        if id(place) not in seen:
            seen.add(id(place))
            found.extend(Applied(name, step) for step in place.steps)
    return found


def places_of(module: nn.Module) -> Iterator[Place]:
    """Yield every place within `module` to which something is applied."""
    for _, place in _places(module):
        yield place


def _places(module: nn.Module) -> Iterator[tuple[str, Place]]:
    for name, owner, key, _ in _named(module):
        attached = attached_to(owner)
        if attached is not None and key in attached.places:
            yield name, attached.places[key]


def remove(module: nn.Module, pattern: str = ".*") -> nn.Module:
    """Remove what is applied to the parameters of `module` that `pattern` matches.

    Weight norm leaves the product of magnitude and direction in the weight; otherwise the bytes of
    the parameters are what they were. A module with nothing left has its own class again.

    Args:
        module: a module, or a tree of modules.
        pattern: a regular expression for qualified names of parameters (fullmatch).

    Returns:
        `module` itself.

    Raises:
        ValueError: when nothing is applied to any parameter that matches.

    Example:
        >>> import recoup, torch
        >>> layer = recoup.weight_dropout(torch.nn.Linear(4, 4))
        >>> recoup.weights.applied(recoup.weights.remove(layer))
        []
    """
    found = [
        (each.owner, each.key)
        for each in _matching(module, pattern)
        if (attached := attached_to(each.owner)) is not None and each.key in attached.places
    ]
    if not found:
        raise ValueError(
            f"`pattern` {pattern!r} matches no parameter of {type(module).__name__} to which "
            "anything is applied. See recoup.weights.applied(module)."
        )
    for owner, key in found:
        place = attach(owner).places.pop(key)
        for step in place.steps:
            step.removed_from(owner, key)
    for owner in module.modules():
        _tidy(owner)
    return module


def _tidy(module: nn.Module) -> None:
    attached = attached_to(module)
    if attached is None:
        return
    alive = {step.application for _, place in _places(module) for step in place.steps}
    attached.covered = [application for application in attached.covered if application in alive]
    if not attached.places and not attached.covered:
        restore_class(module)
    else:
        swap_class(module)
