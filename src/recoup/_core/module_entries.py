"""Values in the dictionaries of modules, in parallel lists, which `map` compares without Python.

A region looks at every parameter, buffer and child of its modules at least twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from recoup._core.saved_tensors import storage_address, version_of

__all__ = ["Entries", "TensorEntries"]

_PLAIN = frozenset((nn.Parameter, Tensor))
_version: Callable[[Tensor], int] = attrgetter("_version")
_get: Any = getattr(dict, "get")  # noqa: B009 - its type is not known


class Entries:
    """Values in dictionaries of modules, in parallel lists: map compares them without Python."""

    __slots__ = ("keys", "owners", "values")

    def __init__(self) -> None:
        self.owners: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.values: list[Any] = []

    def add(self, owner: dict[str, Any]) -> None:
        """Add all values of a dictionary that are not None."""
        for key, value in owner.items():
            if value is not None:
                self.owners.append(owner)
                self.keys.append(key)
                self.values.append(value)

    def are_there(self) -> bool:
        """Whether each value is where it was found."""
        found: Any = map(_get, self.owners, self.keys)
        return all(map(operator.is_, found, self.values))

    def where(self, has: Callable[[int], bool]) -> int | None:
        """Return the place of the first value for which that holds."""
        return next(filter(has, range(len(self.values))), None)

    def is_there(self, place: int) -> bool:
        """Whether one value is where it was found."""
        return self.owners[place].get(self.keys[place]) is self.values[place]

    def drop_missing(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Drop the values that are no longer where they were found, and return them."""
        all_of = list(zip(self.owners, self.keys, self.values, strict=True))
        left = [place for place in range(len(self.values)) if self.is_there(place)]
        self.keep_only(left)
        return [each for place, each in enumerate(all_of) if place not in set(left)]

    def keep_only(self, places: list[int]) -> None:
        """Drop the values at all other places."""
        self.owners = [self.owners[place] for place in places]
        self.keys = [self.keys[place] for place in places]
        self.values = [self.values[place] for place in places]


class TensorEntries(Entries):
    """Tensors in dictionaries of modules, with marks that differ after a change.

    A change is one in place, or of the memory (``.data``).
    """

    __slots__ = ("marks",)

    def __init__(self) -> None:
        super().__init__()
        self.marks: tuple[list[int], list[int]] = ([], [])

    def marks_now(self) -> tuple[list[int], list[int]]:
        """Return the versions and the addresses."""
        tensors = self.values
        if _PLAIN.issuperset(map(type, tensors)):
            try:
                return list(map(_version, tensors)), list(map(Tensor.data_ptr, tensors))
            except RuntimeError:  # an inference tensor has no version, a sparse one no address
                pass
        addresses = [storage_address(each) if type(each) in _PLAIN else 0 for each in tensors]
        return list(map(version_of, tensors)), addresses

    def changed(self) -> int | None:
        """Return the place of the first tensor that was replaced, or else of one changed."""
        replaced = self.where(lambda place: not self.is_there(place))
        if replaced is not None:
            return replaced
        versions, addresses = self.marks_now()
        before = self.marks
        return self.where(
            lambda at: versions[at] != before[0][at] or addresses[at] != before[1][at]
        )
