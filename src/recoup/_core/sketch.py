"""Sketches: a few sums over all entries of a tensor, by which two runs are compared.

NOTE [ A sketch ]

Rule 1. The entries, in the order of memory, are the rows of a matrix of 16 columns. A sketch is the
        16 sums of its columns, in which each row has a weight of its own. So each entry counts, and
        its place does. It costs about as much as the plain sum.
Rule 2. Equal bits make equal sketches. Where two tensors differ, the difference of their sketches
        has about the length of the difference of the tensors, to a sixth: the weights are random,
        and those of 65,536 entries are the weights of their blocks times those within.
Rule 3. Kernels may round otherwise in a second run: threads add in another order. So two tensors
        count as equal if they differ, as vectors, by less than `tolerance` of their length.
Rule 4. What has no numbers of its own cannot be compared, and neither can what is not finite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Sketch", "difference", "numbers_of", "sketch_of", "tolerance_of"]

_COLUMNS = 16
_ROWS = 4096
_BLOCK = _COLUMNS * _ROWS
_PIECE = 4 * _BLOCK  # of tensors that are converted first
_SEED = 16
_OWN = frozenset((torch.float32, torch.float64))
_HALVES = frozenset((torch.float16, torch.bfloat16))

# On CPU the numbers are read at once; elsewhere a read would wait for the device.
Sketch = Tensor | list[float]


def sketch_of(tensor: Tensor) -> Sketch | None:
    """Return the sketch of a tensor; None if it cannot be compared (See Rule 4).

    Args:
        tensor: the tensor. Its graph, modes, and autocast have no part in it.
    """
    found = None
    if type(tensor) is Tensor or not is_traceable_wrapper_subclass(tensor):
        found = _sketch(tensor)
    else:  # a DTensor wraps the tensor that this rank holds
        names, _ = tensor.__tensor_flatten__()
        parts: list[Any] = [getattr(tensor, name) for name in names]
        sums = [_sketch(part) for part in parts if isinstance(part, Tensor)]
        there = [each for each in sums if each is not None]
        found = torch.stack(there).sum(0) if there else None
    return found.tolist() if found is not None and found.is_cpu else found


def numbers_of(sketch: Sketch) -> list[float]:
    """Return the numbers of a sketch, and wait for them if they are on a device."""
    return sketch if isinstance(sketch, list) else sketch.tolist()


def difference(first: Sketch, second: Sketch) -> float:
    """Return the length of the difference over that of the first; 0 if the first is not finite."""
    before, after = numbers_of(first), numbers_of(second)
    if before == after:
        return 0.0
    length = math.hypot(*before)
    if not math.isfinite(length):
        return 0.0
    found = math.dist(before, after)
    if math.isnan(found):
        return math.inf
    return found / length if length else math.inf


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding may make (See Rule 3)."""
    if dtype.is_complex:
        dtype = dtype.to_real()
    if dtype in _HALVES:  # a kernel rounds once, at its end
        return 2 * torch.finfo(dtype).eps
    return torch.finfo(dtype if dtype.is_floating_point else torch.float64).eps ** 0.75


def _sketch(tensor: Tensor) -> Tensor | None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return None
    num_bytes = tensor.untyped_storage().nbytes()
    if not tensor.numel() or not num_bytes:  # FSDP2 frees the memory of a gathered parameter
        return None
    with (
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
    ):
        if tensor.dtype.is_complex:
            tensor = torch.view_as_real(tensor.resolve_conj())
        flat = _flat(tensor.resolve_neg())
        if flat.dtype in _OWN or (flat.dtype in _HALVES and not flat.is_cpu):
            return _sums(flat)
        # Kernels of the CPU are slow in half precision, and integers must be told apart exactly.
        wide = torch.float32 if flat.dtype.is_floating_point else torch.float64
        parts = [_sums(part.to(wide)) for part in flat.split(_PIECE)]
        weights = _weights(len(parts), wide, flat.device)
        return parts[0] if len(parts) == 1 else weights @ torch.stack(parts)


def _flat(tensor: Tensor) -> Tensor:
    """Return the entries in the order of memory, without a copy if they lie densely."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    order: Sequence[int] = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    tensor = tensor.permute(*order)
    for dim, step in enumerate(tensor.stride()):
        if step == 0:  # an expanded dimension
            tensor = tensor.narrow(dim, 0, 1)
    return tensor.reshape(-1)


def _sums(flat: Tensor) -> Tensor:
    """Return the weighted sums of the columns (See Rules 1 and 2)."""
    num = flat.numel()
    weights = _weights(_ROWS, flat.dtype, flat.device)
    num_blocks = num // _BLOCK
    found: Tensor | None = None
    if num_blocks:
        of_blocks = _weights(num_blocks, flat.dtype, flat.device)
        whole = of_blocks @ flat[: num_blocks * _BLOCK].view(num_blocks, _BLOCK)
        found = weights @ whole.view(_ROWS, _COLUMNS)
        flat = flat[num_blocks * _BLOCK :]
        num -= num_blocks * _BLOCK
    num_rows = num // _COLUMNS
    if num_rows:
        rows = flat[: num_rows * _COLUMNS].view(num_rows, _COLUMNS)
        part = weights[:num_rows] @ rows
        found = part if found is None else found.add_(part)
    num_left = num - num_rows * _COLUMNS
    if num_left:
        if found is None:
            found = flat.new_zeros(_COLUMNS)
        found[:num_left].add_(flat[num - num_left :], alpha=1.25)
    if found is None:
        raise AssertionError("a tensor without entries has no sketch")
    return found


@functools.cache
def _table(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random weights of either sign between a half and one and a half."""
    generator = torch.Generator().manual_seed(_SEED + num)
    found = torch.rand(num, generator=generator, dtype=torch.float64).add_(0.5)
    signs = torch.randint(2, (num,), generator=generator).mul_(2).sub_(1)
    return found.mul_(signs).to(device, dtype)


def _weights(num: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if num <= _ROWS:
        return _table(_ROWS, dtype, device)[:num]
    return _table(2 ** math.ceil(math.log2(num)), dtype, device)[:num]
