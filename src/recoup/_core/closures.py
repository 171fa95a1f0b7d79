"""The modules, tensors and plain values that a function reads beside its arguments.

NOTE [ What can be seen ]

Rule 1. The search follows closure cells, defaults, `functools.partial`, the owner of a method, the
        first entries of tuples, lists and dicts, and functions among these; of the globals that
        a function reads, and of the attributes of plain objects, those that are modules or tensors
        (of globals also functions). Modules and tensors found there must be the same ones before
        a second run, and unchanged. What is bound to the function itself (its arguments, the owner
        of a method) cannot be another one.
Rule 2. Numbers, strings and None are compared if the code reads them (NOTE [ The reads of code ]).
        This catches a loop variable that has moved on. A value that the first run has changed
        itself (a counter) has in a second run the value from before the first run, and is put back
        after it; a flag has the value that the first run left, as in NOTE [ Correct or an error ].
Rule 3. Other reads (deeper than a few levels, files, devices) are not seen.
Rule 4. A tensor with a history is held weakly: it would hold the graph that holds the region.
Rule 5. A first run may add a tensor to a container, or put a module in a variable. The search is
        done again when it has ended, unless there was neither. A module in the place of another
        one is an error: a second run would begin with it.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from recoup._core.closure_values import MAX_DEPTH, MAX_ENTRIES, PLAIN, plain_values, reads_of
from recoup._core.replaced_values import Location, Replacement
from recoup._core.saved_tensors import version_of
from recoup.errors import ChangedError, ReplayError

__all__ = ["ClosureGuard"]

# Packages whose functions and objects are not searched.
_OTHERS = frozenset(("builtins", "torch", "numpy", "functools", "types", "collections"))
_MISSING = object()


class ClosureGuard:
    """The closure guard: the modules, tensors and plain values that `fn` reads, as they are now.

    Attributes:
        modules: the modules, which a `ModuleGuard` compares.
    """

    __slots__ = ("_fn", "_items", "_locations", "_may_change", "_moved", "modules")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._items: list[tuple[str, Any, int]] = []
        self._locations: dict[str, tuple[Any, Location, bool]] = {}
        self._moved: list[Replacement] = []
        found = _found_in(fn)
        self._may_change = found.may_change  # in the first run (See Rule 5)
        for path, value, location, is_own in found.values:
            if location is not None:
                self._locations[path] = (value, location, is_own)
            elif isinstance(value, Tensor):
                kept = value if value.grad_fn is None else weakref.ref(value)  # See Rule 4
                self._items.append((path, kept, version_of(value)))
                self._may_change = True
            else:
                self._items.append((path, value, 0))
                if isinstance(value, nn.Module):
                    found.modules[id(value)] = value
        self.modules = tuple(found.modules.values())

    @property
    def fn(self) -> Callable[..., Any]:
        """The function."""
        return self._fn

    @property
    def reads(self) -> bool:
        """Whether `fn` reads anything that may be another one in a second run."""
        return bool(self._items or self._locations or self._may_change)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among these values that are alive."""
        found: list[Any] = [
            cast("Any", kept() if isinstance(kept, weakref.ref) else kept)
            for _, kept, _ in self._items
        ]
        return [value for value in found if isinstance(value, Tensor)]

    def first_run_ended(self, name: str) -> None:
        """Record what the first run left; raise if it replaced a module (See Rules 2 and 5)."""
        if not self._locations and not self._may_change:
            return  # what is left are modules and bound values
        now = ClosureGuard(self._fn)
        left = {path: value for path, value, _ in now._items}
        for path, value, _ in self._items:
            if isinstance(value, nn.Module) and left.get(path) is not value:
                raise ReplayError(
                    f"{name} replaces `{path}`, a {type(value).__name__} that it reads, so running "
                    "it again would begin with another one. Replace it after backward."
                )
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
        now = {path: value for path, value, _, _ in _found_in(self._fn).values}
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


# The search adds what it finds to one object: generators that pass it on would take twice as long,
# and each call of a function searches its closure.


class _Found:
    """What a function reads beside its arguments.

    Attributes:
        values: the values that may be others in a second run: path, value, the location of a
            number or string that can be put back, and whether the function itself writes it.
        modules: the modules, by id.
        may_change: whether a run may change what there is to find (See Rule 5).
    """

    __slots__ = ("may_change", "modules", "values")

    def __init__(self) -> None:
        self.values: list[tuple[str, Any, Location | None, bool]] = []
        self.modules: dict[int, nn.Module] = {}
        self.may_change = False

    def add_module(
        self, path: str, module: nn.Module, *, is_bound: bool, is_written: bool = False
    ) -> None:
        """Add a module; one that is bound cannot be another one in a second run."""
        self.modules[id(module)] = module
        if not is_bound:
            self.values.append((path, module, None, is_written))
            self.may_change |= is_written


