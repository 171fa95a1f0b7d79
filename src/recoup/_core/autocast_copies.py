"""Copies in another dtype, as autocast makes them: finds the view that was copied, to repeat it.

Only the nodes of the graph show the origin of a copy: it has a storage of its own, and torch may
have made the view and the copy unseen, within one operator. If this module does not know a node on
the way, the copy is kept, which costs its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from recoup._core.saved_tensors import version_of
from recoup._core.tensors import Geometry, Strides, geometry_of

Cast = Callable[[Tensor], Tensor]  # makes the copy again of the value
T = TypeVar("T", bound=Tensor)
_MOST_VIEWS = 8
_RESHAPES = ("ViewBackward0", "ReshapeAliasBackward0")  # they do not record the shape of the view


def cast_of(tensor: Tensor, values: Sequence[T]) -> tuple[T, Cast] | None:
    """Return the value of which `tensor` is a copy, or a view of one, and how to cast it; or None.

    Args:
        tensor: a tensor that autograd saves.
        values: the tensors of which it may be a copy.
    """
    copy = tensor if tensor._base is None else tensor._base
    node: Any = copy.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or version_of(copy):
        return None
    path: list[tuple[Any, int]] = []
    while node.next_functions and len(path) <= _MOST_VIEWS:
        node, nr = node.next_functions[0]
        for value in values:  # the parts of a split share a node, and are different outputs of it
            if value.grad_fn is node and value.output_nr == nr and value.device == copy.device:
                view = _viewed(value.detach(), path, copy.shape)
                if view is None:
                    return None
                size, stride, _ = geometry_of(copy)
                return value, partial(_cast, geometry_of(view), size, stride, copy.dtype)
        if node is None:
            return None
        path.append((node, nr))
    return None


def _cast(
    before: Geometry, size: Strides, stride: Strides, dtype: torch.dtype, made: Tensor
) -> Tensor:
    copy = made.new_empty_strided(size, stride, dtype=dtype)
    return copy.copy_(made.as_strided(*before))


def _viewed(view: Tensor, path: list[tuple[Any, int]], shape: torch.Size) -> Tensor | None:
    """Return the view at the end of `path`, whose last node comes first; None if unknown."""
    for num_left, (node, nr) in zip(reversed(range(len(path))), reversed(path), strict=True):
        if num_left == 0 and node.name() in _RESHAPES:
            return view.view(shape)
        if node.name() not in _STEPS:
            return None
        view = _STEPS[node.name()](view, node, nr)
    return view if view.shape == shape else None


def _axis(saved: int) -> int:
    return saved if saved < 2**63 else saved - 2**64  # nodes store it unsigned


_STEPS: dict[str, Callable[[Tensor, Any, int], Tensor]] = {
    "TBackward0": lambda view, _, __: view.t(),
    "TransposeBackward0": lambda view, node, _: view.transpose(
        _axis(node._saved_dim0), _axis(node._saved_dim1)
    ),
    "PermuteBackward0": lambda view, node, _: view.permute(*map(_axis, node._saved_dims)),
    "UnsqueezeBackward0": lambda view, node, _: view.unsqueeze(_axis(node._saved_dim)),
    "SplitBackward0": lambda view, node, nr: torch.split(
        view, node._saved_split_size, _axis(node._saved_dim)
    )[nr],
    "SplitWithSizesBackward0": lambda view, node, nr: torch.split(
        view, [*node._saved_split_sizes], _axis(node._saved_dim)
    )[nr],
}
