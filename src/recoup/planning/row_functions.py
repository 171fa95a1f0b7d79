"""Functions of a matrix that treat its rows alike: what they do to the rows that it is made of."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["OF_BACKWARD", "OF_GRADIENT", "ONLY_READ", "followed", "is_metadata"]

_T: Any = Tensor
_METADATA = frozenset((
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.stride, _T.element_size,
    _T.is_floating_point, _T.is_complex, _T.is_contiguous, _T.get_device, _T.__len__, _T.__hash__,
    torch.numel, torch.is_floating_point, torch.is_complex,
))  # fmt: skip
_READ_ATTRIBUTES = frozenset((
    "data", "T", "mT", "H", "mH", "real", "imag", "grad", "grad_fn",
))  # fmt: skip
OF_GRADIENT = frozenset((_T.retain_grad, _T.register_hook, _T.grad_fn.__get__))
OF_BACKWARD = frozenset((torch.autograd.grad, torch.autograd.backward, _T.backward))
_TO_TYPE = frozenset((_T.float, _T.double, _T.half, _T.bfloat16))
_SCALED = frozenset((
    _T.div, _T.__truediv__, _T.true_divide, _T.mul, _T.__mul__, _T.__rmul__, torch.div, torch.mul,
    torch.true_divide,
))  # fmt: skip
_EACH = frozenset((_T.tanh, torch.tanh))
_RESHAPED = frozenset((
    _T.view, _T.reshape, _T.flatten, _T.contiguous, torch.reshape, torch.flatten,
))  # fmt: skip
ONLY_READ = frozenset((
    _T.argmax, _T.argmin, _T.softmax, _T.log_softmax, _T.logsumexp, _T.topk, _T.max, _T.min,
    _T.sum, _T.mean, _T.gather, _T.isnan, torch.argmax, torch.argmin, torch.softmax,
    torch.log_softmax, torch.logsumexp, torch.topk, torch.max, torch.min, torch.sum, torch.mean,
    torch.gather, torch.isnan, F.softmax, F.log_softmax,
))  # fmt: skip


def is_metadata(func: Any) -> bool:
    """Whether a function asks a tensor for nothing that is made of its entries."""
    if func in _METADATA:
        return True
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return getattr(func, "__name__", "") == "__get__" and attribute not in _READ_ATTRIBUTES


def followed(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor, rows: Tensor
) -> tuple[Tensor, torch.dtype, bool] | None:
    """Return what a function makes of a value, or None if its entries are needed.

    Args:
        func: the function.
        args: its arguments after the value.
        kwargs: its keyword arguments.
        value: a tensor (..., C), of which the shape and the type are read alone.
        rows: the tensor (..., D) that it is made of, row by row.

    Returns:
        The rows that the result is made of, its type, and whether the function is to be called with
        what is made of them.
    """
    if func is _T.__getitem__:
        is_of_rows = not kwargs and len(args) == 1 and _is_of_rows(args[0], value.dim())
        return (rows[args[0]], value.dtype, False) if is_of_rows else None
    if func in _TO_TYPE or func in _EACH:
        is_later = not args and not kwargs
    elif func in _SCALED:
        is_later = len(args) == 1 and not kwargs and type(args[0]) in (int, float)
    elif func is _T.to:  # a type and nothing else
        is_later = [*map(type, args), *kwargs] in ([torch.dtype], ["dtype"])
    else:
        is_later = False
    if not is_later and func not in _RESHAPED:
        return None
    stand_in = torch.empty(value.shape, dtype=value.dtype, device="meta")
    made = func(stand_in, *args, **kwargs)
    if is_later:
        return rows, made.dtype, True
    shape = made.shape
    is_same = made.dtype is value.dtype and math.prod(shape) == value.numel()  # the same bits
    if not is_same or not shape or shape[-1] != value.shape[-1]:
        return None
    return rows.reshape(*shape[:-1], rows.shape[-1]), value.dtype, False


def _is_of_rows(index: Any, num_dims: int) -> bool:
    """Whether an index picks rows, and leaves the last dimension as it is."""
    if isinstance(index, Tensor):
        is_mask = index.dtype in (torch.bool, torch.uint8)
        return (index.dim() if is_mask else 1) < num_dims
    parts: tuple[Any, ...] = cast("Any", index) if isinstance(index, tuple) else (index,)
    if not all(part is ... or isinstance(part, (slice, int)) for part in parts):
        return False
    if any(isinstance(part, bool) for part in parts):
        return False
    if ... in parts:
        place = parts.index(...)
        if place < len(parts) - 1:
            return parts[-1] == slice(None)
        parts = parts[:-1]
    return len(parts) < num_dims
