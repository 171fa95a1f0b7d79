"""Applying reparametrizations to the parameters of a module tree, listing and removing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any

from torch import nn

from recoup._core.stand_ins import check_can_be_derived_from
from recoup.weights.choosing import (
    Named,
    Where,
    check,
    check_is_module,
    matching,
    named,
    suited,
)
from recoup.weights.compiled import register_operators
from recoup.weights.module import attach, fit_class, weights_of
from recoup.weights.reparametrization import Magnitude, Reparametrization
from recoup.weights.ties import share, shared
from recoup.weights.weight import ParametrizedWeight

# What DistributedDataParallel, torch.compile and trainers call the model within them.
_WRAPPERS = frozenset(("module", "_orig_mod", "_forward_module"))


def apply_to(
    module: nn.Module, where: Where, make: Callable[[], Reparametrization], *, tied: str = "own"
) -> nn.Module:
    """Apply a reparametrization from `make` to each parameter of `module` that `where` chooses.

    Everything is checked before anything is changed. With ``tied="same"``, uses of one parameter
    get one reparametrization (see `ties`).
    """
    if tied not in ("own", "same"):
        raise ValueError(
            f'`tied` is {tied!r}, but must be "own" (each name of a tied parameter has a draw of '
            'its own) or "same" (they share one).'
        )
    found = suited(module, where)
    covering = _covering(module, {id(each.owner) for each in found})
    for part in covering:
        check_can_be_derived_from(type(part))
    register_operators()
    steps: list[Reparametrization] = []
    by_parameter: dict[int, Reparametrization] = {}
    for each in found:
        step = make()
        check(step, each, module)
        step.fit(each.owner, each.key, each.name)
        if tied == "same":
            step = by_parameter.setdefault(id(each.parameter), shared(step, each))
        steps.append(step)
    for step, each in zip(steps, found, strict=True):
        weights = attach(each.owner).weights
        known = weights.get(each.key)
        if known is None:
            name = f"`{each.name}` of {type(module).__name__}"
            # A draw is the same, whether a model was wrapped before or after this.
            parts = [part for part in each.name.split(".") if part not in _WRAPPERS]
            known = weights[each.key] = ParametrizedWeight(each.key, ".".join(parts), name)
        known.set_steps([*known.steps, step])
        if tied == "same":
            share(step, each)
        else:
            step.applied_to(each.owner, each.key)
    roots = attach(module).roots
    roots += [each for each in dict.fromkeys(s.application for s in steps) if each not in roots]
    for part in covering:
        attach(part)
        fit_class(part)
    return module


def _covering(module: nn.Module, owners: set[int]) -> list[nn.Module]:
    """Return the modules of the tree that are, or contain, one of `owners` (ids)."""
    return [part for part in module.modules() if not owners.isdisjoint(map(id, part.modules()))]


class Applied:
    """A reparametrization of one parameter.

    Attributes:
        name: the qualified name of the parameter.
        reparametrization: the reparametrization that is applied to it.
        step: the number of steps in training so far: what a schedule is given.
    """

    def __init__(self, name: str, reparametrization: Reparametrization) -> None:
        self.name = name
        self.reparametrization = reparametrization
        self.step = reparametrization.application.step

    def __repr__(self) -> str:
        return f"{self.name}: {self.reparametrization!r}"


def applied(module: nn.Module) -> list[Applied]:
    """Return the reparametrizations of the parameters of `module`, in the order in which they run.

    Args:
        module: a module, or a tree of modules.

    Returns:
        An entry for each reparametrization of each use of a parameter.

    Example:
        >>> import recoup, torch
        >>> conv = recoup.weight_norm(recoup.weight_noise(torch.nn.Conv1d(4, 8, 3), std=0.1))
        >>> recoup.weights.applied(conv)
        [weight: weight_norm(dim=0), weight: weight_noise(std=0.1)]
    """
    check_is_module(module)
    found = {id(weight): (name, weight) for name, weight in reversed([*_named_weights(module)])}
    return [Applied(name, s) for name, weight in reversed(found.values()) for s in weight.steps]


def parametrized_weights(module: nn.Module) -> Iterator[ParametrizedWeight]:
    """Return an iterator over the reparametrized parameters within `module`."""
    check_is_module(module)
    return (weight for _, weight in _named_weights(module))


def _named_weights(module: nn.Module) -> Iterator[tuple[str, ParametrizedWeight]]:
    for name, owner, key, _ in named(module):
        if key in weights_of(owner):
            yield name, weights_of(owner)[key]


def update(
    module: nn.Module,
    where: Where = ".*",
    *,
    p: Magnitude | None = None,
    std: Magnitude | None = None,
) -> nn.Module:
    """Change the rate of weight dropout, or the deviation of weight noise.

    Kept: nothing. Backward pays nothing for it: draws that were made keep their rate.

    Args:
        module: a module, or a tree of modules.
        where: chooses parameters, as `pattern` of `weight_dropout` does.
        p: the new probability of weight dropout; None leaves it.
        std: the new standard deviation of weight noise; None leaves it. Where the deviation is
            learned, the number is copied to the parameter.

    Returns:
        `module` itself.

    Raises:
        ValueError: when nothing is given, something is out of its range, or no parameter that is
            chosen has such a reparametrization; then nothing is changed.

    Example:
        >>> import recoup, torch
        >>> layer = recoup.weight_dropout(torch.nn.Linear(4, 4), p=0.5)
        >>> recoup.weights.applied(recoup.weights.update(layer, p=0.3))
        [weight: weight_dropout(p=0.3)]
    """
    changes = {name: value for name, value in (("p", p), ("std", std)) if value is not None}
    if not changes:
        raise ValueError("Neither `p` nor `std` is given, so nothing would change.")
    uses = reparametrized(module, where, "where")
    checked: list[tuple[Reparametrization, Named, Magnitude]] = []
    for name, value in changes.items():
        found = [(s, use) for use, weight in uses for s in weight.steps if s.argument == name]
        if not found:
            raise ValueError(
                f"`{name}` is given, and no parameter that `where` {where!r} chooses has such "
                "a reparametrization. See recoup.weights.applied(module)."
            )
        checked += [(step, use, step.checked(value)) for step, use in found]
    for step, use, rate in checked:
        step.set_rate(use.owner, use.key, rate)
    return module


def set_step(module: nn.Module, step: int) -> nn.Module:
    """Set the number of steps that schedules of rates and deviations are given.

    By default that is the number of forwards in training so far. Once it is set, it stays until it
    is set again: set it before each step, to the number of steps of the optimizer, for example, so
    that accumulated gradients count once and a training that is resumed goes on.

    Kept: nothing. Backward pays nothing for it.

    Args:
        module: a module, or a tree of modules.
        step: the number of steps, from 0.

    Returns:
        `module` itself.

    Raises:
        ValueError: when `step` is not an int from 0.

    Example:
        >>> import recoup, torch
        >>> layer = recoup.weight_noise(torch.nn.Linear(4, 4), std=lambda step: 0.1 * (step > 100))
        >>> recoup.weights.applied(recoup.weights.set_step(layer, 200))[0].step
        200
    """
    given: Any = step
    if not isinstance(given, Integral) or given is True or given is False or step < 0:
        raise ValueError(f"`step` is {step!r}, but must be an int from 0.")
    for weight in parametrized_weights(module):
        for application in weight.applications:
            application.step, application.counts = int(step), False
    return module


def reparametrized(
    module: nn.Module, where: Where, argument: str
) -> list[tuple[Named, ParametrizedWeight]]:
    """Return the reparametrized weights that `where` chooses, or raise if there are none."""
    found = [
        (each, weights_of(each.owner)[each.key])
        for each in matching(module, where, argument)
        if each.key in weights_of(each.owner)
    ]
    if not found:
        raise ValueError(
            f"`{argument}` {where!r} matches no parameter of {type(module).__name__} to which "
            "anything is applied. See recoup.weights.applied(module)."
        )
    return found


def remove(module: nn.Module, pattern: Where = ".*") -> nn.Module:
    """Remove the reparametrizations of the parameters of `module` that `pattern` matches.

    Weight norm leaves the product of magnitude and direction in the weight; the others leave the
    bytes of the parameters unchanged. A module with none left has its own class again.

    Args:
        module: a module, or a tree of modules.
        pattern: chooses parameters, as `pattern` of `weight_dropout` does.

    Returns:
        `module` itself.

    Raises:
        ValueError: when no parameter that is chosen is reparametrized.

    Example:
        >>> import recoup, torch
        >>> layer = recoup.weight_dropout(torch.nn.Linear(4, 4))
        >>> recoup.weights.applied(recoup.weights.remove(layer))
        []
    """
    found = reparametrized(module, pattern, "pattern")
    for each, weight in found:
        uses = [other.name for other in named(module) if other.parameter is each.parameter]
        if len(uses) > 1 and any(not step.is_random for step in weight.steps):
            raise ValueError(
                f"`{uses[0]}` and `{uses[1]}` are one parameter, so the normalized weight cannot "
                "be written into it: that would change the other use. Untie them first."
            )
    for (_, owner, key, _), weight in found:
        del weights_of(owner)[key]
        for step in weight.steps:
            step.removed_from(owner, key)
    for part in module.modules():
        fit_class(part)
    return module


def keep_only(module: nn.Module, is_kept: Callable[[Reparametrization], bool]) -> None:
    """Take reparametrizations off the weights of `module`, and leave its parameters as they are."""
    for owner in module.modules():
        for key, weight in [*weights_of(owner).items()]:
            weight.set_steps([step for step in weight.steps if is_kept(step)])
            if not weight.steps:
                del weights_of(owner)[key]
    for part in module.modules():
        fit_class(part)
