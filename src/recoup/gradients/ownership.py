"""Ownership of gradients: copies of those that must not be changed in place."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["is_alone", "owned", "shared"]

_GRAPHS = "torch._inductor.cudagraph_trees"


def owned(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy if its memory is shared or is a piece of a larger one.

    A gradient from autograd may be the gradient of another tensor too, a tensor that the caller
    gave (or, if sparse, have its indices), one number expanded, a piece of the gradient of a
    concatenation, or a buffer that a reducer or a captured graph writes to again.

    Other references to the object `tensor` cannot be seen: the caller must hold the only one.
    """
    return tensor if is_alone(tensor) else tensor.clone()


def is_alone(tensor: Tensor) -> bool:
    """Whether `tensor` is the only tensor on its memory, and covers all of it."""
    if tensor.layout is torch.sparse_coo:
        # Each of these is a second view of the memory of the sparse tensor.
        return _is_alone(tensor._indices(), 1) and _is_alone(tensor._values(), 1)
    local = getattr(tensor, "_local_tensor", None)  # of a DTensor
    return _is_alone(tensor if local is None else local)


def shared(tensor: Tensor) -> Tensor:
    """Return another tensor with the memory of `tensor`, to which other code may hold references.

    If it does, `owned` sees that the memory is shared after the caller has dropped `tensor`. The
    memory of a sparse tensor would not show it, so a sparse tensor is copied.
    """
    return tensor.clone() if tensor.layout is torch.sparse_coo else tensor.detach()


def _is_alone(part: Tensor, num_others: int = 0) -> bool:
    """Whether only `part`, and as many known others, use its memory."""
    storage = part.untyped_storage()
    if part.numel() == 0:
        return storage.nbytes() == 0  # an empty part of FSDP2 is a piece of its buffer too
    num_uses = cast("Any", torch._C)._storage_Use_Count(storage._cdata)
    return (
        num_uses == 2 + num_others  # `part`, and the object `storage`
        and storage.nbytes() == part.numel() * part.element_size()
        # One number expanded may come from a buffer that is just as large.
        and (part.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(part))
        and not (part.is_cuda and _GRAPHS in sys.modules)
    )
