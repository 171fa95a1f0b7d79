"""Gradients as tensors of any layout, type and device: what fits, who owns memory, sums and norms.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from recoup._core.saved_tensors import grad_mode

_PLAIN: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"


def described(tensor: object) -> str:
    """Return the description of a tensor without a name in errors."""
    is_tensor = isinstance(tensor, Tensor)
    return f"a tensor of shape {(*tensor.shape,)}" if is_tensor else f"a {type(tensor).__name__}"


def check_fits(gradient: Tensor, target: Tensor) -> None:
    """Raise if `gradient` cannot be a gradient of `target`."""
    got = way_out = ""
    if gradient.shape != target.shape:
        got, way_out = f"has shape {tuple(gradient.shape)}", "of the same shape"
    elif gradient.layout not in (torch.strided, torch.sparse_coo):
        got = f"has the layout {gradient.layout}, which cannot be summed in place"
        way_out = "that is dense, or sparse in COO layout"
    elif gradient.is_meta and not target.is_meta:
        got, way_out = "is on the meta device, without values", f"on {target.device}"
    elif gradient.is_complex() and not target.is_complex():
        got, way_out = "is complex, and the tensor real", "that is real"
    elif not (gradient.is_floating_point() or gradient.is_complex()):
        got, way_out = f"has the type {gradient.dtype}", "of a floating-point type"
    elif type(gradient) not in _PLAIN or type(target) not in _PLAIN:
        kinds = ["a DTensor" if is_sharded(e) else "a plain tensor" for e in (gradient, target)]
        places = [getattr(each, "placements", None) for each in (gradient, target)]
        if places[0] != places[1]:  # a mixture would drop a sum over the processes in silence
            got = f"is {kinds[0]} placed as {places[0]}"
            way_out = f"that is {kinds[1]} placed as {places[1]}, like the tensor"
    if got:
        of = described(target)
        raise ValueError(f"`grad`, the gradient of `param` ({of}), {got}. Give one {way_out}.")


def is_sharded(*tensors: Tensor) -> bool:
    """Whether one of the tensors is a DTensor, one part of which is in this process."""
    return any(hasattr(each, "placements") for each in tensors if type(each) not in _PLAIN)


def are_several_processes() -> bool:
    """Whether a plain backward may reduce gradients over several processes."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


# -- sums ------------------------------------------------------------------------------------------


def total(into: Tensor, gradient: Tensor, alpha: float) -> Tensor:
    """Return ``into + alpha * gradient``, in place where possible (See Rules 1 and 2).

    `into` is owned. Where it is sparse, `gradient` is owned, too, and may be changed.
    """
    if into.requires_grad or gradient.requires_grad:
        with grad_mode(True):  # a backward that has no graph itself turns it off
            if into.is_sparse and not gradient.is_sparse:
                return torch.add(gradient * alpha, into)  # torch adds a sparse one to a dense one
            return torch.add(into, gradient, alpha=alpha)
    if into.is_sparse and not gradient.is_sparse:
        return scaled(gradient, alpha).add_(into)
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


def owned(tensor: Tensor) -> Tensor:
    """Return `tensor`, which was handed over, or a copy if it does not fill memory of its own.

    One number that is expanded, a piece of a larger gradient, and a buffer of a captured graph do
    not.
    """
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    for part in (local._indices(), local._values()) if local.is_sparse else (local,):
        is_dense = part.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(part)
        is_whole = is_dense and part.untyped_storage().nbytes() == part.nbytes
        if not is_whole or (part.is_cuda and _CUDA_GRAPHS in sys.modules):
            return tensor.clone()
    return tensor


# -- numbers ---------------------------------------------------------------------------------------


def norm(gradients: Iterable[Tensor], order: float) -> Tensor:
    """Return the norm of all entries of dense and coalesced gradients; without any it is zero."""
    plain: list[Tensor] = []
    sharded: list[Tensor] = []
    for gradient in gradients:
        value = _values(gradient)
        if math.isinf(order):
            if value.numel() == 0:
                continue  # the largest of no entries is undefined
            if is_sharded(value):  # torch raises in a process without entries, and others wait
                value = _whole(value).abs().max()
        (sharded if is_sharded(value) else plain).append(value)
    totals = [_whole(_total_norm(values, order)) for values in (plain, sharded) if values]
    if not totals:
        return torch.zeros(())
    return totals[0] if len(totals) == 1 else _total_norm(totals, order)


def _total_norm(values: list[Tensor], order: float) -> Tensor:
    if not any(value.requires_grad for value in values):
        return get_total_norm(values, norm_type=order)
    # `get_total_norm` builds no graph.
    norms: list[Tensor] = [_vector_norm(value, order) for value in values]
    return _vector_norm(torch.stack(_on_one_device(norms)), order)


def _vector_norm(value: Tensor, order: float) -> Tensor:
    return cast("Any", torch.linalg).vector_norm(value, order)


def dot(ones: Mapping[Tensor, Tensor], others: Mapping[Tensor, Tensor]) -> Tensor:
    """Return the sum of products of all entries; for complex ones, its real part."""
    found = [_dot(one, others[target]) for target, one in ones.items() if target in others]
    return torch.stack(_on_one_device(found)).sum() if found else torch.zeros(())


def _dot(one: Tensor, other: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    one, other = one.to(dtype), other.to(device=one.device, dtype=dtype)
    if one.is_sparse or other.is_sparse:
        product = one.conj() * other if one.is_sparse else other * one.conj()
        total = _values(product.coalesce()).sum()
    elif is_sharded(one):
        total = _whole((one.conj() * other).sum())
    else:
        total = torch.vdot(one.flatten(), other.flatten())
    return total.real if total.is_complex() else total


def are_finite(gradients: Iterable[Tensor]) -> Tensor:
    """Return whether all entries are finite, as a tensor, so that nothing waits for the device."""
    found = [_whole(_values(gradient).isfinite().all()) for gradient in gradients]
    return torch.stack(_on_one_device(found)).all() if found else torch.tensor(True)


def _on_one_device(numbers: Sequence[Tensor]) -> list[Tensor]:
    return [number.to(numbers[0].device) for number in numbers]


def _whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, and any other tensor itself."""
    return cast("Any", tensor).full_tensor() if is_sharded(tensor) else tensor


def _values(gradient: Tensor) -> Tensor:
    if not gradient.is_sparse:
        return gradient
    # `_values()` has no graph, and `values()` requires a coalesced gradient.
    return gradient.coalesce().values() if gradient.requires_grad else gradient._values()
