"""Gradients as tensors: what fits a target, who owns its memory, and how layouts are summed.

NOTE [ Owned gradients ]

Rule 1. A gradient in a store belongs to it alone, so sums are made in place. Memory changes hands:
        what autograd left in `.grad`, what another store gives up and what a caller hands over is
        adopted, unless it is a piece of something larger. Everything else is copied.
Rule 2. A gradient with a graph (`create_graph`) is never changed in place: the graph needs it.
Rule 3. Sums of sparse gradients list entries twice, and grow with each. They are coalesced when
        they list more than half as many entries as there are rows. They stay sparse, however
        many rows they cover: SparseAdam takes no others, and the layout must not depend on data.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn

from recoup.gradients.targets import described

__all__ = ["as_dense", "check_fits", "coalesced", "is_sharded", "owned", "scaled", "total"]

_LAYOUTS = (torch.strided, torch.sparse_coo)
_PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"


def check_fits(gradient: Tensor, target: Tensor) -> None:
    """Raise if `gradient` cannot be a gradient of `target`."""
    if gradient.shape != target.shape:
        name = described(target)
        raise ValueError(
            f"The gradient of {name} has shape {tuple(gradient.shape)}, and {name} has "
            f"{tuple(target.shape)}. Give one of the same shape."
        )
    if gradient.layout not in _LAYOUTS:
        raise ValueError(
            f"The gradient of {described(target)} has the layout {gradient.layout}, which cannot "
            "be summed in place. Give a dense one, or a sparse one in COO layout."
        )
    if gradient.is_meta and not target.is_meta:
        raise ValueError(
            f"The gradient of {described(target)} is on the meta device, where it has no values. "
            f"Give one on {target.device}."
        )
    if not gradient.is_floating_point() and not (gradient.is_complex() and target.is_complex()):
        kind = "complex" if gradient.is_complex() else f"of type {gradient.dtype}"
        name = described(target)
        raise ValueError(
            f"The gradient of {name} is {kind}, and {name} is of type {target.dtype}. Give a real "
            "one of a floating-point type."
        )
    if type(gradient) not in _PLAIN or type(target) not in _PLAIN:
        _check_placements(gradient, target)


def _check_placements(gradient: Tensor, target: Tensor) -> None:
    name, kinds = described(target), ("a plain tensor", "a DTensor")
    if is_sharded(gradient) != is_sharded(target):
        raise ValueError(
            f"The gradient of {name} is {kinds[is_sharded(gradient)]} and {name} is "
            f"{kinds[is_sharded(target)]}. A mixture would drop a sum over the processes in "
            "silence: give both as they are in the model."
        )
    placements = [getattr(each, "placements", None) for each in (gradient, target)]
    if placements[0] != placements[1]:
        raise ValueError(
            f"The gradient of {name} is placed as {placements[0]} and {name} as {placements[1]}. "
            "Redistribute it first."
        )


def is_sharded(*tensors: Tensor) -> bool:
    """Whether one of the tensors is a DTensor, one part of which is in this process."""
    return any(hasattr(each, "placements") for each in tensors if type(each) not in _PLAIN)


# -- sums ------------------------------------------------------------------------------------------


def total(into: Tensor | None, gradient: Tensor, alpha: float) -> Tensor:
    """Return ``into + alpha * gradient``, in place where possible (See Rules 1 and 2).

    Args:
        into: an owned gradient, or None for zero.
        gradient: an owned gradient if `into` is None or sparse; it may be changed, then.
        alpha: a factor.
    """
    if into is None:
        return gradient if alpha == 1 else scaled(gradient, alpha)
    has_graph = into.requires_grad or gradient.requires_grad
    if into.is_sparse and not gradient.is_sparse:  # torch adds the sparse one to the dense one
        gradient = total(None, gradient, alpha)
        return torch.add(gradient, into) if has_graph else gradient.add_(into)
    if has_graph:
        return torch.add(into, gradient, alpha=alpha)
    if not into.is_sparse:
        return into.add_(gradient, alpha=alpha)
    both = torch.add(into, gradient, alpha=alpha)
    num_rows = math.prod(both.shape[: both.sparse_dim()])
    return coalesced(both) if both._nnz() > num_rows / 2 else both  # See Rule 3


def scaled(gradient: Tensor, factor: float | Tensor) -> Tensor:
    """Return an owned gradient times a number, in place where possible."""
    if gradient.requires_grad:
        return gradient * factor
    values = gradient._values() if gradient.is_sparse else gradient
    values.mul_(factor.to(values.device) if isinstance(factor, Tensor) else factor)
    return gradient


def as_dense(gradient: Tensor) -> Tensor:
    """Return a dense gradient."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def coalesced(gradient: Tensor) -> Tensor:
    """Return a gradient with each entry listed once, in no more memory than that takes."""
    # torch's result is a piece of the larger memory.
    return owned(gradient.coalesce()) if gradient.is_sparse else gradient


# -- ownership -------------------------------------------------------------------------------------


def owned(tensor: Tensor) -> Tensor:
    """Return `tensor`, which was handed over, or a copy if it does not fill memory of its own.

    It does not if it is one number expanded, a piece of the gradient of a concatenation, or a
    buffer that a captured graph writes to again.
    """
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    for part in (local._indices(), local._values()) if local.is_sparse else (local,):
        storage = part.untyped_storage()
        fills = storage.nbytes() == part.nbytes and (
            part.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(part)
        )
        if not fills or (part.is_cuda and _CUDA_GRAPHS in sys.modules):
            return tensor.clone()
    return tensor
