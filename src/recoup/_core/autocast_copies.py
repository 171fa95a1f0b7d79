"""Copies in another dtype, as autocast makes them: finds the view that was copied, to repeat it.

Only the nodes of the graph show the origin of a copy: it has a storage of its own, and torch may
have made the view and the copy unseen, within one operator. If this module does not know a node on
the way, the copy is kept, which costs its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recoup._core.memory_layout import Geometry, geometry_of
from recoup._core.saved_tensors import version_of

__all__ = ["Cast", "cast_of"]

_MOST_VIEWS = 8


class Cast(NamedTuple):
    """The recipe of a copy: the geometry of the source, and size, stride and dtype of the copy."""

    before: Geometry
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, made: Tensor) -> Tensor:
        """Make the copy again."""
        copy = made.new_empty_strided(self.size, self.stride, dtype=self.dtype)
        return copy.copy_(made.as_strided(*self.before))


def cast_of(tensor: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, Cast] | None:
    """Return the value of which `tensor` is a copy, or a view of one, and the recipe; or None."""
    copy = tensor if tensor._base is None else tensor._base
    node: Any = copy.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or version_of(copy):
        return None
    path: list[tuple[Any, int]] = []
    while node.next_functions and len(path) <= _MOST_VIEWS:
        node, nr = node.next_functions[0]
        if node is None:
            return None
        for value in values:  # the parts of a split share a node, and are different outputs of it
            if value.grad_fn is node and value.output_nr == nr and value.device == copy.device:
                view = _viewed(value.detach(), path, copy.shape)
                if view is None:
                    return None
                size, stride, _ = geometry_of(copy)
                return value, Cast(geometry_of(view), size, stride, copy.dtype)
        path.append((node, nr))
    return None


def _viewed(view: Tensor, path: list[tuple[Any, int]], shape: torch.Size) -> Tensor | None:
    """Return the view at the end of `path`, whose last node comes first; None if unknown."""
    for place in range(len(path) - 1, -1, -1):
        node, nr = path[place]
        if place == 0 and node.name() in ("ViewBackward0", "ReshapeAliasBackward0"):
            # A node does not record its output shape: only that of the last one is known.
            return view.view(shape)
        after = _step(view, node, nr)
        if after is None:
            return None
        view = after
    return view if view.shape == shape else None


def _step(view: Tensor, node: Any, nr: int) -> Tensor | None:
    match node.name():
        case "TBackward0":
            return view.t()
        case "TransposeBackward0":
            return view.transpose(_axis(node._saved_dim0), _axis(node._saved_dim1))
        case "PermuteBackward0":
            return view.permute(*map(_axis, node._saved_dims))
        case "UnsqueezeBackward0":
            return view.unsqueeze(_axis(node._saved_dim))
        case "SplitBackward0":
            return torch.split(view, node._saved_split_size, _axis(node._saved_dim))[nr]
        case "SplitWithSizesBackward0":
            return torch.split(view, [*node._saved_split_sizes], _axis(node._saved_dim))[nr]
        case _:
            return None


def _axis(saved: int) -> int:
    return saved if saved < 2**63 else saved - 2**64  # nodes store it unsigned
