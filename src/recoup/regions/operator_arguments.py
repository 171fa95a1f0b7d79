"""Nested arguments and results of operators: finding and mapping the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from torch import Tensor

__all__ = ["mapped", "tensors_in"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or a result of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in cast("Iterable[Any]", value):
            yield from tensors_in(item)


def mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return nested arguments with `change` applied to each instance of `kind` in them."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is tuple:
        return tuple(mapped(item, kind, change) for item in cast("tuple[Any, ...]", value))
    if type(value) is list:
        return [mapped(item, kind, change) for item in cast("list[Any]", value)]
    if type(value) is dict:
        entries = cast("dict[str, Any]", value)
        return {key: mapped(item, kind, change) for key, item in entries.items()}
    return value