def _found_in(fn: Any) -> _Found:
    found = _Found()
    _walk(fn, found, "", 0)
    return found


def _walk(fn: Any, found: _Found, path: str, depth: int, owner: object = None) -> None:
    """Find what `fn`, a method of `owner` if that is given, reads (See Rule 1)."""
    if isinstance(fn, types.FunctionType):
        _function(fn, found, owner, path, depth)
    elif isinstance(fn, nn.Module):
        found.add_module(path or "module", fn, is_bound=True)
    elif isinstance(fn, functools.partial):
        partial = cast("functools.partial[Any]", fn)
        _walk(partial.func, found, path, depth)
        for key, value in (*enumerate(partial.args), *partial.keywords.items()):
            _value(f"{path}partial[{key}]", value, found, depth, is_argument=True)
    elif isinstance(fn, types.MethodType):
        _value(f"{path}self", fn.__self__, found, depth, is_argument=True)
        _walk(fn.__func__, found, path, depth, fn.__self__)
    elif not isinstance(fn, types.BuiltinFunctionType):
        called = _called_by(fn)
        if called is not None:
            _value(f"{path}self", fn, found, depth, is_argument=True)
            _function(called, found, fn, path, depth)


def _function(fn: types.FunctionType, found: _Found, owner: object, path: str, depth: int) -> None:
    reads = reads_of(fn.__code__)
    if fn.__closure__:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            _value(f"{path}{name}", value, found, depth, is_written=name in reads.written)
    if fn.__defaults__:
        for index, value in enumerate(fn.__defaults__):
            _value(f"{path}default[{index}]", value, found, depth, is_argument=True)
    if fn.__kwdefaults__:
        for name, value in fn.__kwdefaults__.items():
            _value(f"{path}{name}", value, found, depth, is_argument=True)
    has_reads = reads.reads or (owner is not None and reads.of_owner)
    if not has_reads or not _is_users(fn):
        return
    plain_values(fn, found.values, owner, path)
    for name in reads.global_names:
        value = fn.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            continue
        if isinstance(value, nn.Module):
            is_written = name in reads.written
            found.add_module(f"{path}{name}", value, is_bound=False, is_written=is_written)
        elif isinstance(value, Tensor):
            found.values.append((f"{path}{name}", value, None, False))
        elif isinstance(value, types.FunctionType) and depth < MAX_DEPTH and _is_users(value):
            _function(value, found, None, f"{path}{name}.", depth + 1)


def _value(
    path: str,
    value: Any,
    found: _Found,
    depth: int,
    *,
    is_argument: bool = False,
    is_written: bool = False,
) -> None:
    """Find what a value is, or holds; an argument is bound to a function of that depth."""
    if isinstance(value, nn.Module):
        is_bound = is_argument and depth == 0  # a variable may stand for another function later
        found.add_module(path, value, is_bound=is_bound, is_written=is_written)
    elif isinstance(value, Tensor) or (is_argument and isinstance(value, PLAIN)):
        found.values.append((path, value, None, False))
    elif depth >= MAX_DEPTH or isinstance(value, PLAIN):
        return
    elif isinstance(value, (tuple, list)):
        found.may_change = True
        entries = cast("tuple[Any, ...]", value)
        for index, entry in enumerate(entries[:MAX_ENTRIES]):
            _value(f"{path}[{index}]", entry, found, depth + 1)
    elif isinstance(value, dict):
        found.may_change = True
        mapping = cast("dict[Any, Any]", value)
        for key in list(mapping)[:MAX_ENTRIES]:
            _value(f"{path}[{key!r}]", mapping[key], found, depth + 1)
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        _walk(value, found, f"{path}.", depth + 1)
    elif type(value).__module__.partition(".")[0] not in _OTHERS:
        found.may_change = True
        for key, entry in list(getattr(value, "__dict__", {}).items())[:MAX_ENTRIES]:
            if isinstance(entry, (nn.Module, Tensor)):
                _value(f"{path}.{key}", entry, found, depth + 1)
        called = _called_by(value)
        if called is not None:
            _function(called, found, value, f"{path}.", depth + 1)


def _called_by(value: object) -> types.FunctionType | None:
    """Return the function that a call of `value` runs, if it is the user's."""
    called = getattr(cast("Any", type(value)), "__call__", None)  # noqa: B004 - its function
    return called if isinstance(called, types.FunctionType) and _is_users(called) else None


def _is_users(fn: types.FunctionType) -> bool:
    return (fn.__module__ or "").partition(".")[0] not in _OTHERS
