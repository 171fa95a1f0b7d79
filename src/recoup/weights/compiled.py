"""Reparametrized weights in a graph of torch.compile.

NOTE [ A weight in a graph ]

Rule 1. A graph cannot hold seeds, or every call would draw the same. So a read is an operator that
        draws when the graph runs, as eager reads do, and returns seeds and magnitudes as a tensor.
        A step begins with an operator, too, whose number the reads in it take. Frames around the
        graph (`same_draw`, an eager step) count when it runs.
Rule 2. Another operator makes the weight from the raw one and these seeds, and depends on nothing
        else. Backward gets the seeds that forward saved, and computes the rest of a weight again.
Rule 3. Operators are registered when something is first applied, not on import.
Rule 4. The graph breaks where a weight is computed by autograd (a function of the user's, a learned
        deviation), or shares its draws with another name: the operators take a weight and seeds.
Rule 5. The compiler stores what it compiled on disk, by the names and the arguments of operators.
        So an operator that comes to mean something else gets another name. It takes two calls with
        the same arguments for one; so each draw has its place in the graph among them.
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.compile import (
    ComputedAgain,
    break_graph,
    is_followed,
    is_traced,
    never_compiled,
    num_recorded,
    saved,
    unchecked,
    uncompiled,
)
from recoup.errors import RecoupError
from recoup.weights.reparametrization import Drawn, Step, leave, local

NOT_IN_GRAPH = (
    "Outside of graphs run recurrent layers with reparametrized weights, and what reads a weight "
    "that a function computes (recoup.weights.apply), whose noise has a deviation that is a "
    'parameter, or that is tied by `tied="same"`. Leave `fullgraph` out.'
)

# They begin anywhere, so that a graph that was exported finds no object of another process.
_numbers = itertools.count(int.from_bytes(os.urandom(7)))
_by_handle: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_traced: list[Tensor] = []  # the handles of the steps that are traced


def new_handle(owner: object) -> Tensor:
    """Return a number that stands for an object in a graph: an input of it, not a constant."""
    number = next(_numbers)
    _by_handle[number] = owner
    return torch.tensor(number, device="cpu")


def _owner_of(handle: Tensor) -> Any:
    found = _by_handle.get(int(handle))
    if found is None:
        raise RecoupError(
            "This graph reads a weight of a model that is not in this process (any more), so its "
            "noise is unknown. Export a model that draws nothing: in evaluation, after "
            'recoup.weights.remove where `mode` is "always".'
        )
    return found


# -- what is traced ----------------------------------------------------------------------------


def step_in_graph(
    run: Callable[..., Any], in_step: Any, module: nn.Module, attached: Any, args: Any, kwargs: Any
) -> Any:
    """Trace a forward that is a step."""
    if not torch.compiler.is_compiling():  # a layer within breaks the graph
        return in_step(module, attached, args, kwargs)
    if not any(weight.may_draw(owner.training) for weight, owner in attached.uses_in(module)):
        return run(module, *args, **kwargs)
    unchecked(_traced.append, torch.ops.recoup.begun(attached.handle))
    try:
        return run(module, *args, **kwargs)
    finally:
        unchecked(_traced.pop)


def read_in_graph(weight: Any, module: nn.Module, raw: Tensor) -> Tensor:
    """Trace a read of a weight."""
    if any(step.by_autograd or step.is_tied for step in weight.steps):
        if is_traced():  # torch.export does not break graphs
            raise RecoupError(NOT_IN_GRAPH)
        break_graph(NOT_IN_GRAPH)  # See Rule 4
        return uncompiled(weight.read)(module, raw)
    norms = [(step, g) for step in weight.steps for g in step.operands(module, weight.key)]
    builds_graph, seeds = torch.is_grad_enabled(), None
    if weight.may_draw(module.training) and (_traced or builds_graph):
        given = [int(module.training), int(builds_graph), len(weight.steps)]
        seeds = torch.ops.recoup.drawn([weight.handle, *_traced], given)
    would_be_kept = (norms or seeds is not None) and builds_graph and is_followed()
    with ComputedAgain() if would_be_kept else nullcontext():
        for step, norm in norms:
            raw = step.product(raw, norm)
        return raw if seeds is None else torch.ops.recoup.redrawn(raw, seeds, weight.handle, False)


# -- what a graph calls ------------------------------------------------------------------------


@functools.cache
def register_operators() -> None:
    """Register the operators that a graph calls (See Rule 3)."""
    library = torch.library.Library("recoup", "FRAGMENT")
    _registered.append(library)
    for name, run in (("begun", _begun), ("drawn", _drawn)):
        library.define(name + torch.library.infer_schema(run, mutates_args=()))
        library.impl(name, run, "CompositeImplicitAutograd")
    seeded = (torch.Tag.nondeterministic_seeded,)
    _register("step", _step, _fake_step, seeded)
    _register("seeds", _seeds, _fake_seeds, seeded)
    operator = _register("redrawn", _redrawn, _fake_redrawn)
    operator.register_autograd(_backward, setup_context=_keep_seeds)


def _register(name: str, run: Any, fake: Callable[..., Tensor], tags: Sequence[Any] = ()) -> Any:
    operator: Any = torch.library.custom_op(f"recoup::{name}", run, mutates_args=(), tags=tags)
    operator.register_fake(fake)
    return operator


_registered: list[Any] = []  # torch takes back what a library registered when that is freed


@never_compiled
def _begun(handle: Tensor) -> Tensor:
    """Begin a step of the module whose state has a handle; return a handle of the step."""
    return saved(lambda: torch.ops.recoup.step(handle, num_recorded()))  # See Rule 5


@never_compiled
def _step(handle: Tensor, place: int) -> Tensor:
    attached = _owner_of(handle)
    step = Step(None, attached.roots)
    made: Any = new_handle(step)
    made.step = step  # which lives as long as the graph needs its handle
    return made


def _fake_step(*_: object) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@never_compiled
def _drawn(handles: Sequence[Tensor], given: Sequence[int]) -> Tensor:
    """Return the draws of a read, as two rows: seeds, and magnitudes as bits; 0 where none is.

    The handles are that of the weight, and those of the steps around it, the outermost first. Given
    are whether its module trains, whether a graph is built, and the number of reparametrizations.
    """
    return saved(lambda: torch.ops.recoup.seeds(handles, given, num_recorded()))


@never_compiled
def _seeds(handles: Sequence[Tensor], given: Sequence[int], place: int) -> Tensor:
    weight, *frames = map(_owner_of, handles)
    local.frames += frames
    try:
        made = {each.step: each for each in weight.draws_again(0, bool(given[0]), bool(given[1]))}
    finally:
        for frame in frames:
            leave(frame)
    found = [made.get(step, Drawn(step, 0, 0.0)) for step in weight.steps]
    magnitudes = torch.tensor([each.magnitude for each in found], dtype=torch.float64)
    return torch.stack([torch.tensor([each.seed for each in found]), magnitudes.view(torch.int64)])


def _fake_seeds(handles: object, given: Sequence[int], place: int) -> Tensor:
    return torch.empty((2, given[2]), dtype=torch.int64, device="cpu")


@never_compiled
def _redrawn(weight: Tensor, seeds: Tensor, handle: Tensor, transposed: bool) -> Tensor:
    """Return a weight under these draws; transposed, the gradient of the raw one from its own."""
    weight = weight.clone(memory_format=torch.contiguous_format)
    rows: Any = (seeds[0], seeds[1].view(torch.float64))
    drawn = zip(_owner_of(handle).steps, rows[0].tolist(), rows[1].tolist(), strict=True)
    for step, seed, magnitude in drawn:
        if magnitude and step.is_random and not (transposed and step.is_additive):
            weight = step.compute(weight, (), Drawn(step, seed, magnitude), is_new=True)
    return weight


def _fake_redrawn(weight: Tensor, *_: object) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _keep_seeds(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return torch.ops.recoup.redrawn(gradient, *ctx.saved_tensors, True), None, None, None
