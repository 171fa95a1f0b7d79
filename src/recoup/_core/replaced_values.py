"""Values that are put in place of others while a call runs again."""

from __future__ import annotations

import threading
from types import CellType
from typing import Any, NamedTuple, cast

from recoup._core.restoring import Restoring

__all__ = ["LOCK", "Location", "Replaced", "Replacement"]

_MISSING = object()
LOCK = threading.RLock()  # held while values are replaced: threads may share a module


class Location(NamedTuple):
    """The location of a value (its container and key), to read it or put it back."""

    owner: Any  # a closure cell, a dict, a list, or an object with attributes
    key: Any

    def get(self) -> Any:
        """Return the value at this location."""
        if isinstance(self.owner, CellType):
            return self.owner.cell_contents
        if isinstance(self.owner, dict):
            return cast("dict[Any, Any]", self.owner).get(self.key, _MISSING)
        if isinstance(self.owner, list):
            return cast("list[Any]", self.owner)[self.key]
        return getattr(self.owner, self.key)

    def put(self, value: Any) -> None:
        """Put `value` at this location."""
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, (dict, list)):
            if value is _MISSING:
                cast("Any", self.owner).pop(self.key, None)
            else:
                cast("Any", self.owner)[self.key] = value
        else:
            setattr(self.owner, self.key, value)


Replacement = tuple[Location, Any]


class Replaced(Restoring):
    """A context in which locations have other values; it puts back those that they had.

    The caller holds `LOCK` around it.
    """

    __slots__ = ("_before", "_values")

    def __init__(self, values: list[Replacement]) -> None:
        self._values = values
        self._before: list[Replacement] = []

    def __enter__(self) -> None:
        self._before = [(location, location.get()) for location, _ in self._values]
        for location, value in self._values:
            location.put(value)

    def restore(self) -> None:
        # In reverse, since a norm that is met twice is there twice.
        for location, value in reversed(self._before):
            location.put(value)
        self._before = []
