"""Gradients of several processes into one, in few messages.

NOTE [ Every process says the same ]

Rule 1. A collective that one process does not call hangs the others. So the processes first agree
        on which gradients any of them has and in which layout, and then all send the same ones in
        the same order, with zeros where a process has none. One message of a fixed size tells
        whether they agree already; only if they do not is there a second one.
Rule 2. The order is that of the targets, which every process declared alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from recoup.errors import GradientError
from recoup.gradients.entries import Entries
from recoup.gradients.merging import as_dense, is_sharded

__all__ = ["Op", "all_reduce"]

Op = Literal["mean", "sum"]
_ABSENT, _SPARSE, _DENSE = 0, 1, 2


def all_reduce(
    entries: Entries, targets: Sequence[Tensor], op: Op, bucket_bytes: int, group: Any
) -> None:
    """Sum the gradients of `targets` over the processes of `group`, or average them."""
    if not (dist.is_available() and dist.is_initialized()):
        raise GradientError(
            "There are no processes to reduce over. Call torch.distributed.init_process_group, or "
            "leave `all_reduce_` out."
        )
    num_processes = dist.get_world_size(group)
    factor = 1 / num_processes if op == "mean" else 1.0
    buckets: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
    for target, layout in zip(targets, _agreed(entries, targets, group), strict=True):
        if layout == _ABSENT:
            continue
        gradient = _in_layout(entries, target, layout)
        if layout == _SPARSE:
            dist.all_reduce(gradient, group=group)
            entries.put(target, gradient.coalesce() * factor)
            continue
        key = (gradient.dtype, gradient.device)
        bucket = buckets.setdefault(key, _Bucket(factor, group))
        bucket.add(gradient)
        if bucket.num_bytes >= bucket_bytes:
            bucket.reduce()
    for bucket in buckets.values():
        bucket.reduce()


def _agreed(entries: Entries, targets: Sequence[Tensor], group: Any) -> Iterator[int]:
    """Return the layout in which each target is sent (See Rule 1)."""
    layouts = bytes(_layout(entries.gradients.get(target)) for target in targets)
    device = targets[0].device
    here = torch.tensor([len(targets), zlib.crc32(layouts)], device=device)
    there = torch.cat([here, -here])
    dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
    most, digest, least, other_digest = cast("list[int]", there.tolist())
    if most != -least:
        raise GradientError(
            f"This process has {len(targets)} targets, and others have {-least} to {most}. Make "
            "the store of each process with the same parameters."
        )
    if digest == -other_digest:
        return iter(layouts)
    found = torch.tensor(list(layouts), dtype=torch.uint8, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return iter(cast("list[int]", found.tolist()))


def _layout(gradient: Tensor | None) -> int:
    if gradient is None:
        return _ABSENT
    if is_sharded(gradient):
        raise GradientError(
            "The store holds DTensors, which FSDP2 has reduced already. Leave `all_reduce_` out."
        )
    if gradient.requires_grad:
        raise GradientError(
            "The store holds gradients with a graph, which a reduction would cut. Call `detach_()` "
            "first."
        )
    return _SPARSE if gradient.is_sparse else _DENSE


def _in_layout(entries: Entries, target: Tensor, layout: int) -> Tensor:
    gradient = entries.gradients.get(target)
    if gradient is None:
        device = target.device if entries.device is None else entries.device
        dtype = entries.dtype_of(target)
        kind = torch.sparse_coo if layout == _SPARSE else torch.strided
        gradient = torch.zeros(target.shape, dtype=dtype, device=device, layout=kind)
        entries.put(target, gradient)
        return entries.gradients[target]
    if layout == _DENSE and gradient.is_sparse:
        gradient = entries.gradients[target] = as_dense(gradient)
    return gradient.coalesce() if layout == _SPARSE else gradient


class _Bucket:
    """Dense gradients of one type on one device, that are reduced in one message."""

    def __init__(self, factor: float, group: Any) -> None:
        self._factor = factor
        self._group = group
        self._gradients: list[Tensor] = []
        self.num_bytes = 0

    def add(self, gradient: Tensor) -> None:
        self._gradients.append(gradient)
        self.num_bytes += gradient.nbytes

    def reduce(self) -> None:
        """Reduce what is in here, in place, and be empty."""
        gradients, self._gradients, self.num_bytes = self._gradients, [], 0
        if len(gradients) == 1 and gradients[0].is_contiguous():
            self._send(gradients[0])
        elif gradients:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            self._send(flat)
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view(gradient.shape))

    def _send(self, flat: Tensor) -> None:
        dist.all_reduce(flat, group=self._group)
        if self._factor != 1:
            flat.mul_(self._factor)
