"""Reparametrized weights in a graph of torch.compile.

NOTE [ A weight in a graph ]

Rule 1. A graph cannot hold seeds, or every call would draw the same. So it holds one operator a
        step, which draws for all weights when the graph runs, as eager reads do, and returns seeds
        and magnitudes as a tensor; a read outside of the steps that are traced holds one of its
        own. Frames around the graph (`same_draw`, an eager step) count when it runs.
Rule 2. Another operator makes the weight from the raw one and these seeds, and depends on nothing
        else. Backward gets the seeds that forward saved, and computes the rest of a weight again:
        the composite operator that consists of both says so (NOTE [ Three passes ]).
Rule 3. While it is traced, the first read in a step makes the weight, and other reads get the same
        one, unless a checkpoint of torch or its end is in between.
Rule 4. Operators are registered when something is first applied, not on import.
Rule 5. The graph breaks where a weight is computed by autograd (a function of the user's, a learned
        deviation), or shares its draws with another name: the operators take a weight and seeds.
Rule 6. The compiler stores what it compiled on disk, by the names and the arguments of operators.
        So what a composite operator consists of depends on its arguments alone, and one that comes
        to mean something else gets another name. It takes two calls with the same arguments for
        one; so each draw has its place in the graph among them.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recoup._core.compile import break_graph, is_traced, never_compiled, uncompiled
from recoup._core.compiled_graphs import (
    computed_again,
    is_in_checkpoint,
    num_recorded,
    saved,
    unchecked,
)
from recoup.errors import ReplayError
from recoup.weights.normed import product_of
from recoup.weights.reparametrization import Application, Drawn, Reparametrization
from recoup.weights.step import Step, leave, local, overriding

__all__ = ["NOT_IN_GRAPH", "new_handle", "read_in_graph", "register_operators", "step_in_graph"]

NOT_IN_GRAPH = (
    "Outside of graphs run recurrent layers with reparametrized weights, modules with weights that "
    'are tied by `tied="same"`, and what reads a weight '
    "that a function computes (recoup.weights.apply) or whose noise has a deviation that is a "
    "parameter. Leave `fullgraph` out."
)
_BUDGET_OF_0 = (
    "Where `region_activation_memory_budget(0.0)` is around compiled code, the compiler lets "
    "backward draw again instead of saving the seeds. Give a budget above 0, such as 1e-6."
)

_numbers = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def new_handle(owner: object) -> Tensor:
    """Return a number that stands for an object in a graph: an input of it, not a constant."""
    number = next(_numbers)
    _by_handle[number] = owner
    return torch.tensor(number, device="cpu")


# -- what is traced ----------------------------------------------------------------------------


class Traced(NamedTuple):
    """A step that is traced: what it covers, its draws if it has any, and the weights made."""

    applications: list[Application]
    seeds: Tensor | None
    columns: dict[tuple[Any, Reparametrization], int]
    made: dict[tuple[Any, bool], Tensor]


_traced: list[Traced] = []


def step_in_graph(
    run: Callable[..., Any], module: nn.Module, attached: Any, args: Any, kwargs: Any
) -> Any:
    """Trace a forward that is a step."""
    if all(_step_around(each) is not None for each in attached.roots):
        return run(module, *args, **kwargs)
    columns: dict[tuple[Any, Reparametrization], int] = {}
    flags: list[int] = []
    may_draw = False
    for weight, owner in attached.uses_in(module):
        flags.append(_flags(owner))
        for step in weight.steps:
            columns[weight, step] = len(columns)
            is_on = owner.training or step.mode == "always" or len(overriding) > 0
            may_draw = may_draw or (step.is_random and is_on)
    seeds = torch.ops.recoup.drawn(attached.handle, flags, len(columns)) if may_draw else None
    unchecked(_traced.append, Traced(attached.roots, seeds, columns, {}))
    try:
        return run(module, *args, **kwargs)
    finally:
        unchecked(_traced.pop)


def _flags(owner: nn.Module) -> int:
    return int(owner.training) + 2 * int(torch.is_grad_enabled())


def read_in_graph(weight: Any, module: nn.Module, raw: Tensor) -> Tensor:
    """Trace a read of a weight."""
    if any(step.breaks_graph for step in weight.steps):
        break_graph(NOT_IN_GRAPH)  # See Rule 5
        return uncompiled(weight.read)(module, raw)
    innermost: Traced | None = None
    for traced in _traced:
        if any(step.application in traced.applications for step in weight.steps):
            innermost = traced
    key = (weight, torch.is_grad_enabled())
    if innermost is not None and key in innermost.made:
        return innermost.made[key]
    made = _made(weight, module, raw)
    if innermost is not None and not is_in_checkpoint():
        innermost.made[key] = made  # See Rule 3
    return made


def _made(weight: Any, module: nn.Module, raw: Tensor) -> Tensor:
    norms: list[Tensor] = []
    axes: list[int] = []
    seeds: list[Tensor] = []
    places: list[int] = []  # of each random step: which seeds, and which column of them
    own: Tensor | None = None
    for number, step in enumerate(weight.steps):
        if not step.is_random:
            norms += step.operands(module, weight.key)
            axes.append(step.axis)
            continue
        traced = _step_around(step.application)
        if traced is not None and traced.seeds is not None:
            drawn, column = traced.seeds, traced.columns[weight, step]
        elif traced is None and (module.training or step.mode == "always" or len(overriding) > 0):
            if own is None:
                own = torch.ops.recoup.drawn(weight.handle, [_flags(module)], len(weight.steps))
            drawn, column = own, number
        else:
            continue
        seeds.append(drawn)
        places += [number, column]
    if not seeds and (not norms or not torch.is_grad_enabled() or is_traced()):
        for norm, axis in zip(norms, axes, strict=True):
            raw = product_of(raw, norm, axis)
        return raw
    return torch.ops.recoup.reparametrized_by(raw, norms, axes, weight.handle, seeds, places)


def _step_around(application: Application) -> Traced | None:
    """Return the outermost traced step that covers `application`."""
    for traced in _traced:
        if application in traced.applications:
            return traced
    return None


# -- what a graph calls ------------------------------------------------------------------------


@functools.cache
def register_operators() -> None:
    """Register the operators that a graph calls (See Rule 4)."""
    library = torch.library.Library("recoup", "FRAGMENT")
    _registered.append(library)
    for name, run in (("drawn", _draws), ("reparametrized_by", _reparametrized)):
        library.define(name + torch.library.infer_schema(run, mutates_args=()))
        library.impl(name, run, "CompositeImplicitAutograd")
    operator = torch.library.custom_op(
        "recoup::seeds", _seeds, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
    )
    operator.register_fake(_fake_seeds)
    for name, run in (("redrawn", _redrawn), ("redrawn_gradient", _redrawn_gradient)):
        operator = torch.library.custom_op(f"recoup::{name}", run, mutates_args=())
        operator.register_fake(_fake_redrawn)
        operator.register_autograd(_backward, setup_context=_keep_seeds)


_registered: list[Any] = []  # torch takes back what a library registered when that is freed


@never_compiled
def _draws(handle: Tensor, flags: Sequence[int], num_columns: int) -> Tensor:
    """Return the draws of a step, or of a read outside of steps.

    Args:
        handle: the handle of what draws: a weight, or the state of a module whose forward is a step.
        flags: of each weight, whether its module is in training mode, and whether a graph is built.
        num_columns: the number of reparametrizations of these weights.
    """
    return saved(lambda: torch.ops.recoup.seeds(handle, flags, num_columns, num_recorded()))


@never_compiled
def _seeds(handle: Tensor, flags: Sequence[int], num_columns: int, place: int) -> Tensor:
    """Return seeds, and magnitudes as bits, a row each; 0 and 0 where none is drawn."""
    del num_columns, place  # See Rule 6
    found: list[Drawn | None] = []
    owner: Any = _by_handle[int(handle)]
    step = Step(None, owner.roots)
    local.frames.append(step)
    try:
        for weight, flag in zip(owner.weights_within, flags, strict=True):
            is_training, builds_graph = bool(flag & 1), flag >= 2
            draws_alone = builds_graph and not owner.roots
            made = weight.draws_again(0, is_training, draws_alone, builds_graph)
            drawn = {each.step: each for each in made}
            found += [drawn.get(each) for each in weight.steps]
    except ReplayError as error:
        error.add_note(_BUDGET_OF_0)
        raise
    finally:
        leave(step)
    seeds = torch.tensor([0 if each is None else each.seed for each in found])
    magnitudes = [0.0 if each is None else each.magnitude for each in found]
    return torch.stack([seeds, torch.tensor(magnitudes, dtype=torch.float64).view(torch.int64)])


def _fake_seeds(handle: Tensor, flags: Sequence[int], num_columns: int, place: int) -> Tensor:
    del handle, flags, place
    return torch.empty((2, num_columns), dtype=torch.int64, device="cpu")


@never_compiled
def _reparametrized(
    raw: Tensor,
    norms: Sequence[Tensor],
    axes: Sequence[int],
    handle: Tensor,
    seeds: Sequence[Tensor],
    places: Sequence[int],
) -> Tensor:
    """Return a weight; the norms come before the draws (See Rule 2).

    Args:
        raw: the parameter.
        norms: the magnitudes of its norms.
        axes: their axes.
        handle: the handle of the parametrized weight.
        seeds: what the operators above returned, for each reparametrization that draws.
        places: for each of them, its number among those of the weight, and its column in `seeds`.
    """

    def make() -> Tensor:
        weight = raw
        for norm, axis in zip(norms, axes, strict=True):
            weight = product_of(weight, norm, axis)
        return torch.ops.recoup.redrawn(weight, seeds, handle, places) if seeds else weight

    return computed_again(make)


def _drawn(seeds: Sequence[Tensor], handle: Tensor, places: Sequence[int]) -> list[Drawn]:
    steps = _by_handle[int(handle)].steps
    drawn = [
        Drawn(steps[number], int(each[0, column]), float(each[1].view(torch.float64)[column]))
        for each, number, column in zip(seeds, places[::2], places[1::2], strict=True)
    ]
    return [each for each in drawn if each.magnitude]


@never_compiled
def _redrawn(
    weight: Tensor, seeds: Sequence[Tensor], handle: Tensor, places: Sequence[int]
) -> Tensor:
    weight = weight.clone(memory_format=torch.contiguous_format)
    for each in _drawn(seeds, handle, places):
        weight = each.step.compute(weight, (), each, in_place=True)
    return weight


@never_compiled
def _redrawn_gradient(
    gradient: Tensor, seeds: Sequence[Tensor], handle: Tensor, places: Sequence[int]
) -> Tensor:
    gradient = gradient.clone(memory_format=torch.contiguous_format)
    for each in _drawn(seeds, handle, places):
        gradient = each.step.transpose(gradient, each, in_place=True)
    return gradient


def _fake_redrawn(
    weight: Tensor, seeds: Sequence[Tensor], handle: Tensor, places: Sequence[int]
) -> Tensor:
    del seeds, handle, places
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _keep_seeds(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, seeds, handle, ctx.places = inputs
    ctx.save_for_backward(*seeds, handle)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *seeds, handle = ctx.saved_tensors
    found = torch.ops.recoup.redrawn_gradient(gradient, seeds, handle, ctx.places)
    return found, [None] * len(seeds), None, None
