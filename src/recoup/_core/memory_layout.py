"""The layout of tensors in memory, which a second run must find as in the first.

Masks are drawn, and kernels are chosen, in the order of memory: the same numbers in another layout
get other masks, and are rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller

import torch
from torch import Tensor

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
Strides = tuple[int, ...]
_strides: Callable[[Tensor], Strides] = methodcaller("stride")


def strided(tensor: Tensor, stride: Strides) -> Tensor:
    """Return `tensor`, or a copy, with these strides; an expanded one is left as it is."""
    if tensor.stride() == stride or 0 in stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def laid_out(tensor: Tensor, geometry: Geometry) -> Tensor:
    """Return `tensor` with the memory layout `geometry`, since slots are views of its storage."""
    if geometry_of(tensor) == geometry:
        return tensor
    size, stride, offset = geometry
    length = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    storage = tensor.new_empty(max(length, 0) if tensor.numel() else 0)
    return storage.as_strided(size, stride, offset).copy_(tensor)


def geometry_of(tensor: Tensor) -> Geometry:
    """Return the size, stride and storage offset of `tensor`."""
    return tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())


def strides_of(tensors: Sequence[Tensor]) -> list[Strides]:
    """Return the strides of each tensor; empty for one that has none (a sparse tensor)."""
    try:
        return list(map(_strides, tensors))
    except RuntimeError:
        return [each.stride() if each.layout is torch.strided else () for each in tensors]


def in_order(tensors: tuple[Tensor, ...], strides: list[Strides]) -> tuple[Tensor, ...]:
    """Return `tensors` with the dimensions in the order of `strides`, as copies where needed.

    Gaps between the entries (of a slice) make no difference to what is made of a tensor.
    """
    if strides_of(tensors) == strides:
        return tensors
    return tuple(map(_in_order, tensors, strides))


def _in_order(tensor: Tensor, strides: Strides) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor
    dims, now = range(tensor.dim()), tensor.stride()
    if 0 not in (*strides, *now) and (
        sorted(dims, key=strides.__getitem__) == sorted(dims, key=now.__getitem__)
    ):
        return tensor
    dense = _dense(tensor.shape, strides)
    if dense == _dense(tensor.shape, now):
        return tensor
    return strided(tensor, dense)


def _dense(shape: Sequence[int], strides: Strides) -> Strides:
    """Return the strides of what torch makes of such a tensor: without gaps, and not expanded."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
