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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from recoup._core.captured import captured_by
from recoup._core.generators import generators_restored
from recoup._core.graph_ends import ends_of
from recoup._core.saved_tensors import version_of
from recoup.errors import ReplayError
from recoup.planning.state_snapshot import StateSnapshot, settings_restored

__all__ = [
    "ChangedParameterError",
    "foreign_leaves",
    "is_in_rehearsal",
    "rehearsal",
    "uncollected",
    "without_gradients",
]


class ChangedParameterError(ReplayError):
    """A forward changed a parameter, which planning must not cause."""


class _Here(threading.local):
    num_rehearsals = 0  # that are in progress


_here = _Here()


def is_in_rehearsal() -> bool:
    """Whether the current code is part of a rehearsal, of any model."""
    return _here.num_rehearsals > 0


@contextmanager
def rehearsal(module: nn.Module, values: Iterable[object] = ()) -> Generator[None]:
    """Return a context in which steps of `module` leave no trace.

    Args:
        module: the model.
        values: the arguments of the step, and functions that it calls: of these the modules,
            tensors and generators that they hold themselves are restored.

    Raises:
        ReplayError: a forward changed a parameter.
    """
    parameters = list({id(p): p for p in module.parameters()}.values())
    versions = [(name, p, version_of(p)) for name, p in module.named_parameters()]
    values = list(values)
    arguments = [value for value in values if not _is_function(value)]
    found = StateSnapshot([module, *arguments], _held_by(values))
    torch.clear_autocast_cache()  # earlier casts would not be counted
    with (
        generators_restored(),
        _streams_restored(),
        settings_restored(),
        without_gradients(parameters),
        uncollected(),
    ):
        _here.num_rehearsals += 1
        try:
            yield
        finally:
            _here.num_rehearsals -= 1
            found.restore()
            torch.clear_autocast_cache()
    changed = set(map(id, found.changed_parameters()))
    for name, parameter, version in versions:
        if version_of(parameter) != version or id(parameter) in changed:
            raise ChangedParameterError(
                f"Parameter `{name}` of {type(module).__name__} was changed by the forward of the "
                "measured step (a data-dependent initialization?), which planning must not cause. "
                "Run one forward before recoup.plan."
            )


def _held_by(values: Iterable[object], num_levels: int = 2) -> Iterator[object]:
    """Yield what functions hold, two levels deep: a loss is held by a function of ours."""
    for value in values:
        if not _is_function(value):
            yield value
        elif num_levels:
            yield from _held_by(captured_by(value), num_levels - 1)


def _is_function(value: object) -> TypeGuard[Callable[..., Any]]:
    return callable(value) and not isinstance(value, nn.Module)


def foreign_leaves(model: nn.Module, losses: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves of the graph of a step that are not parameters of the model."""
    own = set(map(id, model.parameters()))
    return [leaf for leaf in ends_of(losses).leaves if id(leaf) not in own]


@contextmanager
def uncollected() -> Generator[None]:
    """Return a context that collects garbage first, and then disables the collector (See Rule 4).

    If the collector is disabled already (within another such context), the youngest generation
    alone is collected, which takes a hundredth of the time.
    """
    gc.collect(2 if gc.isenabled() else 0)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def without_gradients(leaves: Sequence[Tensor]) -> Generator[Sequence[Tensor]]:
    """Return a context in which leaves have neither gradients nor hooks (See Rules 1 and 2)."""
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    hooks = [(own, dict(own)) for leaf, _ in gradients for own in _hooks_of(leaf)]
    for leaf, _ in gradients:
        leaf.grad = None
    for own, _ in hooks:
        own.clear()
    try:
        yield leaves
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient
        for own, found in hooks:
            own.update(found)


def _hooks_of(leaf: Tensor) -> list[dict[int, Any]]:
    hooks: Any = (leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks"))  # noqa: B009
    return [found for found in hooks if found]


@contextmanager
def _streams_restored() -> Generator[None]:
    numpy = sys.modules.get("numpy.random")
    of_python = random.getstate()
    of_numpy = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.set_state(of_numpy)
