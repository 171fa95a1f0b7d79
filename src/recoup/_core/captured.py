"""The values that a callable holds itself, one level deep: where its modules are looked for.

Nothing depends on this being complete: a module that is found can be named in an error, and counts
in its buffers once; what a second run makes is compared either way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

from torch import Tensor, nn


def captured_by(fn: Callable[..., Any]) -> list[Any]:
    """Return the values in the closure, the owner or the parts of a callable; or a module itself.

    Of the globals that a function names, modules, tensors and containers are returned.
    """
    if isinstance(fn, nn.Module):
        return [fn]
    if isinstance(fn, functools.partial):
        return [*captured_by(fn.func), *fn.args, *fn.keywords.values()]
    if isinstance(fn, MethodType):
        owner = fn.__self__
        if isinstance(owner, nn.Module):
            return [owner]
        return [owner, *getattr(owner, "__dict__", {}).values(), *captured_by(fn.__func__)]
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
        if isinstance(value, nn.Module | Tensor | list | tuple | dict):
            found.append(value)
    return found


def parts_of(fn: Any, others: Iterable[Any] = ()) -> tuple[object, list[nn.Module]]:
    """Return what stands for the code that a callable runs, and the modules that it holds.

    Args:
        fn: a function, module or other callable.
        others: its arguments, which may be modules and functions, too.
    """
    if isinstance(fn, nn.Module) and not others:
        return fn, [fn]
    code = fn.__code__ if isinstance(fn, FunctionType) else _code_of(fn)
    modules: dict[nn.Module, None] = {}
    codes: list[object] = []
    for value in (*captured_by(fn), *others):
        several: Any = value
        if isinstance(value, dict):
            several = cast("dict[Any, Any]", value).values()
        elif not isinstance(value, (tuple, list)):
            several = (value,)
        for each in cast("Iterable[Any]", several):
            if isinstance(each, nn.Module):
                modules[each] = None
            elif isinstance(each, (FunctionType, MethodType, functools.partial)):
                codes.append(_code_of(each))
    return joint_code([code, *codes]) if codes else code, list(modules)


def _code_of(fn: Any) -> object:
    """Return a module itself; of other callables their code, or their type."""
    while isinstance(fn, functools.partial):
        fn = cast("Any", fn).func
    if isinstance(fn, nn.Module):
        return fn
    if isinstance(fn, MethodType):
        fn = fn.__func__
    if isinstance(fn, BuiltinFunctionType):
        return fn
    return getattr(fn, "__code__", cast("Any", type)(fn))


class _Joint:
    """An object that stands for the code of several functions, of which one calls the others."""


def joint_code(codes: Sequence[object]) -> object:
    """Return what stands for the code of all, which is the same each time."""
    return codes[0] if len(codes) == 1 else _joint(*codes)


@functools.cache
def _joint(*codes: object) -> _Joint:
    del codes
    return _Joint()
