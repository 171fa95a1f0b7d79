"""Reparametrized weights in a graph of torch.compile.

NOTE [ A weight in a graph ]

Rule 1. A graph cannot hold seeds, or every call would draw the same. So it holds an operator that
        decides when the graph runs, as any eager read does, and returns a tensor of seeds.
Rule 2. Another operator makes the weight from the raw one and these seeds, and depends on nothing
        else. Backward gets the seeds that forward saved, and computes the rest of a weight again:
        the composite operator that consists of both says so (NOTE [ Three passes ]).
Rule 3. A forward that is traced begins with an operator, too, which returns a number. It stands for
        a `Forward` of this run of the graph, which is in force while reads that it covers draw; so
        these have one draw and one step, as in eager code. The number's tensor owns the `Forward`.
Rule 4. While it is traced, the first read in a forward makes the weight, and other reads with the
        same coverage get the same one, unless a checkpoint of torch or its end is in between.
Rule 5. The coverage of a read is known when it is traced: an application is covered where a forward
        of it is traced, too. A norm that is not covered depends on the contexts in force around the
        graph, so the graph breaks there.
Rule 6. Operators are registered when something is first applied, not on import.
Rule 7. The graph breaks where a weight is computed by a function of the user's, or where its noise
        has a deviation that is a parameter: the operators take a weight and seeds.
Rule 8. The compiler stores what it compiled on disk, by the names and the arguments of operators.
        So what a composite operator consists of depends on its arguments alone, and one that comes
        to mean something else gets another name.
Rule 9. The compiler takes two calls with the same arguments for one. Each forward that begins is
        another one, so it is numbered.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from recoup.errors import RecoupError, ReplayError
from recoup.weights.forwards import Forward, is_overridden
from recoup.weights.normed import product_of
from recoup.weights.outside_forward import warn_of_read
from recoup.weights.reparametrization import Application, Covering, Drawn, Reparametrized

__all__ = [
    "NOT_IN_GRAPH",
    "forward_in_graph",
    "new_handle",
    "read_in_graph",
    "register_operators",
]

NOT_IN_GRAPH = (
    "Outside of graphs run recurrent layers with reparametrized weights, and what reads a weight "
    "that a function computes (recoup.weights.apply) or whose noise has a deviation that is a "
    "parameter. Leave `fullgraph` out."
)
_UNCOVERED_NORM = (
    "A weight with a norm is read outside of a forward, so what it is depends on the contexts "
    "around the graph. Compile the module whose forward reads it, or leave `fullgraph` out."
)
_BUDGET_OF_0 = (
    "Where `region_activation_memory_budget(0.0)` is around compiled code, the compiler lets "
    "backward draw again instead of saving the seeds. Give a budget above 0, such as 1e-6."
)


class Traced(NamedTuple):
    """A forward that is traced: what it covers, its number if it draws, and the weights made."""

    applications: tuple[Application, ...]
    number: Tensor | None
    made: dict[tuple[Any, bool, int], Tensor]


_numbers = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_begun: weakref.WeakValueDictionary[int, Forward] = weakref.WeakValueDictionary()
_traced: list[Traced] = []


def new_handle(owner: Reparametrized | Covering) -> Tensor:
    """Return a number that stands for an object in a graph: an input of it, not a constant."""
    number = next(_numbers)
    _by_handle[number] = owner
    return torch.tensor(number, device="cpu")


def forward_in_graph(
    run: Callable[..., Any],
    module: nn.Module,
    covering: Covering,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Trace a forward whose reads share their draws (See Rule 3)."""
    if all(_around(application) >= 0 for application in covering.applications):
        return run(module, *args, **kwargs)
    number = None
    if covering.draws and (
        covering.draws_always or is_overridden() or any(part.training for part in module.modules())
    ):
        number = torch.ops.recoup.forward_begins(covering.handle)
    unchecked(_push, Traced(covering.applications, number, {}))
    try:
        return run(module, *args, **kwargs)
    finally:
        unchecked(_pop)


def _push(traced: Traced) -> None:
    _traced.append(traced)


def _pop() -> None:
    _traced.pop()


