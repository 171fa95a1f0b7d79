"""The operators that a graph of torch.compile calls for reparametrized weights.

The rules that the code names are those of NOTE [ A weight in a graph ], in `compiled`.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from recoup._core.compile import never_compiled
from recoup._core.compiled_graphs import computed_again, num_recorded, saved
from recoup.errors import RecoupError, ReplayError
from recoup.weights.forwards import Forward
from recoup.weights.normed import product_of
from recoup.weights.outside_forward import warn_of_read
from recoup.weights.reparametrization import Covering, Drawn, Reparametrized

__all__ = ["new_handle", "register_operators"]

_BUDGET_OF_0 = (
    "Where `region_activation_memory_budget(0.0)` is around compiled code, the compiler lets "
    "backward draw again instead of saving the seeds. Give a budget above 0, such as 1e-6."
)

_numbers = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_begun: weakref.WeakValueDictionary[int, Forward] = weakref.WeakValueDictionary()


def new_handle(owner: Reparametrized | Covering) -> Tensor:
    """Return a number that stands for an object in a graph: an input of it, not a constant."""
    number = next(_numbers)
    _by_handle[number] = owner
    return torch.tensor(number, device="cpu")


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
