"""Reparametrized weights in a graph of torch.compile.

NOTE [ Two operators ]

Rule 1. A graph cannot hold seeds, or every call would draw the same. So it holds an operator that
        decides when the graph runs, as any eager read does, and returns a tensor of seeds.
Rule 2. The second operator makes the weight from the raw one and these seeds, and depends on
        nothing else; so the compiler may keep its result or recompute it.
Rule 3. One forward has one draw also in a graph: while it is traced, the first read makes the
        weight, and other reads in that forward with the same coverage get the same weight.
Rule 4. A forward counts one step for each application and draws once for each weight: the first
        read of an application begins, and the others join it by taking its tensor of seeds.
Rule 5. The coverage of a read is known when it is traced: an application is covered where a forward
        of it is traced, too. A norm that is not covered depends on the contexts in force around the
        graph, so the graph breaks there.
Rule 6. Operators are registered when something is first applied, not on import.
Rule 7. The graph breaks where a weight is computed by a function of the user's, or where its noise
        has a deviation that is a parameter: the operators take a weight and seeds.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled, uncompiled
from recoup.weights.forwards import Forward, is_overridden
from recoup.weights.outside_forward import warn_of_read
from recoup.weights.reparametrization import Application, Drawn, Reparametrized

__all__ = ["forward_in_graph", "new_handle", "read_in_graph", "register_operators"]

Seeds = tuple[Reparametrized, int, Tensor]  # the weight, the index of its step, and the tensor


class Traced(NamedTuple):
    """A forward that is traced: its applications, the weights made, and the draws begun."""

    applications: tuple[Application, ...]
    made: dict[tuple[Any, bool, int], Tensor]
    begun: dict[Application, Seeds]


_numbers = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, Reparametrized] = weakref.WeakValueDictionary()
_traced: list[Traced] = []


def new_handle(parametrized: Reparametrized) -> Tensor:
    """Return a number that stands for a weight in a graph: an input of it, not a constant."""
    number = next(_numbers)
    _by_handle[number] = parametrized
    return torch.tensor(number, device="cpu")


def forward_in_graph(
    run: Callable[..., Any],
    module: nn.Module,
    applications: tuple[Application, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Trace a forward whose reads share their draws (See Rule 3)."""
    _traced.append(Traced(applications, {}, {}))
    try:
        return run(module, *args, **kwargs)
    finally:
        _traced.pop()


def read_in_graph(parametrized: Reparametrized, module: nn.Module, raw: Tensor) -> Tensor:
    """Trace a read of a weight (See Rule 3)."""
    covered, innermost = 0, -1
    for number, step in enumerate(parametrized.steps):
        around = _around(step.application)
        if around >= 0:
            covered |= 1 << number
            innermost = max(innermost, around)
        elif not step.is_random:
            return uncompiled(_read_uncompiled)(parametrized, module, raw)  # See Rule 5
        if step.breaks_graph:
            return uncompiled(_read_uncompiled)(parametrized, module, raw)  # See Rule 7
    if innermost < 0:
        return _made(parametrized, module, raw, covered)
    made = _traced[innermost].made
    key = (parametrized, torch.is_grad_enabled(), covered)
    if key not in made:
        made[key] = _made(parametrized, module, raw, covered)
    return made[key]


def _made(parametrized: Reparametrized, module: nn.Module, raw: Tensor, covered: int) -> Tensor:
    weight = raw
    is_on = is_overridden()
    for step in parametrized.steps:
        if step.is_random:
            is_on = is_on or module.training or step.mode == "always"
        else:
            operands = step.operands(module, parametrized.key)
            weight = step.apply_by_operators(weight, operands, Drawn(step, 0, 1.0))
    if not is_on:
        return weight
    begun: list[Tensor] = []
    joins: list[int] = []
    beginning: list[int] = []
    for number, step in enumerate(parametrized.steps):
        around = _around(step.application)
        before = None if around < 0 else _traced[around].begun.get(step.application)
        if before is not None:
            # Take the seeds again if they are of the same weight, else only the step number.
            begun.append(before[2])
            joins += [number, before[1], int(before[0] is parametrized)]
        elif around >= 0:
            beginning.append(number)
    seeds = torch.ops.recoup.seeds(
        raw, parametrized.handle, len(parametrized.steps), module.training, covered, begun, joins
    )
    for number in beginning:
        application = parametrized.steps[number].application
        _traced[_around(application)].begun[application] = (parametrized, number, seeds)
    return torch.ops.recoup.redraw(weight, seeds, parametrized.handle)


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
    seeds = torch.library.custom_op(
        "recoup::seeds", _seeds, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
    )
    seeds.register_fake(_fake_seeds)
    for name, run in (("redraw", _redraw), ("redraw_gradient", _redraw_gradient)):
        operator = torch.library.custom_op(f"recoup::{name}", run, mutates_args=())
        operator.register_fake(_fake_redraw)
        operator.register_autograd(_backward, setup_context=_keep_seeds)


