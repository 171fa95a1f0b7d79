"""Detection of batches that are larger than the one that a plan was made for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from recoup._core.pytree import flatten
from recoup.memory import format_bytes

__all__ = ["Sizes"]


class Sizes:
    """The bytes of the arguments that a plan was made with, argument by argument.

    Args:
        args: the arguments.
        kwargs: the keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._planned = _bytes_of(args, kwargs)
        self._has_warned = False

    def look_at(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Warn once if the arguments are larger than those that the plan was made with."""
        if self._has_warned:
            return
        now = _bytes_of(args, kwargs)
        shared = now.keys() & self._planned.keys()
        found, planned = (sum(sizes[key] for key in shared) for sizes in (now, self._planned))
        if found > planned > 0:
            self._has_warned = True
            warnings.warn(
                f"A planned {name} was given {format_bytes(found)} of arguments, "
                f"{found / planned:.3g} times as much as the plan was made for "
                f"({format_bytes(planned)}). Gradients are right, but this step may take more than "
                "the budget. Make the plan with the largest batch.",
                stacklevel=5,
            )


def _bytes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, int]:
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {key: sum(tensor.nbytes for tensor in flatten(value)[0]) for key, value in given}
