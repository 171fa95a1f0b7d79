"""Marks of modules and callables: attributes that say how they are to be run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def is_gathered(module: nn.Module) -> bool:
    """Whether FSDP2 gathers the parameters of `module` for its calls, and frees them afterwards."""
    return hasattr(type(module), "unshard")


def is_in_place(module: Any) -> bool:
    """Whether `module` says that the first thing it does changes its input in place."""
    return are_in_place((module,))[0]


def are_in_place(callables: Iterable[Any]) -> list[bool]:
    """Return for each callable whether the first thing that it does changes its input in place."""
    firsts: list[Any] = []
    for first in callables:
        while isinstance(first, nn.Sequential) and first._modules:
            first = next(iter(first._modules.values()))
        firsts.append(first)
    return list(map(bool, marks_of(firsts, "inplace")))


def mark_of(fn: Any, name: str) -> Any:
    """Return an attribute that marks a module, of its own or of its class; False without one."""
    return marks_of((fn,), name)[0]


def marks_of(callables: Iterable[Any], name: str) -> list[Any]:
    """Return what `mark_of` does for each callable, in one call of Python."""
    marks: list[Any] = []
    for fn in callables:
        kind: Any = fn.__class__
        if getattr(kind, "__getattr__", None) is nn.Module.__getattr__:  # it would look, slowly
            marks.append(fn.__dict__.get(name, getattr(kind, name, False)))
        else:
            marks.append(getattr(fn, name, False))
    return marks
