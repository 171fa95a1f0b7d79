"""Decisions of a first run that a second run repeats: which expert, which order, which branch.

NOTE [ Decisions are kept ]

Rule 1. A decision is what an operator of torch makes of floating-point numbers that are no longer
        such: an index, an order, a comparison, a Python number. A second run whose numbers differ
        by a rounding error would decide otherwise at a tie, and its residuals would be those of
        another function. What follows from integers alone is the same whenever they are.
Rule 2. The first run keeps a copy of each decision in as few bytes as its shape allows: an index
        below 256 in one byte, a comparison in one bit. The second run is given these in the same
        order. Values that were selected (those of a `topk`) are gathered from its own numbers, so
        that gradients flow as ever. An operator that draws is run for its draws.
Rule 3. Another operator, or another shape, in the place of a decision is an error, since the second
        run does something else.
Rule 4. A dispatch mode costs microseconds an operator. So code is looked at in its first run in
        each mode, training or not, as in NOTE [ Checked once ]. Code that decided nothing then runs
        without from then on. If such code later saves an integer residual at a place where it
        saved none, it has taken another way: that residual is kept, a second run that makes
        another one is an error, and the code is looked at anew.
Rule 5. Compiled code goes on running as compiled under these modes, but not in the run that looks
        for the first time, and not in the second run that belongs to it: both must decide alike.
Rule 6. An inverse decides in another order than forward, from numbers that differ by more than
        rounding errors: stages that are inverted keep no decisions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.dispatch_modes import DispatchMode, InMode
from recoup._core.packed_masks import PackedMask
from recoup._core.side_effects import SideEffects
from recoup.errors import ReplayError

__all__ = ["DECIDES_NOTHING", "Decisions", "saves_integer"]

_PLAIN = frozenset((Tensor, nn.Parameter))
# A conversion of more elements to integers is a quantization, which chooses no way.
_MOST_CONVERTED = 2**16
# Masks of fewer elements are not worth the operators that pack them.
_FEW = 64

# Code that decided nothing, and changed no buffer, in its first run, by mode (training or not), as
# in `random_sources`.
DECIDES_NOTHING: tuple[set[weakref.ref[Any]], ...] = (set(), set())
# The places at which code saved integers when it was looked at (See Rule 4).
_places: dict[weakref.ref[Any], set[int]] = {}


def saves_integer(parts: Sequence[weakref.ref[Any]], place: int, *, is_looked_at: bool) -> bool:
    """Note that code saves an integer residual; return whether it never did so there (Rule 4)."""
    if not parts:
        return False
    code = parts[-1]
    known = _places.get(code)
    if is_looked_at:
        if known is None:
            value = code()
            if value is None:
                return False
            known = _places.setdefault(weakref.ref(value, _forget_places), set())
        known.add(place)
        return False
    if known is not None and place in known:
        return False
    for known_to_be in DECIDES_NOTHING:
        known_to_be.difference_update(parts)
    return True


def _forget_places(code: weakref.ref[Any]) -> None:
    _places.pop(code, None)


class _Kept(NamedTuple):
    """A decision of the first run.

    Args:
        func: the operator that made it.
        shape: the shape of its first argument.
        result: what a second run is given: a copy, a `PackedMask` or a Python number.
    """

    func: Any
    shape: torch.Size
    result: Any


class _Way(NamedTuple):
    """How the decisions of one operator are kept and repeated.

    Args:
        keep: makes of the arguments and the result what is kept; None if that is no decision.
        repeat: makes the result of what is kept, and the arguments of the second run.
        draws: whether the operator is run again for its draws.
    """

    keep: Callable[[Any, dict[str, Any], Any], Any]
    repeat: Callable[[Any, Any, dict[str, Any]], Any]
    draws: bool = False


class Decisions:
    """The decisions of the first run of a call, in order.

    Args:
        name: the name of the call in error messages.
    """

    __slots__ = ("_is_first_look", "_kept", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_first_look = False
        self._kept: list[_Kept] = []

    @property
    def are_any(self) -> bool:
        """Whether the first run decided anything."""
        return bool(self._kept)

    def recording(self, effects: SideEffects | None, *, is_first_look: bool) -> InMode:
        """Return a context for the first run, which keeps its decisions.

        Args:
            effects: is told of the operators, if any may write to a buffer.
            is_first_look: whether compiled code does not run as such in it (See Rule 5).
        """
        self._is_first_look = is_first_look
        watching = effects if effects is not None and effects.has_buffers else None
        return InMode(_Keeping(self._kept, watching))

    def repeating(self) -> InMode:
        """Return a context for a later run, which is given these decisions."""
        kind = _RepeatingEagerly if self._is_first_look else _Repeating
        return InMode(kind(self._name, self._kept))


class _Keeping(DispatchMode):
    """A mode that keeps decisions."""

    supports_higher_order_operators = True

    def __init__(self, kept: list[_Kept], effects: SideEffects | None) -> None:
        super().__init__()
        self._kept = kept
        self._effects = effects

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run (See Rule 5)."""
        return True

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and keep what it decides."""
        given = kwargs or {}
        if self._effects is not None:
            self._effects.written(func, args, given)
        result = func(*args, **given)
        way = _way_of(func)
        if way is not None and _is_of_floats(args):
            kept = way.keep(args, given, result)
            if kept is not None:
                self._kept.append(_Kept(func, _shape(args), kept))
        return result


class _Repeating(DispatchMode):
    """A mode that answers with decisions of the first run (See Rule 2)."""

    supports_higher_order_operators = True

    def __init__(self, name: str, kept: list[_Kept]) -> None:
        super().__init__()
        self._name = name
        self._kept = kept
        self._num_repeated = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run (See Rule 5)."""
        return True

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, or answer with what it decided."""
        given = kwargs or {}
        way = _way_of(func)
        if way is None or not _is_of_floats(args):
            return func(*args, **given)
        if way is _CONVERSION and not _is_kept_conversion(args[0], given):
            return func(*args, **given)
        place = self._num_repeated
        self._num_repeated = place + 1
        first = self._kept[place] if place < len(self._kept) else None
        if first is None or first.func is not func or first.shape != _shape(args):
            raise self._another(first, func, _shape(args))  # See Rule 3
        if way.draws:
            func(*args, **given)
        return way.repeat(first.result, args, given)

    def _another(self, first: _Kept | None, func: Any, shape: torch.Size) -> ReplayError:
        then = "nothing" if first is None else f"{first.func} on a {tuple(first.shape)}"
        return ReplayError(
            f"Running {self._name} again decided by {func} on a {tuple(shape)} where the first run "
            f"decided by {then}. A region must do the same when it runs again: look for outside "
            "state that it reads, such as a counter or a cache."
        )


class _RepeatingEagerly(_Repeating):
    """The same for a first run in which compiled code ran uncompiled (See Rule 5)."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return False


