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
Rule 3. A decision is known by its operator, the shape of its argument, the lines of the code that
        led to it, and how many residuals the run had saved before. Decisions that agree in all of
        this are told apart by their order. A second run may decide less than the first, which has
        cached a mask for it. Where the first run decided nothing, the second run decides anew. A
        first run whose residuals are kept counts none, and its decisions go by their order.
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

import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.deciding_operators import CONVERSION, is_kept_conversion, way_of
from recoup._core.dispatch_modes import DispatchMode, InMode
from recoup._core.side_effects import SideEffects

__all__ = ["DECIDES_NOTHING", "Decisions", "saves_integer"]

_PLAIN = frozenset((Tensor, nn.Parameter))
# Code of these differs between the runs: hooks, modes, and what runs a region.
_NOT_OF_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_OF_RUNS = str(Path(__file__).with_name("stage.py"))

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


_Place = tuple[Any, torch.Size, tuple[Any, ...]]
_Strides = tuple[tuple[int, ...] | None, ...]


class _Kept(NamedTuple):
    """A decision of the first run.

    Args:
        result: what a second run is given: a copy, a `PackedMask` or a Python number.
        strides: the strides of each tensor that the operator returned; None if it is contiguous.
        num_saves: how many residuals the run had saved before; None if it saves none.
    """

    result: Any
    strides: _Strides
    num_saves: int | None


class Decisions:
    """The decisions of the first run of a call, in order.

    Args:
        name: the name of the call in error messages.
    """

    __slots__ = ("_is_first_look", "_kept", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_first_look = False
        self._kept: dict[_Place, list[_Kept]] = {}

    @property
    def are_any(self) -> bool:
        """Whether the first run decided anything."""
        return bool(self._kept)

    def recording(
        self,
        effects: SideEffects | None,
        num_saves: Callable[[], int] | None,
        *,
        is_first_look: bool,
    ) -> InMode:
        """Return a context for the first run, which keeps its decisions.

        Args:
            effects: is told of the operators, if any may write to a buffer.
            num_saves: returns how many residuals the run has saved; None if it saves none.
            is_first_look: whether compiled code does not run as such in it (See Rule 5).
        """
        self._is_first_look = is_first_look
        watching = effects if effects is not None and effects.has_buffers else None
        return InMode(_Keeping(self._kept, watching, num_saves))

    def repeating(self, num_saves: Callable[[], int] | None) -> InMode:
        """Return a context for a later run, which is given these decisions.

        Args:
            num_saves: returns how many residuals the run has made again; None if it makes none.
        """
        kind = _RepeatingEagerly if self._is_first_look else _Repeating
        return InMode(kind(self._kept, num_saves))


class _Keeping(DispatchMode):
    """A mode that keeps decisions."""

    supports_higher_order_operators = True

    def __init__(
        self,
        kept: dict[_Place, list[_Kept]],
        effects: SideEffects | None,
        num_saves: Callable[[], int] | None,
    ) -> None:
        super().__init__()
        self._kept = kept
        self._effects = effects
        self._num_saves = num_saves

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
        way = way_of(func)
        if way is not None and _is_of_floats(args):
            kept = way.keep(args, given, result)
            if kept is not None:
                num_saves = None if self._num_saves is None else self._num_saves()
                one = _Kept(kept, _strides_of(result), num_saves)
                self._kept.setdefault(_place(func, args), []).append(one)
        return result


class _Repeating(DispatchMode):
    """A mode that answers with decisions of the first run (See Rule 2)."""

    supports_higher_order_operators = True

    def __init__(
        self, kept: dict[_Place, list[_Kept]], num_saves: Callable[[], int] | None
    ) -> None:
        super().__init__()
        self._kept = kept
        self._num_saves = num_saves
        self._next: dict[_Place, int] = {}  # the first decision that was not repeated

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
        way = way_of(func)
        if way is None or not _is_of_floats(args):
            return func(*args, **given)
        if way is CONVERSION and not is_kept_conversion(args[0], given):
            return func(*args, **given)
        place = _place(func, args)
        kept = self._find(place)
        if kept is None:
            return func(*args, **given)  # See Rule 3
        if way.draws:
            func(*args, **given)
        return _strided(way.repeat(kept.result, args, given), kept.strides)

    def _find(self, place: _Place) -> _Kept | None:
        """Return the next decision of a place that was made here, or None (See Rule 3)."""
        kept = self._kept.get(place, ())
        num_saves = None if self._num_saves is None else self._num_saves()
        for index in range(self._next.get(place, 0), len(kept)):
            then = kept[index].num_saves
            if num_saves is None or then is None or then == num_saves:
                self._next[place] = index + 1
                return kept[index]
            if then > num_saves:
                return None
        return None


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


def _place(func: Any, args: Any) -> _Place:
    """Return what a decision is known by (See Rule 3)."""
    shape = next((value.shape for value in args if isinstance(value, Tensor)), torch.Size())
    lines: list[Any] = []
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _OF_RUNS:
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_OF_USERS):
            lines += (id(code), frame.f_lasti)
        frame = frame.f_back
    return func, shape, tuple(lines)


def _strides_of(result: Any) -> _Strides:
    """Return the strides of tensors that are not contiguous."""
    results = cast("tuple[Any, ...]", result if isinstance(result, tuple) else (result,))
    return tuple(
        None if not isinstance(each, Tensor) or each.is_contiguous() else each.stride()
        for each in results
    )


def _strided(result: Any, strides: _Strides) -> Any:
    """Return a result in the memory layout that it had in the first run."""
    if not any(strides):
        return result
    results = cast("tuple[Any, ...]", result if isinstance(result, tuple) else (result,))
    found: list[Any] = []
    for each, stride in zip(results, strides, strict=True):
        if stride is not None and each.stride() != stride:
            laid = torch.empty_strided(each.shape, stride, dtype=each.dtype, device=each.device)
            each = laid.copy_(each)
        found.append(each)
    return tuple(found) if isinstance(result, tuple) else found[0]
