"""Marks of modules and callables: attributes that say how they are to be run."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["is_in_place", "mark_of", "updates_statistics"]


def updates_statistics(module: nn.Module) -> bool:
    """Whether `module` is a norm that updates its statistics in forward."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def is_in_place(module: nn.Module) -> bool:
    """Whether `module` says that the first thing it does changes its input in place."""
    while isinstance(module, nn.Sequential) and module._modules:
        module = next(iter(module._modules.values()))
    return bool(mark_of(module, "inplace"))


def mark_of(fn: Any, name: str) -> Any:
    """Return an attribute that marks a module, of its own or of its class; False without one."""
    kind: Any = fn.__class__
    if getattr(kind, "__getattr__", None) is nn.Module.__getattr__:  # it would look in vain, slowly
        return fn.__dict__.get(name, getattr(kind, name, False))
    return getattr(fn, name, False)
