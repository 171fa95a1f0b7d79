"""The modules, tensors and plain values that a function reads beside its arguments.

NOTE [ What can be seen ]

Rule 1. The search follows closure cells, defaults, `functools.partial`, the owner of a method, the
        globals that a function reads, functions among these, the attributes of plain objects,
        and the first entries of tuples, lists and dicts. Modules and tensors found there are
        compared before a second run.
Rule 2. Numbers, strings and None are compared if the code reads them (NOTE [ The reads of code ]).
        This catches a loop variable that has moved on. A value that the first run has changed
        itself (a counter) has in a second run the value from before the first run, and is put back
        after it; a flag has the value that the first run left, as in NOTE [ Correct or an error ].
Rule 3. Other reads (deeper than a few levels, files, devices) are not seen.
Rule 4. A tensor with a history is held weakly: it would hold the graph that holds the region.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from recoup._core.closure_values import MAX_DEPTH, MAX_ENTRIES, PLAIN, plain_values, reads_of
from recoup._core.guards import Location, Replacement
from recoup._core.saved_tensors import version_of
from recoup.errors import ChangedError

__all__ = ["ClosureGuard"]

# Packages whose functions and objects are not searched.
_OTHERS = frozenset(("builtins", "torch", "numpy", "functools", "types", "collections"))
_MISSING = object()
# What the walk finds beside values: a container, to which a run may add; and for the location of a
# module, a variable that may stand for another one later.
_CONTAINER: Any = object()
_REBOUND: Any = object()


class ClosureGuard:
    """The closure guard: the modules, tensors and plain values that `fn` reads, as they are now.

    Attributes:
        modules: the modules, which a `ModuleGuard` compares.
    """

    __slots__ = ("_fn", "_items", "_locations", "_may_gain", "_moved", "modules")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._may_gain = False  # whether a run may change what is found
        self._items: list[tuple[str, Any, int]] = []
        self._locations: dict[str, tuple[Any, Location, bool]] = {}
        self._moved: list[Replacement] = []
        modules: list[nn.Module] = []
        seen: set[int] = set()
        for path, value, location, is_own in _walked(fn):
            if value is _CONTAINER:
                self._may_gain = True
            elif isinstance(value, nn.Module):
                if location is _REBOUND:
                    self._items.append((path, value, 0))
                    self._may_gain |= is_own
                if id(value) not in seen:
                    seen.add(id(value))
                    modules.append(value)
            elif isinstance(value, Tensor):
                kept = value if value.grad_fn is None else weakref.ref(value)  # See Rule 4
                self._items.append((path, kept, version_of(value)))
                self._may_gain = True
            elif location is None:
                self._items.append((path, value, 0))
            else:
                self._locations[path] = (value, location, is_own)
        self.modules = tuple(modules)

    @property
    def reads(self) -> bool:
        """Whether `fn` reads anything that may be another one in a second run."""
        return bool(self._items or self._locations or self._may_gain)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among these values that are alive."""
        found: list[Any] = [
            cast("Any", kept() if isinstance(kept, weakref.ref) else kept)
            for _, kept, _ in self._items
        ]
        return [value for value in found if isinstance(value, Tensor)]

    def first_run_ended(self) -> None:
        """Record the versions and values that the first run left (See Rule 2)."""
        if not self._locations and not self._may_gain:
            return  # what is left are modules, and values that are bound to arguments
        now = ClosureGuard(self._fn)
        self._items = now._items
        for path, (before, location, is_own) in self._locations.items():
            after = now._locations.get(path, (None, location, False))[0]
            is_moved = is_own or not _is_same(before, after)
            if is_moved and type(after) is not bool:
                self._moved.append((location, before))
            elif path in now._locations:
                self._items.append((path, after, 0))
        self._locations = {}

    def check(self, name: str) -> None:
        """Raise if anything has changed since the first run ended (See Rules 1 and 2)."""
        if not self._items:
            return
        now = {path: value for path, value, _, _ in _walked(self._fn)}
        for path, kept, version in self._items:
            value = cast("Any", kept() if isinstance(kept, weakref.ref) else kept)
            found = now.get(path, _MISSING)
            is_tensor = isinstance(value, Tensor)
            same = found is value or (not is_tensor and _is_same(found, value))
            if not same or (is_tensor and version_of(value) != version):
                how = "changed in place" if same else "given another value"
                raise ChangedError(
                    f"`{path}`, which {name} reads, was {how} between forward and backward, so "
                    "running it again would compute something else. Pass it as an argument, or "
                    "change it after backward."
                )

    def to_replace(self) -> list[Replacement]:
        """Return the values from before the first run that a second run must have (See Rule 2)."""
        return self._moved


