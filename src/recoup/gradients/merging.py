"""Adding one gradient to another, whatever their layouts.

NOTE [ Owned gradients ]

Rule 1. A gradient in a store belongs to it alone, so sums are made in place. A tensor from
        elsewhere is adopted only if no other tensor uses its memory (`ownership`).
Rule 2. A gradient with a graph (`create_graph`) is never changed in place: the graph needs it.
Rule 3. Sums of sparse gradients list entries twice, and grow with each. They are coalesced when
        they list more than half as many entries as there are rows. They stay sparse, however
        many rows they cover: SparseAdam takes no others, and the layout must not depend on data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recoup.gradients.ownership import owned

__all__ = ["as_dense", "check_fits", "coalesced", "is_sharded", "merged", "scaled"]


def check_fits(gradient: Tensor, target: Tensor, name: str) -> None:
    """Raise if `gradient` cannot be a gradient of `target`."""
    if gradient.shape != target.shape:
        raise ValueError(
            f"The gradient of {name} has shape {tuple(gradient.shape)}, and {name} has "
            f"{tuple(target.shape)}. Give one of the same shape."
        )
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(
            f"The gradient of {name} has the layout {gradient.layout}, which cannot be summed in "
            "place. Give a dense one, or a sparse one in COO layout."
        )
    if is_sharded(gradient) != is_sharded(target):
        raise ValueError(
            f"The gradient of {name} is {_kind(gradient)} and {name} is {_kind(target)}. A mixture "
            "would drop a sum over the processes in silence: give both as they are in the model."
        )
    if _placements(gradient) != _placements(target):
        raise ValueError(
            f"The gradient of {name} is placed as {_placements(gradient)} and {name} as "
            f"{_placements(target)}. Redistribute it first."
        )
    if gradient.is_complex() and not target.is_complex():
        raise ValueError(f"The gradient of {name} is complex, and {name} is real. Give a real one.")


def merged(into: Tensor | None, gradient: Tensor, alpha: float = 1.0) -> Tensor:
    """Return ``into + alpha * gradient``, in place where possible (See Rules 1 and 2).

    Args:
        into: an owned gradient, or None for zero.
        gradient: an owned gradient if `into` is None or sparse; it may be changed, then.
        alpha: a factor.
    """
    if into is None:
        return gradient if alpha == 1 else scaled(gradient, alpha)
    if into.requires_grad or gradient.requires_grad:
        if into.is_sparse and not gradient.is_sparse:  # torch adds the sparse one to the dense one
            return torch.add(gradient if alpha == 1 else gradient * alpha, into)
        return torch.add(into, gradient, alpha=alpha)
    if not into.is_sparse:
        return into.add_(gradient, alpha=alpha)
    if not gradient.is_sparse:
        return scaled(gradient, alpha).add_(into)
    return _tidied(torch.add(into, gradient, alpha=alpha))


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
    """Return a sparse gradient with each entry listed once, in no more memory than that takes."""
    return owned(gradient.coalesce())  # torch's result is a piece of the larger memory


def _tidied(gradient: Tensor) -> Tensor:
    """Coalesce a sparse gradient if it has grown (See Rule 3)."""
    num_rows = 1
    for size in gradient.shape[: gradient.sparse_dim()]:
        num_rows *= size
    return coalesced(gradient) if gradient._nnz() > num_rows / 2 else gradient


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor, one part of which is in this process."""
    return hasattr(tensor, "placements")


def _placements(tensor: Tensor) -> object:
    return getattr(tensor, "placements", None)


def _kind(tensor: Tensor) -> str:
    return "a DTensor" if is_sharded(tensor) else "a plain tensor"
