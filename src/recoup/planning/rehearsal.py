"""A training step that leaves no trace.

NOTE [ A rehearsal ]

Rule 1. Backward runs as in training and accumulates into an empty `.grad`, so that gradients take
        the same memory. The previous `.grad` is restored, also that of leaves outside the model.
Rule 2. Hooks of parameters do not run: one that steps an optimizer would train.
Rule 3. Buffers, the attributes of modules (lists and dicts included), and the random streams of
        torch, Python and numpy are restored. If a forward changes a parameter, an error is raised,
        since a copy of all parameters may not fit.
Rule 4. The garbage collector is disabled. It would free reference cycles at different moments on
        different ranks, so that the peaks would differ, and with them the plans.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import types
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.called_code import called_code, captured_by
from recoup._core.closure_values import MAX_DEPTH, reads_of
from recoup._core.closures import ClosureGuard
from recoup._core.generators import generators_restored
from recoup._core.graph_ends import ends_of
from recoup._core.restoring import Undoing, restoring
from recoup._core.saved_tensors import version_of
from recoup.errors import ReplayError
from recoup.planning.state_snapshot import StateSnapshot, settings_restored

__all__ = ["backward_within_model", "is_in_rehearsal", "rehearsal", "uncollected"]


class _Here(threading.local):
    num_rehearsals = 0  # that are in progress


_here = _Here()


def is_in_rehearsal() -> bool:
    """Whether the current code is part of a rehearsal, of any model."""
    return _here.num_rehearsals > 0


@restoring
def rehearsal(module: nn.Module, values: Iterable[object] = ()) -> Generator[None]:
    """Return a context in which steps of `module` leave no trace.

    Args:
        module: the model.
        values: other values that a step may change: arguments, and functions, of which the modules,
            tensors and generators that they read are restored.

    Raises:
        ReplayError: a forward changed a parameter.
    """
    parameters = list({id(p): p for p in module.parameters()}.values())
    versions = [(name, p, version_of(p)) for name, p in module.named_parameters()]
    found = StateSnapshot([module, *_read(values)])
    torch.clear_autocast_cache()  # earlier casts would not be counted
    with (
        generators_restored(),
        _streams_restored(),
        settings_restored(),
        _without_gradients(parameters),
        uncollected(),
        Undoing() as undo,
    ):
        undo.later(torch.clear_autocast_cache)
        undo.later(found.restore)
        undo.later(setattr, _here, "num_rehearsals", _here.num_rehearsals)
        _here.num_rehearsals += 1
        yield
    changed = set(map(id, found.changed_parameters()))
    for name, parameter, version in versions:
        if version_of(parameter) != version or id(parameter) in changed:
            raise ReplayError(
                f"Parameter `{name}` of {type(module).__name__} was changed by the forward of the "
                "measured step (a data-dependent initialization?), which planning must not cause. "
                "Run one forward before recoup.plan."
            )


def _read(values: Iterable[object]) -> Iterator[object]:
    """Yield the values, with each function replaced by the modules and so on that it reads."""
    for value in values:
        if callable(value) and not isinstance(value, nn.Module):
            guard = ClosureGuard(value)
            yield from (*guard.modules, *guard.tensors, *_generators_of(value))
        else:
            yield value


def _generators_of(fn: Any) -> list[Any]:
    """Return the generators that a function holds or reads, those among globals included."""
    found = called_code(fn)
    for each in _functions_of(fn, 0):
        names = reads_of(each.__code__).global_names
        found.values([each.__globals__.get(name) for name in names], MAX_DEPTH)
    return found.generators


def _functions_of(fn: Any, depth: int) -> Iterator[types.FunctionType]:
    """Yield the function that is called, and those that it holds."""
    while isinstance(fn, partial):
        fn = cast("partial[Any]", fn).func
    fn = getattr(fn, "__func__", fn)
    if isinstance(fn, types.FunctionType) and depth < MAX_DEPTH:
        yield fn
        for each in captured_by(fn):
            yield from _functions_of(each, depth + 1)


def backward_within_model(model: nn.Module, losses: Sequence[Tensor]) -> dict[int, Tensor | None]:
    """Call backward, and restore the gradients of leaves that are not parameters of `model`.

    Returns:
        The new gradients of these leaves, by the id of the leaf.
    """
    own = set(map(id, model.parameters()))
    leaves = [leaf for leaf in ends_of(losses).leaves if id(leaf) not in own]
    with _without_gradients(leaves):
        torch.autograd.backward(losses)
        return {id(leaf): leaf.grad for leaf in leaves}


@restoring
def uncollected() -> Generator[None]:
    """Return a context that collects garbage first, and then disables the collector (See Rule 4).

    If the collector is disabled already (within another such context), the youngest generation
    alone is collected, which takes a hundredth of the time.
    """
    gc.collect(2 if gc.isenabled() else 0)
    with Undoing() as undo:
        if gc.isenabled():
            undo.later(gc.enable)
        gc.disable()
        yield


@restoring
def _without_gradients(leaves: Iterable[Tensor]) -> Generator[None]:
    """Return a context in which leaves have neither gradients nor hooks (See Rules 1 and 2)."""
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    hooks = [(own, dict(own)) for leaf, _ in gradients for own in _hooks_of(leaf)]
    with Undoing() as undo:
        for own, found in hooks:
            undo.later(own.update, found)
        for leaf, gradient in gradients:
            undo.later(setattr, leaf, "grad", gradient)
        for leaf, _ in gradients:
            leaf.grad = None
        for own, _ in hooks:
            own.clear()
        yield


def _hooks_of(leaf: Tensor) -> list[dict[int, Any]]:
    hooks: Any = (leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks"))  # noqa: B009
    return [found for found in hooks if found]


@restoring
def _streams_restored() -> Generator[None]:
    numpy = sys.modules.get("numpy.random")
    of_python = random.getstate()
    of_numpy = None if numpy is None else numpy.get_state()
    with Undoing() as undo:
        undo.later(random.setstate, of_python)
        if numpy is not None:
            undo.later(numpy.set_state, of_numpy)
        yield