def read_in_graph(parametrized: Reparametrized, module: nn.Module, raw: Tensor) -> Tensor:
    """Trace a read of a weight (See Rule 4)."""
    covered, innermost = 0, -1
    forwards: list[int] = []
    for number, step in enumerate(parametrized.steps):
        around = _around(step.application)
        if around >= 0:
            covered |= 1 << number
            innermost = max(innermost, around)
            if around not in forwards:
                forwards.append(around)
        elif not step.is_random:
            break_graph(_UNCOVERED_NORM)  # See Rule 5
            return uncompiled(_read_uncompiled)(parametrized, module, raw)
        if step.breaks_graph:
            break_graph(NOT_IN_GRAPH)  # See Rule 7
            return uncompiled(_read_uncompiled)(parametrized, module, raw)
    begun = [_traced[place].number for place in sorted(forwards)]
    numbers = [number for number in begun if number is not None]
    if innermost < 0:
        return _made(parametrized, module, raw, numbers)
    made = _traced[innermost].made
    key = (parametrized, torch.is_grad_enabled(), covered)
    if key in made:
        return made[key]
    weight = _made(parametrized, module, raw, numbers)
    if not is_in_checkpoint():
        made[key] = weight
    return weight


def _made(
    parametrized: Reparametrized, module: nn.Module, raw: Tensor, numbers: list[Tensor]
) -> Tensor:
    is_on = is_overridden()
    norms: list[Tensor] = []
    axes: list[int] = []
    for step in parametrized.steps:
        if step.is_random:
            is_on = is_on or module.training or step.mode == "always"
        else:
            norms += step.operands(module, parametrized.key)
            axes.append(step.axis)
    if not is_on and (not norms or not torch.is_grad_enabled() or is_traced()):
        for norm, axis in zip(norms, axes, strict=True):
            raw = product_of(raw, norm, axis)
        return raw
    num_steps = len(parametrized.steps) if is_on else 0
    return torch.ops.recoup.reparametrized(
        raw, norms, axes, parametrized.handle, numbers, num_steps, module.training
    )


def _around(application: Application) -> int:
    """Return the index of the outermost traced forward that covers `application`, or -1."""
    for number, traced in enumerate(_traced):
        if application in traced.applications:
            return number
    return -1


def _read_uncompiled(parametrized: Reparametrized, module: nn.Module, raw: Tensor) -> Tensor:
    warn_of_read(parametrized, is_training=module.training)
    return parametrized.read(module, raw)


@functools.cache
def register_operators() -> None:
    """Register the operators that a graph calls (See Rule 6)."""
    library = torch.library.Library("recoup", "FRAGMENT")
    _registered.append(library)
    for name, run in (("forward_begins", _forward_begins), ("reparametrized", _reparametrized)):
        library.define(name + torch.library.infer_schema(run, mutates_args=()))
        library.impl(name, run, "CompositeImplicitAutograd")
    for name, run, fake in (("begun", _begin, _fake_number), ("seeds_of", _seeds, _fake_seeds)):
        operator = torch.library.custom_op(
            f"recoup::{name}", run, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
        )
        operator.register_fake(fake)
    for name, run in (("redrawn", _redrawn), ("redrawn_gradient", _redrawn_gradient)):
        operator = torch.library.custom_op(f"recoup::{name}", run, mutates_args=())
        operator.register_fake(_fake_redrawn)
        operator.register_autograd(_backward, setup_context=_keep_seeds)


_registered: list[Any] = []  # torch takes back what a library registered when that is freed


@never_compiled
def _forward_begins(handle: Tensor) -> Tensor:
    return saved(lambda: torch.ops.recoup.begun(handle, num_recorded()))  # See Rule 9


