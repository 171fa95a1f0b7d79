"""Reducing the gradients of several processes, in few messages.

NOTE [ Processes agree before they reduce ]

Rule 1. A collective that one process does not call hangs the others. So the processes first
        exchange a description of what they will send, in one message of a fixed size, even if one
        of them cannot go on; then all raise, or all send the same tensors in the same order, with
        zeros where one has no gradient. If they do not have the same gradients, one more message
        follows.
Rule 2. The order is that of the targets, which is the same in every process.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from recoup.errors import GradientError
from recoup.gradients.accumulation import as_dense, is_sharded
from recoup.gradients.container import UNSCALED, Container

__all__ = ["UNORDERED", "Op", "all_reduce"]

Op = Literal["mean", "sum"]
UNORDERED = (
    "The processes can only agree on an order of gradients that all declare alike: make the store "
    "with `params`, and collect nothing else."
)
# A sparse gradient is one more than the number of its sparse dimensions.
_ABSENT, _DENSE = 0, 255
_SCALES: dict[float, float | str | None] = {-1.0: None, -2.0: UNSCALED}


class _Description(NamedTuple):
    """The description that a process sends to the others (See Rule 1), in numbers."""

    has_error: float
    declared: float
    layouts: float
    has_gradients: float
    weight: float
    scale: float


def all_reduce(store: Container, op: Op, bucket_bytes: int, group: Any) -> None:
    """Sum the gradients of a store over the processes of `group`, or average them.

    Its weight is reduced alike, and its scale becomes that of the processes with gradients.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise GradientError(
            "There are no processes to reduce over. Call torch.distributed.init_process_group, or "
            "leave `all_reduce_` out."
        )
    targets, gradients = store.params, store._gradients
    dtypes = [gradients[t].dtype if t in gradients else store._dtype_for(t) for t in targets]
    declared = [(tuple(t.shape), dtype) for t, dtype in zip(targets, dtypes, strict=True)]
    layouts = bytes(_layout(gradients.get(each), group) for each in targets)
    error = _why_not(store)
    mine = _Description(
        has_error=error is not None,
        declared=zlib.crc32(repr((op, bucket_bytes, declared)).encode()),
        layouts=zlib.crc32(layouts),
        has_gradients=any(layouts),
        weight=store.weight,
        scale=next((n for n, scale in _SCALES.items() if scale == store._scale), store._scale),
    )
    device = targets[0].device
    everyone = _gathered(mine, device, group)
    if error is not None:
        raise error
    _check_agree(everyone)
    if len({each.layouts for each in everyone}) > 1:
        found = torch.tensor(list(layouts), dtype=torch.uint8, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        layouts = bytes(cast("list[int]", found.tolist()))
    store._num_changes += 1  # an error from here on leaves a partial reduction
    factor = 1 / len(everyone) if op == "mean" else 1.0
    _reduce(store, layouts, factor, bucket_bytes, group)
    store._is_local = False
    store.weight = sum(each.weight for each in everyone) * factor
    for each in everyone:
        if each.has_gradients:
            store._scale = _SCALES.get(each.scale, each.scale)


# -- agreeing --------------------------------------------------------------------------------------


def _why_not(store: Container) -> Exception | None:
    """Return the error if this process cannot take part in a reduction, else None."""
    try:
        store._check_is_whole()
    except GradientError as error:
        return error
    gradients, known = store._gradients, set(map(id, store.params))
    if any(id(each) not in known for each in gradients):
        return ValueError(UNORDERED)
    if is_sharded(*gradients.values()):
        return GradientError(
            "The store holds DTensors, which FSDP2 has reduced already. Leave `all_reduce_` out."
        )
    if any(gradient.requires_grad for gradient in gradients.values()):
        return GradientError(
            "The store holds gradients with a graph, which a reduction would cut. Call `detach_()` "
            "first."
        )
    return None


def _layout(gradient: Tensor | None, group: Any) -> int:
    if gradient is None:
        return _ABSENT
    # Of torch's backends, only gloo sums sparse tensors.
    is_gloo = gradient.device.type == "cpu" or dist.get_backend(group) == "gloo"
    return 1 + gradient.sparse_dim() if gradient.is_sparse and is_gloo else _DENSE


def _gathered(mine: _Description, device: torch.device, group: Any) -> list[_Description]:
    sent = torch.tensor(mine, dtype=torch.float64, device=device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    rows = cast("list[list[float]]", torch.stack(received).tolist())
    return [_Description(*numbers) for numbers in rows]


def _check_agree(everyone: Sequence[_Description]) -> None:
    failed = [rank for rank, each in enumerate(everyone) if each.has_error]
    if failed:
        raise GradientError(
            f"Process {failed[0]} of the group could not take part in `all_reduce_`; its own "
            "error has the reason. Nothing was reduced."
        )
    if len({each.declared for each in everyone}) > 1:
        raise GradientError(
            "The processes called `all_reduce_` with another number of targets, or with targets of "
            "other shapes or types or in another order, or with another `op` or `bucket_bytes`. "
            "Make the store of each process with the same parameters in the same order, and call "
            "it alike."
        )
    if len({each.scale for each in everyone if each.has_gradients}) > 1:
        raise GradientError(
            "The gradients of the processes do not have one scale. Collect all with one scale, and "
            "call `unscale_` on all processes, or on none."
        )


# -- sending ---------------------------------------------------------------------------------------


def _reduce(
    store: Container, layouts: bytes, factor: float, bucket_bytes: int, group: Any
) -> None:
    dense: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for target, layout in zip(store.params, layouts, strict=True):
        if layout == _ABSENT:
            continue
        gradient = store._gradients.get(target)
        if gradient is None:
            device = target.device if store._device is None else store._device
            gradient = torch.zeros(target.shape, dtype=store._dtype_for(target), device=device)
        if layout == _DENSE:
            gradient = store._gradients[target] = as_dense(gradient)
            dense.setdefault((gradient.dtype, gradient.device), []).append(gradient)
            continue
        if not gradient.is_sparse or 1 + gradient.sparse_dim() != layout:
            gradient = as_dense(gradient).to_sparse(layout - 1)
        gradient = gradient.coalesce() * factor
        dist.all_reduce(gradient, group=group)
        store._put(target, gradient.coalesce(), is_ours=True)
    for gradients in dense.values():
        for bucket in _buckets(gradients, bucket_bytes):
            _reduce_bucket(bucket, factor, group)


def _buckets(gradients: Iterable[Tensor], least_bytes: int) -> Iterator[list[Tensor]]:
    """Yield the gradients that are reduced in one message; a large one is alone, to save a copy."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if gradient.nbytes >= least_bytes:
            yield [gradient]
            continue
        bucket.append(gradient)
        if sum(each.nbytes for each in bucket) >= least_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _reduce_bucket(gradients: list[Tensor], factor: float, group: Any) -> None:
    """Reduce dense gradients of one type on one device, in place and in one message."""
    is_copied = len(gradients) > 1 or not gradients[0].is_contiguous()
    flat = torch.cat([each.reshape(-1) for each in gradients]) if is_copied else gradients[0]
    if factor != 1:
        flat.mul_(factor)  # before the sum, which may be too large for 16 bits
    dist.all_reduce(flat, group=group)
    if is_copied:
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view(gradient.shape))
