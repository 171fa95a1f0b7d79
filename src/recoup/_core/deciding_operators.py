"""The operators that decide, and how the decisions of each are kept and repeated.

See NOTE [ Decisions are kept ].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recoup._core.packed_masks import PackedMask

__all__ = ["CONVERSION", "Way", "is_kept_conversion", "way_of"]

# A conversion of more elements to integers is a quantization, which chooses no way.
_MOST_CONVERTED = 2**16
# Masks of fewer elements are not worth the operators that pack them.
_FEW = 64


class Way(NamedTuple):
    """How the decisions of one operator are kept and repeated.

    Args:
        keep: makes of the arguments and the result what is kept; None if that is no decision.
        repeat: makes the result of what is kept, and the arguments of the second run.
        draws: whether the operator is run again for its draws.
    """

    keep: Callable[[Any, dict[str, Any], Any], Any]
    repeat: Callable[[Any, Any, dict[str, Any]], Any]
    draws: bool = False


def _narrowed(indices: Tensor, bound: int) -> Tensor:
    """Return a copy of indices below `bound` in the smallest type."""
    for dtype, limit in ((torch.uint8, 2**8), (torch.int16, 2**15), (torch.int32, 2**31)):
        if bound <= limit and indices.dtype.itemsize > dtype.itemsize:
            return indices.to(dtype)
    return indices.clone()


def _mask(mask: Tensor) -> Any:
    return mask.clone() if mask.numel() < _FEW else PackedMask(mask)


def _unmasked(kept: Any) -> Tensor:
    return kept.unpacked() if isinstance(kept, PackedMask) else kept.clone()


@functools.cache
def _place_of(func: Any, name: str) -> tuple[int, Any]:
    """Return the position of an argument of an operator, and its default."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return -1 if argument.kwarg_only else position, argument.default_value
    raise ValueError(f"{func} has no argument `{name}`.")


def _argument(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    position, default = _place_of(func, name)
    if 0 <= position < len(args):
        return args[position]
    return kwargs.get(name, default)


def _size(tensor: Tensor, dim: int | None) -> int:
    if dim is None:
        return tensor.numel()
    return tensor.size(dim) if tensor.dim() else 1


def _selection(func: Any) -> Way:
    """Values and their indices along a dimension: `topk`, `sort`, `max(dim)`."""

    def keep(args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        dim = _argument(func, "dim", args, kwargs)
        return _narrowed(result[1], _size(args[0], dim))

    def repeat(kept: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        dim, values = _argument(func, "dim", args, kwargs), args[0]
        indices = kept.to(torch.int64)
        if indices.dim() == values.dim():
            return values.gather(dim, indices), indices
        return values.gather(dim, indices.unsqueeze(dim)).squeeze(dim), indices

    return Way(keep, repeat)


def _indices(bound: Callable[[Any, dict[str, Any]], int], *, draws: bool = False) -> Way:
    """Return the way of a tensor of integers that are below `bound` of the arguments."""

    def keep(args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        return result.dtype, _narrowed(result, bound(args, kwargs))

    def repeat(kept: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        dtype, indices = kept
        return indices.to(dtype) if indices.dtype != dtype else indices.clone()

    return Way(keep, repeat, draws)


def _arg_extreme(func: Any) -> Way:
    return _indices(lambda args, kwargs: _size(args[0], _argument(func, "dim", args, kwargs)))


def is_kept_conversion(tensor: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether this is a conversion of floating-point numbers to booleans, or to few integers."""
    dtype = kwargs.get("dtype")
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return False
    return dtype is torch.bool or tensor.numel() <= _MOST_CONVERTED


def _keep_conversion(args: Any, kwargs: dict[str, Any], result: Tensor) -> Any:
    if not is_kept_conversion(args[0], kwargs):
        return None
    return _mask(result) if result.dtype is torch.bool else result.clone()


def _keep_all(args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    return tuple([each.clone() for each in result])


def _repeat_all(kept: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return tuple([each.clone() for each in kept])


def _keep_mask(args: Any, kwargs: dict[str, Any], result: Tensor) -> Any:
    return _mask(result)


def _repeat_mask(kept: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    return _unmasked(kept)


def _keep_number(args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    return result


def _repeat_number(kept: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return kept


def _repeat_draws(kept: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    return _unmasked(kept).to(args[0].dtype)


_COMPARISON = Way(_keep_mask, _repeat_mask)
_NUMBER = Way(_keep_number, _repeat_number)
CONVERSION = Way(_keep_conversion, _repeat_mask)
_SEVERAL = Way(_keep_all, _repeat_all)
# Draws of 0 and 1 with a chance for each element, such as a stochastic gate.
_CHANCES = Way(_keep_mask, _repeat_draws, draws=True)

_SELECTIONS = (
    "topk.default", "sort.default", "sort.stable", "max.dim", "min.dim", "kthvalue.default",
    "median.dim", "nanmedian.dim", "mode.default", "cummax.default", "cummin.default",
)  # fmt: skip
_COMPARISONS = (
    *(f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge")
      for kind in ("Tensor", "Scalar")),
    *("isnan.default", "isinf.default", "isposinf.default", "isneginf.default", "signbit.default"),
    *("logical_not.default", "logical_and.default", "logical_or.default", "logical_xor.default"),
    *("any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims"),
    *("isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor"),
)  # fmt: skip
_UNIQUES = (
    "_unique2.default", "unique_dim.default", "unique_consecutive.default",
    "unique_dim_consecutive.default",
)  # fmt: skip


_FIXED: dict[str, Way] = {
    **dict.fromkeys(_COMPARISONS, _COMPARISON),
    **dict.fromkeys(_UNIQUES, _SEVERAL),
    **dict.fromkeys(("_local_scalar_dense.default", "equal.default", "allclose.default"), _NUMBER),
    **dict.fromkeys(
        ("bucketize.Tensor", "searchsorted.Tensor"),
        _indices(lambda args, kwargs: max(each.shape[-1] for each in args[:2] if each.dim()) + 1),
    ),
    "_to_copy.default": CONVERSION,
    "bernoulli.default": _CHANCES,
    "nonzero.default": _indices(lambda args, kwargs: max((*args[0].shape, 1))),
    "count_nonzero.default": _indices(lambda args, kwargs: args[0].numel() + 1),
    "multinomial.default": _indices(lambda args, kwargs: args[0].shape[-1], draws=True),
}


@functools.cache
def way_of(func: Any) -> Way | None:
    """Return the way of an operator; None if it decides nothing."""
    namespace, _, name = str(func).partition(".")
    if namespace != "aten":
        return None
    if name in _SELECTIONS:
        return _selection(func)
    if name in ("argmax.default", "argmin.default"):
        return _arg_extreme(func)
    return _FIXED.get(name)
