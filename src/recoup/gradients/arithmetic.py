"""Norms, products and checks of gradients of any layout, type and device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from recoup.gradients.accumulation import is_sharded

__all__ = ["are_finite", "dot", "norm"]


def norm(gradients: Iterable[Tensor], order: float) -> Tensor:
    """Return the norm of all entries together; without gradients it is zero.

    Args:
        gradients: dense gradients, and sparse ones that are coalesced.
        order: order of the norm.
    """
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
    return _vector_norm(torch.stack([each.to(norms[0].device) for each in norms]), order)


def _vector_norm(value: Tensor, order: float) -> Tensor:
    return cast("Any", torch.linalg).vector_norm(value, order)


def dot(ones: Mapping[Tensor, Tensor], others: Mapping[Tensor, Tensor]) -> Tensor:
    """Return the sum of products of all entries; for complex ones, its real part."""
    total: Tensor | None = None
    for target, one in ones.items():
        other = others.get(target)
        if other is not None:
            product = _dot(one, other.to(one.device))
            total = product if total is None else total + product.to(total.device)
    return torch.zeros(()) if total is None else total


def _dot(one: Tensor, other: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    one, other = one.to(dtype), other.to(dtype)
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
    found: Tensor | None = None
    for gradient in gradients:
        is_finite = _whole(_values(gradient).isfinite().all())
        found = is_finite if found is None else found & is_finite.to(found.device)
    return torch.tensor(True) if found is None else found


def _whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, and any other tensor itself."""
    return cast("Any", tensor).full_tensor() if is_sharded(tensor) else tensor


def _values(gradient: Tensor) -> Tensor:
    if not gradient.is_sparse:
        return gradient
    # `_values()` has no graph, and `values()` requires a coalesced gradient.
    return gradient.coalesce().values() if gradient.requires_grad else gradient._values()
