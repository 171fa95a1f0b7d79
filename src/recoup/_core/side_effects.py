"""What a first run leaves behind beside its result: buffers that it counts in, lists it appends to.

NOTE [ Counted once ]

Rule 1. A second run begins with what the first one found: each buffer that the first run changed,
        and each object with tensors (a cache) that it changed: lists, dicts and sets that are
        attributes of its modules, and what is in the closure of its function. It has a copy of
        them, so what it changes is not seen. Containers of numbers and strings are those of a log,
        which may want to know of each run.
Rule 2. A buffer is copied before the first operator that writes to it, under the mode of NOTE
        [ Decisions are kept ]. Objects are copied before the first run, as in NOTE [ The arguments
        of a second run ]; only containers and objects of the user that are not large.
Rule 3. Code is looked at in its first run in each mode, as in NOTE [ Checked once ]. If it changed
        none of this, it runs without from then on. A buffer that it then changes all the same is
        an error, once; an object is not noticed.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from recoup._core.guards import ModuleGuard
from recoup._core.operators import has_schema, traits_of
from recoup._core.pytree import tensors_in
from recoup._core.replaced_values import Location, Replacement
from recoup._core.saved_tensors import storage_address
from recoup._core.snapshots import Snapshot, is_copied

__all__ = ["CHANGES_NOTHING", "SideEffects"]

# Code that changed no object in its first run, by mode (training or not), as in `random_sources`.
CHANGES_NOTHING: tuple[set[weakref.ref[Any]], ...] = (set(), set())
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_MOST_VALUES = 1000
_OF_MODULES = frozenset(vars(nn.Module()))


class SideEffects:
    """The objects and buffers that the first run of a call changes, as they were before.

    Args:
        name: the name of the call in error messages.
        guard: the modules of the call.
        fn: its function, if it is one.
        has_objects: whether its code may change objects.
    """

    __slots__ = ("_buffers", "_copies", "_guard", "_snapshots")

    def __init__(self, name: str, guard: ModuleGuard, fn: object, *, has_objects: bool) -> None:
        self._guard = guard
        self._buffers: dict[int, list[int]] = {}  # places, by the address of the storage
        self._copies: dict[int, Tensor] = {}  # by place
        for place, buffer in enumerate(guard.buffers):
            self._buffers.setdefault(storage_address(buffer), []).append(place)
        self._snapshots: list[tuple[Location, Snapshot]] = []
        if has_objects:
            for location in (*_attributes(guard), *_in_closure(fn)):
                self._snapshots.append((location, Snapshot(location.get(), name)))

    @property
    def has_buffers(self) -> bool:
        """Whether there are buffers that an operator may write to."""
        return bool(self._buffers)

    def written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Copy the buffers that an operator is about to write to (See Rule 2)."""
        if not has_schema(func) or not traits_of(func).writes:
            return
        for key in traits_of(func).writes:
            value = kwargs.get(key) if isinstance(key, str) else args[key : key + 1]
            for tensor in tensors_in(value):
                for place in self._buffers.get(storage_address(tensor), ()):
                    if place not in self._copies:
                        self._copies[place] = self._guard.buffers[place].detach().clone()

    def first_run_ended(self) -> bool:
        """Drop what was not changed; return whether a buffer was."""
        has_counted = self._guard.count_once(self._copies)
        for _, snapshot in self._snapshots:
            snapshot.first_run_ended()
        self._snapshots = [
            (location, snapshot)
            for location, snapshot in self._snapshots
            if snapshot.has_changed and (snapshot.had_tensors or _holds_tensors(location.get()))
        ]
        return has_counted

    @property
    def changed_objects(self) -> bool:
        """Whether the first run changed an object, once it has ended."""
        return bool(self._snapshots)

    def to_replace(self) -> list[Replacement]:
        """Return the objects that a second run begins with (See Rule 1)."""
        return [(location, snapshot.for_a_run()) for location, snapshot in self._snapshots]


def _attributes(guard: ModuleGuard) -> Iterator[Location]:
    """Yield the locations of containers that are attributes of modules."""
    for module in guard.modules_with_attributes():
        own = vars(module)
        for key, value in own.items():
            if type(value) in _CONTAINERS and key not in _OF_MODULES and _is_small(value):
                yield Location(own, key)


def _in_closure(fn: object) -> Iterator[Location]:
    """Yield the closure cells of a function that hold objects which it may change."""
    fn = getattr(fn, "__func__", fn)
    for cell in (isinstance(fn, types.FunctionType) and fn.__closure__) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if is_copied(value) and _is_small(value):
            yield Location(cell, None)


def _is_small(value: Any) -> bool:
    """Whether a value holds few others, so that a copy of it takes microseconds."""
    return len(_values_in(value)) <= _MOST_VALUES


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(each, Tensor) for each in _values_in(value))


def _values_in(value: Any) -> list[Any]:
    """Return what a value holds, at any depth; not all of it if that is much."""
    found: list[Any] = [value]
    for each in found:
        if isinstance(each, dict):
            found += cast("dict[Any, Any]", each).values()
        elif isinstance(each, (list, tuple, set, deque)):
            found += cast("Sequence[Any]", each)
        if is_copied(cast("Any", each)):
            found += getattr(cast("Any", each), "__dict__", {}).values()
        if len(found) > _MOST_VALUES:
            break
    return found
