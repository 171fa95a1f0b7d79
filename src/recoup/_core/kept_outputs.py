"""Outputs of operators that a second run is given: what was decided, and chosen products.

NOTE [ What was decided stays decided ]

Rule 1. An operator decides if it makes of floating-point numbers what are no longer such: an index,
        an order, a comparison, a Python number. A second run whose numbers are a rounding error
        off would decide otherwise at a tie, and its residuals would be those of another function.
Rule 2. The first run keeps a copy of each such output in as few bytes as its bound allows: an index
        below 256 in one byte, a comparison in one bit. Later runs are given them in the order of
        the calls of an operator on tensors of the same shape that both need a gradient, or both
        do not. Values that were selected (of a `topk`) are gathered, so that gradients flow as
        ever. An operator that draws is run for its draws.
Rule 3. A later run may do less, where the first has cached a mask. Where nothing is left to give,
        an operator runs. If what it is given is of another call, its residuals differ.
Rule 4. A run that is looked at also shows whether a decision hangs on numbers from outside, which
        may be a rounding error off. What is made of integers, constants and draws alone (the mask
        of an attention, the buckets of positions) is the same to the bit, and decides alike.
Rule 5. A run that is looked at, and its later runs, pass every operator through a mode, under which
        nothing is compiled. Other runs intercept (NOTE [ Interception ]) those operators alone that
        decided then, or may decide, where code finds its modules as it runs. Both must decide
        alike; if another operator decides later, the residuals show it. A mode within (that records
        a block of code) must see the same operators in each run: there an operator runs, and its
        output is written over.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor

from recoup._core.devices import generator_states, refuse_draws, same_states
from recoup._core.kept_products import KeptProduct, PackedMask, Products
from recoup._core.operators import (
    InMode,
    Interceptor,
    OperatorMode,
    are_plain,
    beneath,
    has_schema,
    intercepting,
    num_dispatch_modes,
    traits_of,
    unseen,
)
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import (
    grad_mode,
    num_nodes,
    pair_in_force,
    set_versions,
    version_of,
)
from recoup._core.storage_tracking import storages_of
from recoup._core.tensors import Strides, is_without_values, strided

# A conversion of more elements to integers is a quantization, which chooses no way.
_MOST_CONVERTED = 2**16
# Masks of fewer elements are not worth the operators that pack them.
_FEW = 64

_SELECTIONS = frozenset((
    "topk.default", "sort.default", "sort.stable", "max.dim", "min.dim", "kthvalue.default",
    "median.dim", "nanmedian.dim", "mode.default", "cummax.default", "cummin.default",
))  # fmt: skip
_COMPARISONS = frozenset((
    *(f"{name}.{kind}" for name in ("eq", "ne", "lt", "le", "gt", "ge")
      for kind in ("Tensor", "Scalar")),
    *("isnan.default", "isinf.default", "isposinf.default", "isneginf.default", "signbit.default"),
    *("logical_not.default", "logical_and.default", "logical_or.default", "logical_xor.default"),
    *("any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims"),
    *("isin.Tensor_Tensor", "isin.Tensor_Scalar", "isin.Scalar_Tensor"),
))  # fmt: skip
_INTEGERS = frozenset((
    "argmax.default", "argmin.default", "bucketize.Tensor", "searchsorted.Tensor",
    "nonzero.default", "count_nonzero.default", "multinomial.default", "_unique2.default",
    "unique_dim.default", "unique_consecutive.default", "unique_dim_consecutive.default",
))  # fmt: skip
_NUMBERS = frozenset(("_local_scalar_dense.default", "equal.default", "allclose.default"))
_CONVERSION, _CHANCES = "_to_copy.default", "bernoulli.default"
_DRAWS = frozenset((_CHANCES, "multinomial.default"))
_ALL = _SELECTIONS | _COMPARISONS | _INTEGERS | _NUMBERS | {_CONVERSION, _CHANCES}

_Call = tuple[Any, torch.Size, bool]


class _Decided(NamedTuple):
    """What an operator decided: a number, or of each tensor a copy, its type and its strides."""

    number: Any
    tensors: tuple[tuple[Tensor | PackedMask | None, torch.dtype, Strides], ...]


class KeptOutputs:
    """The outputs of one first run that later runs are given (See Rule 2).

    They are those of `products`, and of the operators in `deciding` what they decide. Where it
    `is_looking`, it sees what hangs on numbers from outside (See Rules 4 and 5).
    """

    def __init__(
        self, name: str, products: Products, deciding: frozenset[Any], *, is_looking: bool
    ) -> None:
        self.nodes: set[int] = set()  # of the kept products
        self.may_draw = False  # whether an operator that may draw was seen
        self.decided: set[Any] = set()  # of which a decision may hang on numbers from outside
        self._name, self._pair = name, pair_in_force()
        self.products, self._num_products = products, 0
        self._deciding, self._is_looking = deciding, is_looking
        # The storages that hang on nothing from outside; of a run that is looked at.
        self._made_here = WeakSet[torch.UntypedStorage]()
        self._kept: dict[_Call, list[_Decided | KeptProduct | None]] = {}
        self._seen: dict[_Call, int] = {}  # the place of the last one that a later run was given
        self._is_repeating = False  # within a first run that goes on

    @contextmanager
    def recording(self) -> Generator[None]:
        """A context for the first run, which keeps outputs."""
        with self._passing(self._record):
            yield
        for (func, *_), row in self._kept.items():
            for place, each in enumerate(row):
                if not isinstance(each, KeptProduct):
                    continue
                if each.is_unchanged:
                    each.hand_over(f"What {func} made in {self._name}", self._pair)
                else:
                    row[place] = None
        self._pair = None

    @property
    def are_left(self) -> bool:
        """Whether the last later run has decided less than the first one (See Rule 3)."""
        return any(self._seen.get(call, -1) + 1 < len(kept) for call, kept in self._kept.items())

    @contextmanager
    def repeating(self) -> Generator[None]:
        """A context for a later run, which is given them."""
        self._is_repeating, before = True, self._is_repeating
        self._seen = {}
        try:
            with self._passing(functools.partial(self._repeat, self._seen)):
                yield
        finally:
            self._is_repeating = before
            for kept in self._kept.values() if self.products.funcs else ():
                kept[:] = [None if isinstance(each, KeptProduct) else each for each in kept]

    def _passing(self, run: Interceptor) -> AbstractContextManager[Any]:
        """Return a context in which operators go through `run` (See Rule 5)."""
        if self._is_looking:
            return InMode(OperatorMode(run))
        return intercepting(self.products.funcs | self._deciding, run)

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._is_repeating:
            return func(*args, **kwargs)
        is_plain = not self._is_looking or are_plain(args, kwargs)  # which interceptors are given
        if is_plain and func in self.products.funcs:
            return self._record_product(func, args, kwargs)
        result = func(*args, **kwargs)
        hangs = not self._is_looking or self._hangs_on_outside(func, args, kwargs, result)
        if is_plain and func in self._deciding and (name := _decision(func, args, kwargs)):
            if hangs:
                self.decided.add(func)
            with grad_mode(False):
                kept = _keep(name, func, args, kwargs, result)
            self._kept.setdefault(_call_of(func, args), []).append(kept)
        return result

    def _record_product(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        number = self._num_products
        is_chosen = number in self.products.chosen
        self._num_products = number + 1
        draws = is_chosen and _may_draw(func)
        before = generator_states() if draws else None
        result = func(*args, **kwargs)
        if self._is_looking:
            self._hangs_on_outside(func, args, kwargs, result)
        found: KeptProduct | None = None
        if is_chosen:
            after = generator_states() if before is not None else None
            drew = before is not None and after is not None and not same_states(before, after)
            with grad_mode(False):
                states = after if drew else None
                # A mode is beneath what counts versions: changes of values would not be seen.
                is_blind = self._is_looking and not is_without_values()
                copies = is_blind or number not in self.products.saved
                found = KeptProduct.of(func, args, kwargs, result, states, copies=copies)
        if found is not None and not isinstance(found.output, PackedMask):
            self.nodes.add(num_nodes() - 1)
        self._kept.setdefault(_call_of(func, args), []).append(found)
        return result

    def _hangs_on_outside(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
        """Whether an operator takes numbers that hang on what is outside (See Rule 4)."""
        given, results = tensors_in((args, kwargs)), tensors_in(result)
        if _may_draw(func):
            self.may_draw = True
            for each in results[:1]:
                refuse_draws(func, each.device)
        made = set(storages_of(results))
        numbers = [each for each in given if each.is_floating_point() or each.is_complex()]
        if all(storage in self._made_here for storage in storages_of(numbers)):
            self._made_here |= made
            return False
        writes = not has_schema(func) or traits_of(func).writes
        self._made_here -= made.union(storages_of(given) if writes else ())
        return True

    def _repeat(self, seen: dict[_Call, int], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._is_looking and not are_plain(args, kwargs):
            return func(*args, **kwargs)
        is_product = func in self.products.funcs
        name = _decision(func, args, kwargs) if func in self._deciding and not is_product else ""
        if not is_product and not name:
            return func(*args, **kwargs)
        call = _call_of(func, args)
        place = seen[call] = seen.get(call, -1) + 1
        row = self._kept.get(call, [])
        kept = row[place] if place < len(row) else None
        if kept is None:
            return func(*args, **kwargs)  # See Rule 3
        if isinstance(kept, KeptProduct):
            row[place] = None
            is_there = kept.is_unchanged  # else code takes a gradient within the first run
            return kept.given(func, args, kwargs) if is_there else func(*args, **kwargs)
        if not self._is_looking and num_dispatch_modes() and not is_without_values():
            return _run_and_given(kept, name, func, args, kwargs)
        if name in _DRAWS:
            with grad_mode(False):
                func(*args, **kwargs)
        given = functools.partial(_given, kept, name, func)
        return beneath(func, args, kwargs, given) if call[-1] else given(args, kwargs)


@functools.cache
def _may_draw(func: Any) -> bool:
    return not has_schema(func) or traits_of(func).may_draw


@functools.cache
def deciding_operators() -> frozenset[Any]:
    """Return the operators that may decide (See Rule 1)."""
    return frozenset(operator.attrgetter(name)(torch.ops.aten) for name in _ALL)


@functools.cache
def _name_of(func: Any) -> str:
    return str(func).removeprefix("aten.")


def _decision(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """Return the name of the operator of a call that decides something; "" for any other."""
    if not any(isinstance(each, Tensor) and each.is_floating_point() for each in args):
        return ""
    name = _name_of(func)
    if name == _CONVERSION:  # to booleans, or to few integers
        dtype = kwargs.get("dtype")
        if dtype is None or dtype.is_floating_point or dtype.is_complex:
            return ""
        return name if dtype is torch.bool or args[0].numel() <= _MOST_CONVERTED else ""
    return name


def _call_of(func: Any, args: Any) -> _Call:
    for each in args:
        if isinstance(each, Tensor):
            return func, each.shape, each.requires_grad
    return func, torch.Size(), False


def _keep(name: str, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> _Decided:
    if name in _NUMBERS:
        return _Decided(result, ())
    results = cast("tuple[Tensor, ...]", result if isinstance(result, tuple) else (result,))
    bound = _bound(name, func, args, kwargs)
    kept: list[tuple[Tensor | PackedMask | None, torch.dtype, Strides]] = []
    for place, each in enumerate(results):
        if name in _SELECTIONS and place == 0:
            kept.append((None, each.dtype, each.stride()))  # it is gathered
        elif name == _CHANCES or (each.dtype is torch.bool and each.numel() >= _FEW):
            kept.append((PackedMask(each), each.dtype, each.stride()))
        else:
            kept.append((narrowed(each, bound), each.dtype, each.stride()))
    return _Decided(None, tuple(kept))


def _given(kept: _Decided, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what a later run is given in place of the output of an operator."""
    if name in _NUMBERS:
        return kept.number
    found: list[Tensor] = []
    for value, dtype, stride in kept.tensors:
        if value is not None:
            made = value.unpacked() if isinstance(value, PackedMask) else value
            made = made.to(dtype) if made.dtype is not dtype else made.clone()
            found.append(strided(made, stride))
    if name in _SELECTIONS:
        values, (indices,), dim = args[0], found, _argument(func, "dim", args, kwargs)
        if indices.dim() == values.dim():
            chosen = values.gather(dim, indices)
        else:
            chosen = values.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
        return strided(chosen, kept.tensors[0][2]), indices
    return found[0] if len(found) == 1 else tuple(found)