@never_compiled
def _reparametrized(
    raw: Tensor,
    norms: Sequence[Tensor],
    axes: Sequence[int],
    handle: Tensor,
    forwards: Sequence[Tensor],
    num_steps: int,
    is_training: bool,
) -> Tensor:
    """Return a weight; the norms come before the draws (See Rule 2).

    Args:
        raw: the parameter.
        norms: the magnitudes of its norms.
        axes: their axes.
        handle: the handle of the parametrized weight.
        forwards: the numbers of the forwards that cover it, the outermost first.
        num_steps: the number of reparametrizations of the weight; 0 if none draws.
        is_training: whether its module is in training mode.
    """
    seeds = None
    if num_steps:
        seeds = saved(
            lambda: torch.ops.recoup.seeds_of(raw, handle, forwards, num_steps, is_training)
        )

    def make() -> Tensor:
        weight = raw
        for norm, axis in zip(norms, axes, strict=True):
            weight = product_of(weight, norm, axis)
        return weight if seeds is None else torch.ops.recoup.redrawn(weight, seeds, handle)

    return computed_again(make)


@never_compiled
def _begin(handle: Tensor, place: int) -> Tensor:
    """Return the number of a forward that begins.

    Args:
        handle: the handle of what its module covers.
        place: its place in the graph (See Rule 9).
    """
    del place
    # A forward that is traced is not in force when the graph runs: this stands for it.
    forward = Forward(None, _by_handle[int(handle)].applications)
    number = next(_numbers)
    _begun[number] = forward
    token: Any = torch.tensor(number)
    token._recoup_forward = forward
    return token


def _fake_number(handle: Tensor, place: int) -> Tensor:
    del place
    return torch.empty_like(handle)


@never_compiled
def _seeds(
    raw: Tensor, handle: Tensor, forwards: Sequence[Tensor], num_steps: int, is_training: bool
) -> Tensor:
    """Return seeds, and magnitudes as bits, a row each; 0 and 0 where none is drawn."""
    parametrized: Reparametrized = _by_handle[int(handle)]
    with ExitStack() as stack:
        for number in forwards:
            stack.enter_context(_forward_of(int(number), parametrized))
        try:
            resolution = parametrized.resolution(raw, is_training=is_training)
        except ReplayError as error:
            error.add_note(_BUDGET_OF_0)
            raise
        warn_of_read(parametrized, is_training=is_training)
    drawn = {each.step: each for each in resolution}
    found = [drawn.get(step) for step in parametrized.steps]
    seeds = torch.tensor([0 if each is None else each.seed for each in found])
    magnitudes = [0.0 if each is None else each.magnitude for each in found]
    bits = torch.tensor(magnitudes, dtype=torch.float64).view(torch.int64)
    return torch.stack([seeds, bits])


def _forward_of(number: int, parametrized: Reparametrized) -> Forward:
    forward = _begun.get(number)
    if forward is None:
        raise RecoupError(
            f"The forward in which {parametrized.name} is read has ended before the compiled graph "
            "read it. Compile the module whose forward reads it as a whole."
        )
    return forward


def _fake_seeds(raw: Tensor, handle: Tensor, forwards: Any, num_steps: int, *_: Any) -> Tensor:
    return torch.empty((2, num_steps), dtype=torch.int64, device="cpu")


def _drawn(seeds: Tensor, handle: Tensor) -> list[Drawn]:
    steps = _by_handle[int(handle)].steps
    numbers = seeds[1].view(torch.float64)
    drawn = [
        Drawn(step, int(seeds[0, index]), float(numbers[index])) for index, step in enumerate(steps)
    ]
    return [each for each in drawn if each.step.is_random and each.magnitude]


@never_compiled
def _redrawn(weight: Tensor, seeds: Tensor, handle: Tensor) -> Tensor:
    weight = weight.clone(memory_format=torch.contiguous_format)
    for each in _drawn(seeds, handle):
        weight = each.step.compute(weight, (), each, in_place=True)
    return weight


@never_compiled
def _redrawn_gradient(gradient: Tensor, seeds: Tensor, handle: Tensor) -> Tensor:
    gradient = gradient.clone(memory_format=torch.contiguous_format)
    for each in _drawn(seeds, handle):
        gradient = each.step.transpose(gradient, each, in_place=True)
    return gradient


def _fake_redrawn(weight: Tensor, seeds: Tensor, handle: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _keep_seeds(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.recoup.redrawn_gradient(gradient, *ctx.saved_tensors), None, None
