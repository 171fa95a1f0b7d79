"""Applying reparametrizations to a module tree, listing and changing them, and its twin without.

NOTE [ Two models over the same dictionaries ]

Rule 1. A twin is a deep copy in which all tensors, and the dictionaries of parameters and buffers,
        are the model's own. Whatever replaces a parameter (`to_empty`, `setattr`, a state that is
        assigned) writes to the dictionary of both. A copy or a pickle of the pair shares, too.
Rule 2. Code may hold a module or a tensor that is not registered, in a list or in a hook. The deep
        copy has a record of what it copied, by which the next copy shares what was missed.
Rule 3. A reparametrization that stays is the same object in both, with its rate, its schedule and
        its draw within `same_draw`. A function of the user's own is copied, since it may be a
        module within the tree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from recoup._arguments import check_choice, check_whole
from recoup._core.modules import check_can_be_derived_from, is_gathered
from recoup._core.rng import draw_seed
from recoup.weights.choosing import (
    Named,
    Where,
    check_is_module,
    fit,
    named,
    note_sharing,
    reparametrized,
    suited,
)
from recoup.weights.compiled import register_operators
from recoup.weights.module import attach, fit_class, weights_of
from recoup.weights.reparametrization import Magnitude, Override, Reparametrization, SameDraw, Step
from recoup.weights.weight import ParametrizedWeight

M = TypeVar("M", bound=nn.Module)

# What DistributedDataParallel, torch.compile and trainers call the model within them.
_WRAPPERS = frozenset(("module", "_orig_mod", "_forward_module"))


def apply_to(
    module: nn.Module, where: Where, make: Callable[[], Reparametrization], *, tied: str = "own"
) -> nn.Module:
    """Apply a reparametrization from `make` to each parameter of `module` that `where` chooses.

    Everything is checked before anything is changed.
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
        fit(step, each, module)
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
    state = attach(module)
    state.roots = [*dict.fromkeys((*state.roots, *(step.application for step in steps)))]
    for part in covering:
        attach(part)
        fit_class(part)
    return module


class Applied(NamedTuple):
    """A reparametrization of one parameter."""

    name: str  # the qualified one of the parameter
    reparametrization: Reparametrization
    step: int  # how many there were in training so far: what a schedule is given

    def __repr__(self) -> str:
        return f"{self.name}: {self.reparametrization!r}"


def applied(module: nn.Module) -> list[Applied]:
    """Return the reparametrizations of the parameters of `module`, in the order in which they run.

    Args:
        module: a module, or a tree of modules.

    Returns:
        One for each reparametrization of each use.

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
    is set again: before each step, to the number of steps of the optimizer, for example, so that
    accumulated gradients count once and a training that is resumed goes on.

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


# -- contexts around forwards ----------------------------------------------------------------------


@contextmanager
def step(module: nn.Module) -> Generator[None, None, None]:
    """Let the code within be one step: each weight of `module` has one draw, wherever it is read.

    A forward of the module that a reparametrization was applied to is a step by itself. Use this
    where a training step computes otherwise: `training_step` of a LightningModule, several forwards
    with one loss, a loss that reads `model.embedding.weight`. A schedule counts it once. In
    evaluation nothing is drawn, as in any forward.

    Kept: 8 bytes a weight. Call `backward` and the optimizer's step outside.

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
    use the same noise. With a seed, that is a function of the seed and of the names of parameters:
    a whole data set can be run through one sample, and every rank can have the same noise, as
    ``same_draw(seed=step)``, or its own, as ``same_draw(seed=step * world_size + rank)``. A
    schedule counts one step.

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

    Monte-Carlo evaluation draws noise, and leaves other layers in evaluation mode.

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


# -- a model for evaluation over the same parameters -----------------------------------------------


def twin(module: M) -> M:
    """Return a model for evaluation over the parameters of `module`, without noise on weights.

    It computes what ``module.eval()`` would, whatever the mode of `module`: it is in evaluation
    mode itself, and `module.train()` and `module.eval()` do not change it. Reparametrizations with
    mode "training" are not in it, those with "always" and weight norms are.

    Kept: nothing but modules. Parameters and buffers are the same objects under the same names, and
    remain so when they are stepped, loaded, moved, replaced, or copied and pickled together, as in
    ``copy.deepcopy((module, twin))``. Everything else is copied as it is now, and does not follow
    later changes: make it when the model is complete, and before it is wrapped or sharded.

    Args:
        module: the model, a tree of modules.

    Returns:
        A module of the same type, in evaluation mode.

    Raises:
        ValueError: when `module` contains a DistributedDataParallel, a DataParallel, a module that
            FSDP2 has sharded, or a ScriptModule.

    Example:
        >>> import recoup, torch
        >>> layer = recoup.weight_dropout(torch.nn.Linear(64, 64))
        >>> twin, x = recoup.weights.twin(layer), torch.ones(1, 64)
        >>> twin.weight is layer.get_parameter("weight"), layer.training, twin.training
        (True, True, False)
        >>> torch.equal(twin(x), layer.eval()(x))
        True

    Source: https://github.com/dmlc/gluon-nlp/issues/1060.
    """
    check_is_module(module)
    kinds: tuple[type, ...] = (DistributedDataParallel, DataParallel, torch.jit.ScriptModule)
    parts: Iterator[tuple[str, Any]] = cast("Any", module).named_modules()
    for name, part in parts:
        kind = type(cast("object", part)).__name__
        if isinstance(part, kinds) or is_gathered(part):
            raise ValueError(
                f"`module{f'.{name}' if name else ''}` is a {kind}, which cannot be there twice. "
                "Make the twin of the module within it, before it is wrapped, sharded or scripted; "
                "a sharded model is evaluated between `model.eval()` and `model.train()`."
            )
    made = _copied(module)
    for part, other in zip(module.modules(), made.modules(), strict=True):
        note_sharing(part, other)
        own = weights_of(other)
        for key, weight in [*own.items()]:
            weight.set_steps([step for step in weight.steps if step.mode == "always"])
            if not weight.steps:
                del own[key]
    for part in made.modules():
        fit_class(part)
    return made.eval()


def _copied(module: M) -> M:
    """Return a copy of `module` in which what is shared stands for itself."""
    shared = {id(each): each for each in _shared_by(module.modules())}
    while True:
        memo: dict[int, Any] = dict(shared)
        made = copy.deepcopy(module, memo)
        copied: list[object] = memo.get(id(memo), [])  # where `copy` keeps what it has copied
        missed = {id(each): each for each in _shared_by(copied) if id(each) not in shared}
        if not missed:
            return made
        shared |= missed


def _shared_by(found: Iterable[object]) -> Iterator[Any]:
    """Yield what a twin shares of modules and tensors; other objects are copied."""
    for each in found:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, nn.Module):
            own = (each._parameters, each._buffers)
            yield from (*own, each._non_persistent_buffers_set)
            values = [*vars(each).values(), *(value for every in own for value in every.values())]
            yield from (value for value in values if isinstance(value, Tensor))
            for weight in weights_of(each).values():
                yield from weight.applications
                yield from (step for step in weight.steps if step.function is None)
