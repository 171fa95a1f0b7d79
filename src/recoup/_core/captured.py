"""What a call holds: modules and their buffers, one level deep, and copies of its arguments.

What is found need not be complete: a module can be named in an error, and counts in its buffers
once; what a second run makes is compared either way. Of arguments that may change while a region
runs, such as caches, a second run gets the structure as the first run found it: lists, dicts, sets
and attributes are copied, and the tensors in them are the same, without their history.

Threads may share a module, so one thread at a time has the turn to find or put other values in
buffers. Code within a turn may take a gradient, which on an accelerator runs regions in another
thread, while this one waits: they share the turn in which they were made.
"""

from __future__ import annotations

import copy
import enum
import functools
import math
import threading
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recoup._core.saved_tensors import set_versions, version_of
from recoup._core.sketch import Sketch, sketch_of
from recoup._core.sketch import are_equal as are_alike
from recoup._core.tensors import PLAIN, has_values


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

    The `others` are its arguments, which may be modules and functions, too.
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

    Its tensors are added to the list `tensors`. They share memory and versions with those given.
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


# The buffers of a module, or its attributes, and what they were at some time.
Buffers = tuple[dict[str, Tensor | None], dict[str, Tensor | None]]
Attributes = tuple[dict[str, Any], dict[str, Any]]


class Turn:
    """A turn to have other values in buffers."""

    lock = threading.Lock()
    current: Turn | None = None


class _Here(threading.local):
    turn: Turn | None = None


turn_here = _Here()


@contextmanager
def having_turn(of: Turn | None, *, is_needed: bool) -> Generator[Turn | None]:
    """Return a context that has the turn, if it is needed: this thread's, or that `of` a call."""
    around = turn_here.turn
    if not is_needed or around is not None:
        yield around
        return
    is_shared = of is not None and of is Turn.current
    with nullcontext() if is_shared else Turn.lock:
        turn_here.turn = Turn.current = of if is_shared else Turn()
        try:
            yield turn_here.turn
        finally:
            turn_here.turn = None
            Turn.current = of if is_shared else None


def all_of(buffers: Iterable[Buffers]) -> list[Tensor]:
    """Return the buffers that modules had."""
    return [each for _, before in buffers for each in before.values() if each is not None]


def copies_of(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return tensors with copies; without those of other layouts."""
    return [
        (each, each.detach().clone())
        for each in tensors
        if not is_lazy(each) and each.layout is torch.strided
        if not each.is_nested and has_values(each)
    ]


def others_of(module: nn.Module) -> list[Tensor]:
    """Return the plain parameters of a module, and the tensors that are attributes of it."""
    values: list[Any] = [*vars(module).values(), *module._parameters.values()]
    return [each for each in values if type(each) in PLAIN and not is_lazy(each)]


def name_of_parameter(parameter: Tensor, modules: Iterable[nn.Module]) -> str:
    """Return the name of a parameter, in the first module that has it."""
    for module in modules:
        for name, each in module.named_parameters():
            if each is parameter:
                return f"`{name}` of {type(module).__name__}"
    return "a parameter"


def have_changed(
    tensors: Iterable[tuple[object, Tensor]], before: Sequence[Sketch | None]
) -> list[bool]:
    """Return which tensors, each of a module, have other values than when they were sketched."""
    pairs: list[list[tuple[Sketch, Sketch]]] = []
    for (_, each), a in zip(tensors, before, strict=True):
        # A list with NaN is unlike itself.
        has_nan = isinstance(a, list) and any(map(math.isnan, a))
        b = None if a is None or has_nan else sketch_of(each)
        pairs.append([] if a is None or b is None else [(a, b)])
    if are_alike(chain.from_iterable(pairs)):  # which waits once for a device
        return [False] * len(pairs)
    return [not are_alike(each) for each in pairs]


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values."""
    try:
        return torch.equal(a, b)
    except NotImplementedError:  # of types of a few bits
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def are_assigned(found: Attributes) -> bool:
    """Whether a module has other objects as its buffers, or attributes, now."""
    own, before = found
    return [*map(id, own.values())] != [*map(id, before.values())]


def are_own(found: Attributes) -> bool:
    """Whether these are plain tensors, so that FSDP2 has not put others in their places."""
    return {type(each) for own in found for each in own.values()} <= {*PLAIN, type(None)}


def assign(found: Iterable[Attributes]) -> None:
    """Let modules have the buffers, or attributes, that they had.

    What is the same stays all the while: other threads may be reading it.
    """
    for own, before in found:
        for name in own.keys() - before.keys():
            del own[name]
        for name, value in before.items():
            if name not in own or own[name] is not value:
                own[name] = value


def put_values(buffers: list[Tensor], values: list[Tensor]) -> None:
    """Give buffers other values, without a trace in their versions."""
    if not buffers:
        return
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            if buffer.shape != value.shape:  # an observer that takes its size in the first run
                version = version_of(buffer)
                set_versions((buffer.resize_(value.shape),), (version,))
        # `data` has versions of its own: other threads may look at those of the buffers now.
        cast("Any", torch)._foreach_copy_([buffer.data for buffer in buffers], values)
