"""Snapshots of the state that a step may change, restored after the step.

NOTE [ Restored state ]

Rule 1. Of a module, its class, its attributes (hooks, buffers and children among them) and the
        `requires_grad` of its parameters are restored. Submodules are found through `modules()`
        and through attributes that hold them.
Rule 2. Of lists, dicts, sets and deques, and of the attributes of users' objects, the entries are
        restored, a few levels deep. The containers stay the same objects, since other code holds
        references to them.
Rule 3. Of tensors and numpy arrays found on the way, other than parameters, the values are
        restored, and of tensors the version counter too. Values are compared, because a version
        counter does not show every change (numpy, `.data` and views with a version counter of
        their own write past it).
Rule 4. Parameters are not copied, since a copy of all of them may not fit. A parameter that was
        given other memory gets its own back; a write to one is detected by a sum of its values.
Rule 5. Of generators of torch, Python and numpy found on the way the states are restored.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.saved_tensors import set_versions, version_of
from recoup._core.snapshots import is_left_alone

__all__ = ["StateSnapshot", "settings_restored"]

_DEEPEST = 5
_MOST_ENTRIES = 4096  # entries of larger containers are restored, but not searched
# The attributes of objects from these packages are not part of a step's state.
_OF_NOBODY = frozenset((
    "builtins", "collections", "torch", "numpy", "threading", "recoup", "weakref", "_weakrefset",
    "concurrent", "asyncio", "multiprocessing", "queue", "io", "logging",
))  # fmt: skip


class StateSnapshot:
    """A snapshot of the state that can be reached from some values.

    Kept: a copy of each tensor that is not a parameter, and of the entries of each container.

    Args:
        roots: modules, and nested values that may contain tensors.
    """

    def __init__(self, roots: Iterable[object]) -> None:
        self._seen: dict[int, object] = {}
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._parameters: list[tuple[nn.Parameter, Tensor, bool, float | None]] = []
        self._generators: list[Callable[[], object]] = []  # each restores the state of one
        for root in roots:
            self._note(root, 0)

    def restore(self) -> None:
        """Restore the state (See NOTE [ Restored state ])."""
        for module, kind in self._classes:
            if type(module) is not kind:
                module.__class__ = kind
        for container, entries in self._containers:
            _refill(container, entries)
        with torch.no_grad():
            for tensor, content, version in self._tensors:
                _put_back(tensor, content, version)
            for parameter, data, requires_grad, _ in self._parameters:
                if _is_plain(parameter) and parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
                if parameter.requires_grad is not requires_grad:
                    parameter.requires_grad_(requires_grad)
        for array, content in self._arrays:
            array[...] = content
        for restore in self._generators:
            restore()

    def changed_parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose values have changed (See Rule 4)."""
        return [
            parameter
            for parameter, _, _, total in self._parameters
            if total is not None and _total(parameter) != total
        ]

    def _note(self, value: object, depth: int) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._note_module(module)
        elif isinstance(value, Tensor):
            self._note_tensor(value, is_buffer=False)
        elif (restore := _restored(value)) is not None:
            self._seen[id(value)] = value
            self._generators.append(restore)
            self._note_attributes(value, depth)
        elif not is_left_alone(value) and depth < _DEEPEST:
            self._note_container(value, depth)

    def _note_module(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        self._classes.append((module, type(module)))
        for buffer in module.buffers(recurse=False):
            self._note_tensor(buffer, is_buffer=True)
        if hasattr(type(module), "unshard"):  # FSDP2 remembers elsewhere which hooks it has added
            for key, value in vars(module).items():
                if key.endswith("_hooks"):
                    self._seen[id(value)] = value
        self._note_entries(vars(module), 0)

    def _note_tensor(self, tensor: Tensor, *, is_buffer: bool) -> None:
        if id(tensor) in self._seen or tensor.is_meta or tensor.is_inference():
            return
        self._seen[id(tensor)] = tensor
        if isinstance(tensor, nn.Parameter):
            total = _total(tensor) if _is_plain(tensor) else None
            self._parameters.append((tensor, tensor.detach(), tensor.requires_grad, total))
            self._note_entries(vars(tensor), 0)
        elif is_buffer or _is_plain(tensor):
            self._tensors.append((tensor, tensor.detach().clone(), version_of(tensor)))

    def _note_container(self, value: Any, depth: int) -> None:
        numpy = sys.modules.get("numpy")
        if _is_a(value, list, dict, set, deque):
            self._note_entries(value, depth)
        elif _is_a(value, tuple):
            for item in value:
                self._note(item, depth + 1)
        elif numpy is not None and type(value) is numpy.ndarray:
            if value.flags.writeable and id(value) not in self._seen:
                self._seen[id(value)] = value
                self._arrays.append((value, value.copy()))
            return
        self._note_attributes(value, depth)

    def _note_attributes(self, value: object, depth: int) -> None:
        is_users = type(value).__module__.partition(".")[0] not in _OF_NOBODY
        if is_users and hasattr(value, "__dict__"):
            self._note_entries(vars(value), depth)

    def _note_entries(self, container: Any, depth: int) -> None:
        if id(container) in self._seen:
            return
        self._seen[id(container)] = container
        entries: Any = container.copy() if type(container) in _PLAIN else _entries_of(container)
        self._containers.append((container, entries))
        if len(entries) <= _MOST_ENTRIES and not _is_a(entries, set):
            for item in entries.values() if _is_a(entries, dict) else entries:
                self._note(item, depth + 1)


_PLAIN: frozenset[type[Any]] = frozenset((list, dict, set, deque))


def _is_a(value: Any, *kinds: type[Any]) -> bool:
    """Like isinstance, without narrowing the type to one whose entries are unknown."""
    return isinstance(value, kinds)


def _entries_of(container: Any) -> Any:
    """Return the entries of a subclass instance, whose own `copy` may behave differently."""
    if _is_a(container, dict):
        return dict(container)
    return set(container) if _is_a(container, set) else list(container)


def _refill(container: Any, entries: Any) -> None:
    """Restore the entries of a container if they have changed."""
    if _is_a(container, dict):
        if len(container) == len(entries) and all(
            key is other and value is entries[other]
            for (key, value), other in zip(container.items(), entries, strict=True)
        ):
            return
        kind: Any = OrderedDict if _is_a(container, OrderedDict) else dict
        kind.clear(container)
        kind.update(container, entries)
    elif _is_a(container, set):
        if container != entries:
            container.clear()
            container.update(entries)
    elif len(container) != len(entries) or any(
        a is not b for a, b in zip(container, entries, strict=True)
    ):
        container.clear()
        container.extend(entries)


def _restored(value: Any) -> Callable[[], object] | None:
    """Return what restores the state of a generator; None if `value` is none (See Rule 5)."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.SystemRandom):
        return None  # has no state
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.RandomState):
        return partial(value.set_state, value.get_state())
    return None


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _put_back(tensor: Tensor, content: Tensor, version: int) -> None:
    """Restore the values and the version of a tensor (See Rule 3)."""
    if not _is_plain(tensor):
        if version_of(tensor) != version:
            tensor.copy_(content)
        return
    if tensor.shape != content.shape or tensor.dtype is not content.dtype:
        tensor.data = content
    elif not torch.equal(tensor, content):  # never equal where there are NaNs
        tensor.detach().copy_(content)
    if version_of(tensor) != version:
        set_versions((tensor,), (version,))


def _total(tensor: Tensor) -> float:
    """Return the absolute sum of a tensor, computed without a copy; infinity if it is NaN."""
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    total = float(abs(torch.sum(tensor.detach(), dtype=kind)))
    return total if total == total else float("inf")


@contextmanager
def settings_restored() -> Generator[None]:
    """Return a context that restores the global settings of torch which a step may change."""
    of_modules = vars(torch.nn.modules.module)
    hooks = StateSnapshot([of_modules[key] for key in of_modules if key.startswith("_global_")])
    grad_mode, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        hooks.restore()
        torch.set_grad_enabled(grad_mode)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        if torch.are_deterministic_algorithms_enabled() is not is_deterministic:
            torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)