def _run_and_given(kept: _Decided, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator, and write what a later run is given over its output (See Rule 5)."""
    result = func(*args, **kwargs)
    if name in _NUMBERS:
        return kept.number
    with grad_mode(False), unseen():
        given = tensors_in(_given(kept, name, func, args, kwargs))
        made = tensors_in(result)
        if [each.shape for each in made] != [each.shape for each in given]:
            return _given(kept, name, func, args, kwargs)
        for own, value in zip(made, given, strict=True):
            version = version_of(own)
            own.copy_(value)
            set_versions((own,), (version,))
    return result


def _bound(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Return a number that is above all integers that an operator makes."""
    if name == _CONVERSION:
        return 2**62
    if name in _SELECTIONS or name.startswith("arg"):
        first, dim = args[0], _argument(func, "dim", args, kwargs)
        return first.numel() if dim is None else first.size(dim) if first.dim() else 1
    return 1 + max(each.numel() for each in tensors_in((args, kwargs)))


def narrowed(indices: Tensor, bound: int) -> Tensor:
    """Return a copy of indices below `bound` in the smallest type."""
    if not indices.dtype.is_floating_point:
        for dtype, limit in ((torch.uint8, 2**8), (torch.int16, 2**15), (torch.int32, 2**31)):
            if bound <= limit and indices.dtype.itemsize > dtype.itemsize:
                return indices.to(dtype)
    return indices.clone()


@functools.cache
def _place_of(func: Any, name: str) -> tuple[int, Any]:
    """Return the position of an argument of an operator, and its default."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return -1 if argument.kwarg_only else position, argument.default_value
    raise ValueError(f"{func} has no argument `{name}`.")


def _argument(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    position, default = _place_of(func, name)
    return args[position] if 0 <= position < len(args) else kwargs.get(name, default)
