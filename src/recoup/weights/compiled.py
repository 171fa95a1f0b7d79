"""Reparametrized weights in a graph of torch.compile.

NOTE [ A weight in a graph ]

Rule 1. A graph cannot hold seeds, or every call would draw the same. So it holds one operator a
        step, which draws for all weights when the graph runs, as eager reads do, and returns seeds
        and magnitudes as a tensor; a read outside of the steps that are traced holds one of its
        own. Frames around the graph (`same_draw`, an eager step) count when it runs.
Rule 2. Another operator makes the weight from the raw one and these seeds, and depends on nothing
        else. Backward gets the seeds that forward saved, and computes the rest of a weight again:
        the composite operator that consists of both says so (NOTE [ Three passes ]).
Rule 3. Operators are registered when something is first applied, not on import.
Rule 4. The graph breaks where a weight is computed by autograd (a function of the user's, a learned
        deviation), or shares its draws with another name: the operators take a weight and seeds.
Rule 5. The compiler stores what it compiled on disk, by the names and the arguments of operators.
        So what a composite operator consists of depends on its arguments alone, and one that comes
        to mean something else gets another name. It takes two calls with the same arguments for
        one; so each draw has its place in the graph among them.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recoup._core.compile import break_graph, never_compiled, uncompiled
from recoup._core.compiled_graphs import (
    ComputedAgain,
    is_followed,
    num_recorded,
    saved,
    unchecked,
)
from recoup.weights.reparametrization import Application, Drawn
from recoup.weights.steps import Step, leave, local

NOT_IN_GRAPH = (
    "Outside of graphs run recurrent layers with reparametrized weights, and what reads a weight "
    "that a function computes (recoup.weights.apply), whose noise has a deviation that is a "
    'parameter, or that is tied by `tied="same"`. Leave `fullgraph` out.'
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
    """A step that is traced: what it covers, and its draws and their columns if it has any."""

    applications: list[Application]
    seeds: Tensor | None
    columns: dict[tuple[Any, Any], int]  # by the weight and the reparametrization


_traced: list[Traced] = []


def step_in_graph(
    run: Callable[..., Any], in_step: Any, module: nn.Module, attached: Any, args: Any, kwargs: Any
) -> Any:
    """Trace a forward that is a step."""
    if not torch.compiler.is_compiling():  # a layer within breaks the graph
        return in_step(module, attached, args, kwargs)
    columns: dict[tuple[Any, Any], int] = {}
    flags: list[int] = []
    may_draw = False
    for weight, owner in attached.uses_in(module):
        flags.append(_flags(owner))
        for step in weight.steps:
            columns[weight, step] = len(columns)
            may_draw = may_draw or _may_draw(weight, step, owner)
    if all(_step_around(each) is not None for each in attached.roots):
        may_draw = False  # nor are its columns looked at: the outermost step counts
    seeds = torch.ops.recoup.drawn(attached.handle, flags, len(columns)) if may_draw else None
    unchecked(_traced.append, Traced(attached.roots, seeds, columns))
    try:
        return run(module, *args, **kwargs)
    finally:
        unchecked(_traced.pop)


def _flags(owner: nn.Module) -> int:
    return int(owner.training) + 2 * int(torch.is_grad_enabled())


def _may_draw(weight: Any, step: Any, owner: nn.Module) -> bool:
    return step.is_random and (owner.training or step.mode == "always" or weight.is_switched)


def _step_around(application: Application) -> Traced | None:
    """Return the outermost traced step that covers `application`."""
    for traced in _traced:
        if application in traced.applications:
            return traced
    return None


def read_in_graph(weight: Any, module: nn.Module, raw: Tensor) -> Tensor:
    """Trace a read of a weight."""
    norms: list[tuple[Any, Tensor]] = []
    seeds: list[Tensor] = []
    places: list[int] = []  # of each step that draws: its number, and its column of the seeds
    own: Any = None
    for number, step in enumerate(weight.steps):
        if step.breaks_graph:
            break_graph(NOT_IN_GRAPH)  # See Rule 4
            return uncompiled(weight.read)(module, raw)
        traced = _step_around(step.application)
        if not step.is_random:
            norms += [(step, norm) for norm in step.operands(module, weight.key)]
        elif traced is not None and traced.seeds is not None:
            seeds.append(traced.seeds)
            places += [number, traced.columns[weight, step]]
        elif traced is None and _may_draw(weight, step, module):
            if own is None:
                own = torch.ops.recoup.drawn(weight.handle, [_flags(module)], len(weight.steps))
            seeds.append(own)
            places += [number, number]
    would_be_kept = (seeds or norms) and torch.is_grad_enabled() and is_followed()
    with ComputedAgain() if would_be_kept else nullcontext():
        for step, norm in norms:
            raw = step.product(raw, norm)
        return torch.ops.recoup.redrawn(raw, seeds, weight.handle, places, False) if seeds else raw


# -- what a graph calls ------------------------------------------------------------------------


@functools.cache
def register_operators() -> None:
    """Register the operators that a graph calls (See Rule 3)."""
    library = torch.library.Library("recoup", "FRAGMENT")
    _registered.append(library)
    library.define("drawn" + torch.library.infer_schema(_draws, mutates_args=()))
    library.impl("drawn", _draws, "CompositeImplicitAutograd")
    tags = (torch.Tag.nondeterministic_seeded,)
    operator = torch.library.custom_op("recoup::seeds", _seeds, mutates_args=(), tags=tags)
    operator.register_fake(_fake_seeds)
    operator = torch.library.custom_op("recoup::redrawn", _redrawn, mutates_args=())
    operator.register_fake(_fake_redrawn)
    operator.register_autograd(_backward, setup_context=_keep_seeds)


_registered: list[Any] = []  # torch takes back what a library registered when that is freed


@never_compiled
def _draws(handle: Tensor, flags: Sequence[int], num_columns: int) -> Tensor:
    """Return the draws of a step, or of a read outside of steps.

    Args:
        handle: the handle of what draws: a weight, or the state of a module (of a step).
        flags: of each weight, whether its module is in training mode, and whether a graph is built.
        num_columns: the number of reparametrizations of these weights.
    """
    return saved(lambda: torch.ops.recoup.seeds(handle, flags, num_columns, num_recorded()))


@never_compiled
def _seeds(handle: Tensor, flags: Sequence[int], num_columns: int, place: int) -> Tensor:
    """Return seeds, and magnitudes as bits, a row each; 0 and 0 where none is drawn."""
    del num_columns, place  # See Rule 5
    found: list[Drawn | None] = []
    owner: Any = _by_handle[int(handle)]
    step = Step(None, getattr(owner, "roots", ()))  # a weight has none
    local.frames.append(step)
    try:
        for weight, flag in zip(getattr(owner, "weights_within", (owner,)), flags, strict=True):
            draws_alone = flag >= 2 and not step.applications
            made = weight.draws_again(0, bool(flag & 1), draws_alone, flag >= 2)
            drawn = {each.step: each for each in made}
            found += [drawn.get(each) for each in weight.steps]
    finally:
        leave(step)
    seeds = torch.tensor([0 if each is None else each.seed for each in found])
    magnitudes = [0.0 if each is None else each.magnitude for each in found]
    return torch.stack([seeds, torch.tensor(magnitudes, dtype=torch.float64).view(torch.int64)])


def _fake_seeds(handle: Tensor, flags: Sequence[int], num_columns: int, place: int) -> Tensor:
    return torch.empty((2, num_columns), dtype=torch.int64, device="cpu")


@never_compiled
def _redrawn(
    weight: Tensor, seeds: Sequence[Tensor], handle: Tensor, places: Sequence[int], transposed: bool
) -> Tensor:
    """Return a weight under these draws; transposed, the gradient of the raw one from its own."""
    weight = weight.clone(memory_format=torch.contiguous_format)
    for each, number, column in zip(seeds, places[::2], places[1::2], strict=True):
        step, magnitude = _by_handle[int(handle)].steps[number], each[1].view(torch.float64)[column]
        if magnitude and not (transposed and step.is_additive):
            drawn = Drawn(step, int(each[0, column]), float(magnitude))
            weight = step.compute(weight, (), drawn, is_new=True)
    return weight


def _fake_redrawn(
    weight: Tensor, seeds: Sequence[Tensor], handle: Tensor, places: Sequence[int], transposed: bool
) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _keep_seeds(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, seeds, handle, ctx.places, _ = inputs
    ctx.save_for_backward(*seeds, handle)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *seeds, handle = ctx.saved_tensors
    found = torch.ops.recoup.redrawn(gradient, seeds, handle, ctx.places, True)
    return found, [None] * len(seeds), None, None, None
