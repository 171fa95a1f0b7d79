"""The treatment of a saved tensor by hooks of other libraries, inferred from their result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import Tensor

from recoup._core.listening import Way
from recoup._core.saved_tensors import Pair
from recoup._core.storage_ids import parts_of, storage_id

__all__ = ["way_beneath"]

_DEEPEST = 3


def way_beneath(tensor: Tensor, packed: Any, pair: Pair) -> tuple[Way, list[Tensor]]:
    """Return the way in which hooks of other libraries treat `tensor`, and the tensors that count.

    A tensor that a checkpoint replaced is recomputed. One that was moved to another device, to
    pinned memory, into a copy of the same shape and type, or to a place that cannot be inspected is
    offloaded. Any other is kept.

    Args:
        tensor: the saved tensor.
        packed: the result of the pack hook.
        pair: the hooks.
    """
    held = list(_tensors(packed))
    own = {storage_id(part) for part in parts_of(tensor)}
    if any(storage_id(part) in own for value in held for part in parts_of(value)):
        return "keep", [tensor]
    if "checkpoint" in getattr(pair[0], "__module__", ""):
        return "recompute", [tensor]
    for value in held:
        is_copy = value.dtype is tensor.dtype and value.shape == tensor.shape
        if value.device != tensor.device or is_copy or value.is_pinned():
            return "offload", [tensor]
    return ("keep", held) if held else ("offload", [tensor])


def _tensors(packed: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors within the result of a hook."""
    if isinstance(packed, Tensor):
        yield packed
    elif depth < _DEEPEST:
        for item in _items(packed):
            yield from _tensors(item, depth + 1)


def _items(packed: Any) -> Iterable[Any]:
    if isinstance(packed, tuple | list):
        return cast("Iterable[Any]", packed)
    if isinstance(packed, dict):
        return cast("dict[Any, Any]", packed).values()
    kind: type[object] = type(cast("object", packed))
    names: Iterable[str] = getattr(packed, "__dict__", getattr(kind, "__slots__", ()))
    return [getattr(packed, name, None) for name in names]
