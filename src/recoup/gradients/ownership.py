"""Whether a gradient is ours to change in place, and a copy of it where it is not."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["is_alone", "owned", "shared"]

_GRAPHS = "torch._inductor.cudagraph_trees"


def owned(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy if others see its memory or it is a piece of something larger.

    What autograd delivers may be the gradient of another tensor too, a tensor that the caller gave
    (or its indices, of a sparse one), one number expanded, a piece of the gradient of a
    concatenation, or a buffer that a reducer or a captured graph writes to again.

    Who else holds `tensor` itself cannot be seen: the caller must be the only one.
    """
    return tensor if is_alone(tensor) else tensor.clone()


def is_alone(tensor: Tensor) -> bool:
    """Whether `tensor` is all that looks at its memory, and looks at all of it."""
    if tensor.layout is torch.sparse_coo:
        # Each of these is a second view of the memory of the sparse tensor.
        return _is_alone(tensor._indices(), 1) and _is_alone(tensor._values(), 1)
    local = getattr(tensor, "_local_tensor", None)  # of a DTensor
    return _is_alone(tensor if local is None else local)


def shared(tensor: Tensor) -> Tensor:
    """Return another tensor with the memory of `tensor`, which somebody else may hold.

    `owned` sees them, once `tensor` is let go. They would not show in the memory of a sparse one,
    which is copied.
    """
    return tensor.clone() if tensor.layout is torch.sparse_coo else tensor.detach()


def _is_alone(part: Tensor, num_others: int = 0) -> bool:
    """Whether nothing but `part`, and so many others that are known, looks at its memory."""
    storage = part.untyped_storage()
    if part.numel() == 0:
        return storage.nbytes() == 0  # what FSDP2 has none of is a piece of its buffer too
    num_uses = cast("Any", torch._C)._storage_Use_Count(storage._cdata)
    return (
        num_uses == 2 + num_others  # `part`, and the object `storage`
        and storage.nbytes() == part.numel() * part.element_size()
        # One number expanded may have been taken out of a buffer that is just as large.
        and (part.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(part))
        and not (part.is_cuda and _GRAPHS in sys.modules)
    )
