"""What a function reads beside its arguments.

NOTE [ What can be seen ]

Rule 1. Followed are closure cells, defaults, `functools.partial`, the owner of a method, the
        globals that a function reads, functions among these, the attributes of plain objects,
        and tuples, lists and dicts of a few entries. Modules and tensors found so are compared
        before a second run.
Rule 2. Numbers and strings are compared in cells and defaults only, and not where the function
        itself writes them (a counter). A loop variable that has moved on is caught by this.
Rule 3. What is read otherwise (deeper than a few levels, files, devices) is not seen.
Rule 4. A tensor with a history is held weakly: it would hold the graph that holds the region.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn

from recoup.errors import ChangedError
from recoup.residuals.hooks import version_of

__all__ = ["Held"]

_MOST_ENTRIES = 64
_DEEPEST = 4
_PLAIN = (bool, int, float, complex, str, bytes)
_OTHERS = frozenset(("builtins", "torch", "numpy", "functools", "types", "collections"))
_known: weakref.WeakKeyDictionary[types.CodeType, tuple[frozenset[str], frozenset[str]]] = (
    weakref.WeakKeyDictionary()
)


class Held:
    """The modules, tensors and plain values that `fn` holds, as they are now."""

    __slots__ = ("_fn", "_items", "modules")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self._items: list[tuple[str, Any, int]] = []
        modules: list[nn.Module] = []
        for path, value in _walk(fn, "", 0):
            if isinstance(value, nn.Module):
                if all(value is not module for module in modules):
                    modules.append(value)
            elif isinstance(value, Tensor):
                kept = value if value.grad_fn is None else weakref.ref(value)  # See Rule 4
                self._items.append((path, kept, version_of(value)))
            else:
                self._items.append((path, value, 0))
        self.modules = tuple(modules)

    def first_run_ended(self) -> None:
        """Take the versions and values that the first run left."""
        if self._items:
            self._items = Held(self._fn)._items

    def check(self, name: str) -> None:
        """Raise if anything is not as it was (See Rules 1 and 2)."""
        if not self._items:
            return
        now = dict(_walk(self._fn, "", 0))
        for path, kept, version in self._items:
            value = cast("Any", kept() if isinstance(kept, weakref.ref) else kept)
            found = now.get(path)
            is_tensor = isinstance(value, Tensor)
            same = found is value or (not is_tensor and found == value)
            if not same or (is_tensor and version_of(value) != version):
                how = "changed in place" if same else "given another value"
                raise ChangedError(
                    f"`{path}`, which {name} reads, was {how} between forward and backward, so "
                    "running it again would compute something else. Pass it as an argument, or "
                    "change it after backward."
                )


def _walk(fn: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(fn, nn.Module):
        yield path or "module", fn
    elif isinstance(fn, functools.partial):
        partial = cast("functools.partial[Any]", fn)
        yield from _walk(partial.func, path, depth)
        for key, value in (*enumerate(partial.args), *partial.keywords.items()):
            yield from _values(f"{path}partial[{key}]", value, depth, is_cell=True)
    elif isinstance(fn, types.MethodType):
        yield from _values("self", fn.__self__, depth, is_cell=False)
        yield from _walk(fn.__func__, path, depth)
    elif isinstance(fn, types.FunctionType):
        yield from _function(fn, path, depth)


def _function(fn: types.FunctionType, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    code = fn.__code__
    if not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__ or _global_names(code)):
        return
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        is_cell = name not in _written(code)
        yield from _values(f"{path}{name}", value, depth, is_cell=is_cell)
    for index, value in enumerate(fn.__defaults__ or ()):
        yield from _values(f"{path}default[{index}]", value, depth, is_cell=True)
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield from _values(f"{path}{name}", value, depth, is_cell=True)
    for name in _global_names(code):
        value = fn.__globals__.get(name)
        if isinstance(value, (nn.Module, Tensor)):
            yield f"{path}{name}", value
        elif isinstance(value, types.FunctionType) and depth < _DEEPEST and _is_users(value):
            yield from _function(value, f"{path}{name}.", depth + 1)


def _values(path: str, value: Any, depth: int, *, is_cell: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (nn.Module, Tensor)) or (is_cell and isinstance(value, _PLAIN)):
        yield path, value
    elif depth >= _DEEPEST:
        return
    elif isinstance(value, (tuple, list)):
        entries = cast("tuple[Any, ...]", value)
        for index, entry in enumerate(entries[:_MOST_ENTRIES]):
            yield from _values(f"{path}[{index}]", entry, depth + 1, is_cell=False)
    elif isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        for key in list(mapping)[:_MOST_ENTRIES]:
            yield from _values(f"{path}[{key!r}]", mapping[key], depth + 1, is_cell=False)
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        yield from _walk(value, f"{path}.", depth + 1)
    elif type(value).__module__.partition(".")[0] not in _OTHERS:
        for key, entry in list(getattr(value, "__dict__", {}).items())[:_MOST_ENTRIES]:
            if isinstance(entry, (nn.Module, Tensor)):
                yield f"{path}.{key}", entry


def _is_users(fn: types.FunctionType) -> bool:
    return fn.__module__.partition(".")[0] not in _OTHERS


def _written(code: types.CodeType) -> frozenset[str]:
    """Return the closure variables that `code` itself writes."""
    return _names(code)[0]


def _global_names(code: types.CodeType) -> frozenset[str]:
    """Return the globals that `code` reads; `co_names` has attributes among them."""
    return _names(code)[1]


def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    found = _known.get(code)
    if found is None:
        instructions = list(dis.get_instructions(code))
        found = _known[code] = (
            frozenset(i.argval for i in instructions if i.opname == "STORE_DEREF"),
            frozenset(i.argval for i in instructions if i.opname == "LOAD_GLOBAL"),
        )
    return found
