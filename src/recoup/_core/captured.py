"""The values that a callable holds itself, one level deep: where its modules are looked for.

Nothing depends on this being complete: a module that is found can be named in an error, and counts
in its buffers once; what a second run makes is compared either way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

__all__ = ["captured_by", "modules_of"]


def captured_by(fn: Callable[..., Any]) -> list[Any]:
    """Return the values in the closure, the owner or the parts of a callable, and itself if a module.

    Of the globals that a function names, modules and tensors are returned.
    """
    if isinstance(fn, nn.Module):
        return [fn]
    if isinstance(fn, functools.partial):
        return [*captured_by(fn.func), *fn.args, *fn.keywords.values()]
    if isinstance(fn, MethodType):
        owner = fn.__self__
        attributes = () if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {}).values()
        return [owner, *attributes, *captured_by(fn.__func__)]
    if not isinstance(fn, FunctionType):
        return [*getattr(fn, "__dict__", {}).values()]
    found: list[Any] = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for cell in fn.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is not bound yet
            continue
    for name in fn.__code__.co_names:
        value = fn.__globals__.get(name)
        if isinstance(value, nn.Module | Tensor):
            found.append(value)
    return found


def modules_of(fn: Callable[..., Any]) -> list[nn.Module]:
    """Return the modules among the values that a callable holds, each once."""
    if isinstance(fn, nn.Module):
        return [fn]
    found = [value for value in captured_by(fn) if isinstance(value, nn.Module)]
    return list(dict.fromkeys(found))