def _is_of_floats(args: Any) -> bool:
    """Whether floating-point numbers are among the arguments, and no tensor of another class."""
    is_float = False
    for value in args:
        if isinstance(value, Tensor):
            if type(value) not in _PLAIN:
                return False
            is_float = is_float or value.is_floating_point()
    return is_float


def _shape(args: Any) -> torch.Size:
    for value in args:
        if isinstance(value, Tensor):
            return value.shape
    return torch.Size()


# --- the ways in which decisions are kept --------------------------------------------------------


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


def _selection(func: Any) -> _Way:
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

    return _Way(keep, repeat)


def _indices(bound: Callable[[Any, dict[str, Any]], int], *, draws: bool = False) -> _Way:
    """Return the way of a tensor of integers that are below `bound` of the arguments."""

    def keep(args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        return result.dtype, _narrowed(result, bound(args, kwargs))

    def repeat(kept: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        dtype, indices = kept
        return indices.to(dtype) if indices.dtype != dtype else indices.clone()

    return _Way(keep, repeat, draws)


def _arg_extreme(func: Any) -> _Way:
    return _indices(lambda args, kwargs: _size(args[0], _argument(func, "dim", args, kwargs)))


def _is_kept_conversion(tensor: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether this is a conversion of floating-point numbers to booleans, or to few integers."""
    dtype = kwargs.get("dtype")
    if dtype is None or dtype.is_floating_point or dtype.is_complex:
        return False
    return dtype is torch.bool or tensor.numel() <= _MOST_CONVERTED


def _keep_conversion(args: Any, kwargs: dict[str, Any], result: Tensor) -> Any:
    if not _is_kept_conversion(args[0], kwargs):
        return None
    return _mask(result) if result.dtype is torch.bool else result.clone()


def _keep_all(args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    return tuple([each.clone() for each in result])


def _repeat_all(kept: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return tuple([each.clone() for each in kept])


_COMPARISON = _Way(
    lambda args, kwargs, result: _mask(result), lambda kept, args, kwargs: _unmasked(kept)
)
_NUMBER = _Way(lambda args, kwargs, result: result, lambda kept, args, kwargs: kept)
_CONVERSION = _Way(_keep_conversion, lambda kept, args, kwargs: _unmasked(kept))
_SEVERAL = _Way(_keep_all, _repeat_all)
# Draws of 0 and 1 with a chance for each element, such as a stochastic gate.
_CHANCES = _Way(
    lambda args, kwargs, result: _mask(result),
    lambda kept, args, kwargs: _unmasked(kept).to(args[0].dtype),
    draws=True,
)

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


_FIXED: dict[str, _Way] = {
    **dict.fromkeys(_COMPARISONS, _COMPARISON),
    **dict.fromkeys(_UNIQUES, _SEVERAL),
    **dict.fromkeys(("_local_scalar_dense.default", "equal.default", "allclose.default"), _NUMBER),
    **dict.fromkeys(
        ("bucketize.Tensor", "searchsorted.Tensor"),
        _indices(lambda args, kwargs: max(each.shape[-1] for each in args[:2] if each.dim()) + 1),
    ),
    "_to_copy.default": _CONVERSION,
    "bernoulli.default": _CHANCES,
    "nonzero.default": _indices(lambda args, kwargs: max((*args[0].shape, 1))),
    "count_nonzero.default": _indices(lambda args, kwargs: args[0].numel() + 1),
    "multinomial.default": _indices(lambda args, kwargs: args[0].shape[-1], draws=True),
}


@functools.cache
def _way_of(func: Any) -> _Way | None:
    """Return the way of an operator; None if it decides nothing."""
    namespace, _, name = str(func).partition(".")
    if namespace != "aten":
        return None
    if name in _SELECTIONS:
        return _selection(func)
    if name in ("argmax.default", "argmin.default"):
        return _arg_extreme(func)
    return _FIXED.get(name)