@never_compiled
def _seeds(
    anchor: Tensor,
    handle: Tensor,
    num_steps: int,
    is_training: bool,
    covered: int,
    begun: Sequence[Tensor],
    joins: Sequence[int],
) -> Tensor:
    """Return seeds, magnitudes as bits, and steps, a row each; 0, 0 and -1 where none is drawn.

    Args:
        anchor: the raw weight.
        handle: the handle of the parametrized weight.
        num_steps: the number of reparametrizations of the weight.
        is_training: whether its module is in training mode.
        covered: as bits, those of them that a forward in the graph covers.
        begun: the results for earlier reads in the same forward (See Rule 4).
        joins: three numbers for each of those results: the index here of the step that joins, its
            index there, and whether it is of the same weight.
    """
    parametrized = _by_handle[int(handle)]
    steps = parametrized.steps
    applications = [each.application for n, each in enumerate(steps) if covered >> n & 1]
    # A forward that is traced is not in force when the graph runs: this stands for it.
    around = Forward(None, tuple(applications))
    for before, (number, there, is_same) in zip(begun, _in_threes(joins), strict=True):
        seed, bits, count = before[:, there]
        step = steps[number]
        if count >= 0:
            around.steps[step.application] = int(count)
            if is_same:
                around.drawn[step] = Drawn(step, int(seed), bits.view(torch.float64).item())
    with around:
        resolution = parametrized.resolution(anchor, is_training=is_training)
        warn_of_read(parametrized, is_training=is_training)
    drawn = {each.step: each for each in resolution}
    found = [drawn.get(step) for step in steps]
    seeds = torch.tensor([0 if each is None else each.seed for each in found])
    magnitudes = [0.0 if each is None else each.magnitude for each in found]
    counts = torch.tensor([around.steps.get(step.application, -1) for step in steps])
    bits = torch.tensor(magnitudes, dtype=torch.float64).view(torch.int64)
    return torch.stack([seeds, bits, counts])


def _in_threes(joins: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    numbers = iter(joins)
    return zip(numbers, numbers, numbers, strict=True)


def _fake_seeds(anchor: Tensor, handle: Tensor, num_steps: int, *_: Any) -> Tensor:
    return torch.empty((3, num_steps), dtype=torch.int64, device="cpu")


def _drawn(seeds: Tensor, handle: Tensor) -> list[Drawn]:
    steps = _by_handle[int(handle)].steps
    numbers = seeds[1].view(torch.float64)
    drawn = [
        Drawn(step, int(seeds[0, index]), float(numbers[index])) for index, step in enumerate(steps)
    ]
    return [each for each in drawn if each.step.is_random and each.magnitude]


@never_compiled
def _redraw(weight: Tensor, seeds: Tensor, handle: Tensor) -> Tensor:
    weight = weight.clone(memory_format=torch.contiguous_format)
    for each in _drawn(seeds, handle):
        weight = each.step.compute(weight, (), each, in_place=True)
    return weight


@never_compiled
def _redraw_gradient(gradient: Tensor, seeds: Tensor, handle: Tensor) -> Tensor:
    gradient = gradient.clone(memory_format=torch.contiguous_format)
    for each in _drawn(seeds, handle):
        gradient = each.step.transpose(gradient, each, in_place=True)
    return gradient


def _fake_redraw(weight: Tensor, seeds: Tensor, handle: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _keep_seeds(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.recoup.redraw_gradient(gradient, *ctx.saved_tensors), None, None
