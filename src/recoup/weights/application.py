"""Applying reparametrizations to the parameters of a module tree, listing and changing them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from torch import nn

from recoup._arguments import check_choice, check_whole
from recoup._core.modules import check_can_be_derived_from
from recoup._core.rng import draw_seed
from recoup.weights.choosing import (
    Named,
    Where,
    check,
    check_is_module,
    check_is_not_written,
    matching,
    named,
    suited,
)
from recoup.weights.compiled import register_operators
from recoup.weights.module import attach, fit_class, weights_of
from recoup.weights.reparametrization import Magnitude, Reparametrization
from recoup.weights.steps import Override, SameDraw, Step
from recoup.weights.weight import ParametrizedWeight

# What DistributedDataParallel, torch.compile and trainers call the model within them.
_WRAPPERS = frozenset(("module", "_orig_mod", "_forward_module"))


def apply_to(
    module: nn.Module, where: Where, make: Callable[[], Reparametrization], *, tied: str = "own"
) -> nn.Module:
    """Apply a reparametrization from `make` to each parameter of `module` that `where` chooses.

    Everything is checked before anything is changed. With ``tied="same"``, uses of one parameter
    get one reparametrization, of which a step has one draw.
    """
    check_choice("own", "same", tied=tied)
    found = suited(module, where)
    owners = {id(each.owner) for each in found}
    covering = [e for e in module.modules() if not owners.isdisjoint(map(id, e.modules()))]
    for part in covering:
        check_can_be_derived_from(type(part))
    register_operators()
    steps: list[Reparametrization] = []
    shared: dict[int, Reparametrization] = {}
    for each in found:
        step = make()
        if tied == "same":
            step = shared.setdefault(id(each.parameter), step)
            step.is_tied = True  # a graph would take the seeds of one use only
        check(step, each, module)
        step.fit(each.owner, each.key, each.name)
        check_is_not_written(step, each)
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
        step.applied_to(each.owner, each.key)
    roots = attach(module).roots
    roots += [each for each in dict.fromkeys(s.application for s in steps) if each not in roots]
    for part in covering:
        attach(part)
        fit_class(part)
    return module


class Applied(NamedTuple):
    """A reparametrization of one parameter.

    Attributes:
        name: the qualified name of the parameter.
        reparametrization: the reparametrization that is applied to it.
        step: the number of steps in training so far: what a schedule is given.
    """

    name: str
    reparametrization: Reparametrization
    step: int

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
    return [
        Applied(name, each, each.application.step)
        for weight, name in _weights_in(module).items()
        for each in weight.steps
    ]


def _weights_in(module: nn.Module) -> dict[ParametrizedWeight, str]:
    """Return the reparametrized parameters within `module`, with the first name of each."""
    check_is_module(module)
    found: dict[ParametrizedWeight, str] = {}
    for name, owner, key, _ in named(module):
        if key in weights_of(owner):
            found.setdefault(weights_of(owner)[key], name)
    return found


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
    check_whole(0, most=2**63 - 1, step=step)
    for weight in _weights_in(module):
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
        same = [other for other in named(module) if other.parameter is each.parameter]
        uses = [*{(other.owner, other.key): other.name for other in same}.values()]
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


# -- contexts around forwards ----------------------------------------------------------------------


@contextmanager
def step(module: nn.Module) -> Generator[None, None, None]:
    """Let the code within be one step: each weight of `module` has one draw, wherever it is read.

    A forward of the module that a reparametrization was applied to is a step by itself. Use this
    where a training step computes otherwise: `training_step` of a LightningModule, several forwards
    with one loss, `model.encode(x)`, a loss that reads `model.embedding.weight`. A schedule counts
    it once. In evaluation nothing is drawn, as in any forward.

    Kept: 8 bytes a weight, as in a forward. Call `backward` and the optimizer's step outside.

    Args:
        module: a module, or a tree of modules.

    Returns:
        A context manager, for this thread; also a decorator.

    Example:
        >>> import recoup, torch
        >>> layer, x = recoup.weight_dropout(torch.nn.Linear(64, 64)), torch.ones(1, 64)
        >>> with recoup.weights.step(layer):
        ...     torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
        True
    """
    with Step(None, [each for weight in _weights_in(module) for each in weight.applications]):
        yield


def same_draw(seed: int | None = None) -> AbstractContextManager[None]:
    """Give each weight one draw for all steps and reads within.

    Around several forwards (windows of one sequence, gradients that are accumulated) it makes them
    use the same noise; with a seed, that noise is a function of the seed and of the names of the
    parameters, so that a whole data set can be run through one sample, and every rank of a
    distributed run can have the same noise, as ``same_draw(seed=step)``, or its own, as
    ``same_draw(seed=step * world_size + rank)``. A schedule counts one step.

    Args:
        seed: an int from 0; drawn from the default generator if None.

    Returns:
        A context manager.

    Raises:
        ValueError: when `seed` is not an int from 0, or None.

    Example:
        >>> import recoup, torch
        >>> layer, x = recoup.weight_dropout(torch.nn.Linear(64, 64)), torch.ones(1, 64)
        >>> with recoup.weights.same_draw(seed=3):
        ...     torch.equal(layer(x), layer(x))
        True
        >>> torch.equal(layer(x), layer(x))
        False
    """
    if seed is not None:
        check_whole(0, most=2**64 - 1, seed=seed)
    # Drawn in any case: the position in the stream identifies code that torch runs again.
    drawn = draw_seed()
    return SameDraw(None, (), drawn if seed is None else int(seed))


def disabled(module: nn.Module) -> AbstractContextManager[None]:
    """Turn weight dropout and noise off in `module`, which may stay in training mode.

    Weight norm is not noise, and stays. Code that ran within is also run again without noise.

    Args:
        module: a module, or a tree of modules.

    Returns:
        A context manager, for this thread.

    Example:
        >>> import recoup, torch
        >>> layer, x = recoup.weight_dropout(torch.nn.Linear(64, 64)), torch.ones(1, 64)
        >>> with recoup.weights.disabled(layer):
        ...     torch.equal(layer(x), layer(x))
        True
    """
    return Override(_weights_in(module), is_on=False)


def enabled(module: nn.Module) -> AbstractContextManager[None]:
    """Turn weight dropout and noise on in `module`, which may be in evaluation mode.

    Monte-Carlo evaluation draws noise and leaves dropout of activations and batch norms in
    evaluation mode.

    Args:
        module: a module, or a tree of modules.

    Returns:
        A context manager, for this thread.

    Example:
        >>> import recoup, torch
        >>> layer = recoup.weight_dropout(torch.nn.Linear(64, 64)).eval()
        >>> x = torch.ones(1, 64)
        >>> with recoup.weights.enabled(layer):
        ...     torch.equal(layer(x), layer(x))
        False
    """
    return Override(_weights_in(module), is_on=True)
