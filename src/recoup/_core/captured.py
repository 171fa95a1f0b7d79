"""What a callable holds itself, one level deep, and copies of arguments that a run may change.

Nothing depends on the first being complete: a module that is found can be named in an error, and
counts in its buffers once; what a second run makes is compared either way. Of arguments that are no
tensors and may change while a region runs, such as caches, a second run gets the structure as the
first run found it: lists, dicts, sets and attributes are copied, and the tensors in them are the
same, without their history.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
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


Code = weakref.ref[Any]


def note(known: set[Code], parts: Iterable[Code]) -> None:
    """Add code to a set, for as long as it is there."""
    for part in parts:
        value = part()
        if value is not None and part not in known:
            known.add(weakref.ref(value, known.discard))


_DEEPEST = 6
_ALONE = (
    bool, int, float, complex, str, bytes, type(None), type, enum.Enum, nn.Module, types.ModuleType,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, torch.dtype, torch.device,
    torch.Size, torch.Generator, range, slice,
)  # fmt: skip
# Packages whose objects are not copied.
_OF_NOBODY = frozenset(("builtins", "collections", "torch", "numpy", "threading", "logging"))


def is_left_alone(value: object) -> bool:
    """Whether a run cannot change `value`, or other code handles such a change."""
    return isinstance(value, _ALONE)


def copied(value: Any, tensors: list[Tensor] | None = None) -> Any:
    """Return a copy of `value`, with the tensors in it detached and parameters as they are.

    Args:
        value: a value of any kind.
        tensors: a list to which the tensors of the copy are added; they share memory and versions
            with those of `value`.
    """
    known: dict[int, Any] = {}
    made = _copied(value, known, 0)
    if tensors is not None:
        tensors += [each for each in known.values() if isinstance(each, Tensor)]
    return made


def _is_a(value: Any, *kinds: type[Any]) -> bool:
    """Return `isinstance(value, kinds)`, for type checkers without narrowing the type."""
    return isinstance(value, kinds)


def _copied(value: Any, known: dict[int, Any], depth: int) -> Any:
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, nn.Parameter) or is_left_alone(value) or depth >= _DEEPEST:
        return value
    if isinstance(value, Tensor):
        made: Any = value.detach().requires_grad_(value.requires_grad)
    elif _is_a(value, tuple):
        items = [_copied(item, known, depth + 1) for item in value]
        made = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif _is_a(value, list, dict, set) or _is_users(value):
        made = known[id(value)] = copy.copy(value)
        if _is_a(made, list):
            made[:] = [_copied(item, known, depth + 1) for item in value]
        elif _is_a(made, dict):
            for key, item in value.items():
                dict.__setitem__(made, key, _copied(item, known, depth + 1))
        for key, item in list(getattr(value, "__dict__", {}).items()):
            made.__dict__[key] = _copied(item, known, depth + 1)
    else:
        return value
    known[id(value)] = made
    return made


def _is_users(value: object) -> bool:
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _OF_NOBODY