def _is_same(before: Any, now: Any) -> bool:
    # NaN is not equal to itself.
    return before is now or (type(before) is type(now) and (before == now or before != before))


_Walked = tuple[str, Any, "Location | None", bool]

# The walk appends what it finds to a list: generators that pass it on would take twice as long, and
# each call of a function looks for its closure.


def _walked(fn: Any) -> list[_Walked]:
    """Return what `fn` reads: path, value, location, and whether `fn` itself writes it."""
    found: list[_Walked] = []
    _walk(fn, found, "", 0)
    return found


def _walk(fn: Any, found: list[_Walked], path: str, depth: int, owner: object = None) -> None:
    """Find what `fn`, a method of `owner` if that is given, reads (See Rule 1)."""
    if isinstance(fn, types.FunctionType):
        _function(fn, found, owner, path, depth)
    elif isinstance(fn, nn.Module):
        found.append((path or "module", fn, None, False))
    elif isinstance(fn, functools.partial):
        partial = cast("functools.partial[Any]", fn)
        _walk(partial.func, found, path, depth)
        for key, value in (*enumerate(partial.args), *partial.keywords.items()):
            _value(f"{path}partial[{key}]", value, found, depth, is_cell=True)
    elif isinstance(fn, types.MethodType):
        _value("self", fn.__self__, found, depth, is_cell=isinstance(fn.__self__, nn.Module))
        _walk(fn.__func__, found, path, depth, fn.__self__)
    elif not isinstance(fn, types.BuiltinFunctionType):
        called = getattr(cast("Any", type(fn)), "__call__", None)  # noqa: B004 - its function
        if isinstance(called, types.FunctionType) and _is_users(called):
            _value("self", fn, found, depth, is_cell=False)
            _function(called, found, fn, path, depth)


def _function(
    fn: types.FunctionType, found: list[_Walked], owner: object, path: str, depth: int
) -> None:
    reads = reads_of(fn.__code__)
    if fn.__closure__:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            if isinstance(value, nn.Module):
                found.append((f"{path}{name}", value, _REBOUND, name in reads.written))
            else:
                _value(f"{path}{name}", value, found, depth, is_cell=False)
    if fn.__defaults__:
        for index, value in enumerate(fn.__defaults__):
            _value(f"{path}default[{index}]", value, found, depth, is_cell=True)
    if fn.__kwdefaults__:
        for name, value in fn.__kwdefaults__.items():
            _value(f"{path}{name}", value, found, depth, is_cell=True)
    has_reads = reads.reads or (owner is not None and reads.of_owner)
    if not has_reads or not _is_users(fn):
        return
    plain_values(fn, found, owner, path)
    for name in reads.global_names:
        value = fn.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            continue
        if isinstance(value, nn.Module):
            found.append((f"{path}{name}", value, _REBOUND, name in reads.written))
        elif isinstance(value, Tensor):
            found.append((f"{path}{name}", value, None, False))
        elif isinstance(value, types.FunctionType) and depth < MAX_DEPTH and _is_users(value):
            _function(value, found, None, f"{path}{name}.", depth + 1)


def _value(path: str, value: Any, found: list[_Walked], depth: int, *, is_cell: bool) -> None:
    if isinstance(value, nn.Module):
        found.append((path, value, None if is_cell else _REBOUND, False))
    elif isinstance(value, Tensor) or (is_cell and isinstance(value, PLAIN)):
        found.append((path, value, None, False))
    elif depth >= MAX_DEPTH or isinstance(value, PLAIN):
        return
    elif isinstance(value, (tuple, list)):
        found.append((path, _CONTAINER, None, False))
        entries = cast("tuple[Any, ...]", value)
        for index, entry in enumerate(entries[:MAX_ENTRIES]):
            _value(f"{path}[{index}]", entry, found, depth + 1, is_cell=False)
    elif isinstance(value, dict):
        found.append((path, _CONTAINER, None, False))
        mapping = cast("dict[Any, Any]", value)
        for key in list(mapping)[:MAX_ENTRIES]:
            _value(f"{path}[{key!r}]", mapping[key], found, depth + 1, is_cell=False)
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        _walk(value, found, f"{path}.", depth + 1)
    elif type(value).__module__.partition(".")[0] not in _OTHERS:
        found.append((path, _CONTAINER, None, False))
        for key, entry in list(getattr(value, "__dict__", {}).items())[:MAX_ENTRIES]:
            if isinstance(entry, (nn.Module, Tensor)):
                location = _REBOUND if isinstance(entry, nn.Module) else None
                found.append((f"{path}.{key}", entry, location, False))


def _is_users(fn: types.FunctionType) -> bool:
    return (fn.__module__ or "").partition(".")[0] not in _OTHERS
