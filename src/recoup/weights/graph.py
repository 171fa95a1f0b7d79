"""Reparametrized weights in a graph of torch.compile.

NOTE [ Two operators ]

Rule 1. A graph cannot hold seeds, or every call would draw the same. So it holds an operator that
        decides when the graph runs, as any eager read does, and gives a tensor of seeds.
Rule 2. The second operator makes the weight from the raw one and these seeds, and depends on
        nothing else; so the compiler may keep its result or make it again, as it thinks best.
Rule 3. One forward has one draw also in a graph: while it is traced, the first read makes the
        weight, and the other reads of that forward are given the same.
Rule 4. Operators are registered when something is first applied, not on import.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recoup.residuals.compiler import never_compiled
from recoup.weights.forwards import Forward, is_overridden
from recoup.weights.reparametrization import Application, Drawn

if TYPE_CHECKING:
    from recoup.weights.place import Place

__all__ = ["forward_in_graph", "new_handle", "read_in_graph", "register_operators"]

Traced = tuple[tuple[Application, ...], dict[tuple[Any, bool], Tensor]]

_numbers = itertools.count()
_places: weakref.WeakValueDictionary[int, Place] = weakref.WeakValueDictionary()
_traced: list[Traced] = []


def new_handle(place: Place) -> Tensor:
    """Return a number by which a graph may refer to `place`: an input of it, not a constant."""
    number = next(_numbers)
    _places[number] = place
    return torch.tensor(number, device="cpu")


def forward_in_graph(
    run: Callable[..., Any],
    module: nn.Module,
    applications: tuple[Application, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Trace a forward whose reads share their draws (See Rule 3)."""
    _traced.append((applications, {}))
    try:
        return run(module, *args, **kwargs)
    finally:
        _traced.pop()


def read_in_graph(place: Place, module: nn.Module, raw: Tensor) -> Tensor:
    """Trace a read of a weight (See Rule 3)."""
    key = (place, torch.is_grad_enabled())
    for applications, made in _traced:
        for step in place.steps:
            if step.application in applications:
                if key not in made:
                    made[key] = _made(place, module, raw, is_in_forward=True)
                return made[key]
    return _made(place, module, raw, is_in_forward=False)


def _made(place: Place, module: nn.Module, raw: Tensor, *, is_in_forward: bool) -> Tensor:
    weight = raw
    is_on = is_overridden()
    for step in place.steps:
        if step.is_random:
            is_on = is_on or module.training or step.mode == "always"
        elif is_in_forward:
            operands = step.operands(module, place.key)
            weight = step.apply_plainly(weight, operands, Drawn(step, 0, 1.0))
    if not is_on:
        return weight
    seeds = torch.ops.recoup.seeds(
        raw, place.handle, len(place.steps), module.training, is_in_forward
    )
    return torch.ops.recoup.redraw(weight, seeds, place.handle)


@functools.cache
def register_operators() -> None:
    """Register the operators that a graph calls (See Rule 4)."""
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
    anchor: Tensor, handle: Tensor, num_steps: int, is_training: bool, is_in_forward: bool
) -> Tensor:
    """Return a row of seeds and a row of magnitudes, as bits; 0 where nothing is drawn."""
    place = _places[int(handle)]
    # A forward that is traced is not in force when the graph runs: this stands for it.
    around = Forward(None, place.applications) if is_in_forward else nullcontext()
    with around:
        drawn = {each.step: each for each in place.resolution(anchor, is_training=is_training)}
    found = [drawn.get(step) for step in place.steps]
    seeds = torch.tensor([0 if each is None else each.seed for each in found])
    magnitudes = [0.0 if each is None else each.magnitude for each in found]
    return torch.stack([seeds, torch.tensor(magnitudes, dtype=torch.float64).view(torch.int64)])


def _fake_seeds(
    anchor: Tensor, handle: Tensor, num_steps: int, is_training: bool, is_in_forward: bool
) -> Tensor:
    return torch.empty((2, num_steps), dtype=torch.int64, device="cpu")


def _drawn(seeds: Tensor, handle: Tensor) -> list[Drawn]:
    steps = _places[int(handle)].steps
    numbers = seeds[1].view(torch.float64)
    drawn = [
        Drawn(step, int(seeds[0, place]), float(numbers[place])) for place, step in enumerate(steps)
    ]
    return [each for each in drawn if each.step.is_random and each.magnitude]


@never_compiled
def _redraw(weight: Tensor, seeds: Tensor, handle: Tensor) -> Tensor:
    made = weight.clone(memory_format=torch.contiguous_format)
    for each in _drawn(seeds, handle):
        made = each.step.remake(made, (), each, is_own=True)
    return made


@never_compiled
def _redraw_gradient(gradient: Tensor, seeds: Tensor, handle: Tensor) -> Tensor:
    made = gradient.clone(memory_format=torch.contiguous_format)
    for each in _drawn(seeds, handle):
        made = each.step.transpose_(made, each)
    return made


def _fake_redraw(weight: Tensor, seeds: Tensor, handle: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _keep_seeds(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.recoup.redraw_gradient(gradient, *ctx.saved_tensors), None, None
