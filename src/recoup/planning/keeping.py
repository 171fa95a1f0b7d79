"""A region that keeps the outputs of chosen operators and recomputes all others.

NOTE [ Kept outputs ]

Rule 1. Operators are intercepted below autograd and autocast, and the costly ones are numbered.
        In the second run a chosen operator is not executed: its output of the first run is
        returned in its place.
Rule 2. An output is returned only at the place where it was made: after the same number of graph
        nodes, not counting casts (autocast caches casts in the first run only). At another place
        the operator runs again, which is slower but right. Another operator or other input shapes
        at the same place are an error.
Rule 3. If an operator drew random numbers in the first run, the second run sets the generators to
        their state after that operator, so that later draws are the same.
Rule 4. The kept output is a copy, made as soon as the operator has run. The output itself may be
        written to, during the call or after it, by a kernel that torch does not see (numpy,
        Triton) or through a view with a version counter of its own (`_unsafe_view`, which every
        batched `torch.matmul` returns). No check would detect all of these writes.
Rule 5. Outputs are kept only if they are plain tensors that share no memory with the inputs of the
        operator or with each other, and only if the operator writes to none of its inputs.
Rule 6. Of an operator that fills a tensor with draws of 0 and 1 (the mask of a dropout), the draws
        are kept, one bit each; later writes to the tensor do not change them.
Rule 7. When the first run has ended, outputs go through the saved-tensor hooks that are in force
        around the call, as its inputs do. Each is returned once, and all are freed with the
        second run, so that memory falls as backward proceeds. In a further backward
        (retain_graph), the call runs all of its operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup._core.autocast_copies import geometry_of, laid_out
from recoup._core.call import Call
from recoup._core.dispatch_modes import InMode
from recoup._core.region import num_nodes
from recoup._core.rng import States, generator_states, same_states, set_generator_states
from recoup._core.saved_tensors import Kept, Pair, pair_in_force
from recoup._core.storage_tracking import storage_id
from recoup.errors import ReplayError
from recoup.planning.bits import Bits
from recoup.planning.work import is_costly, is_mask

__all__ = ["KeepingCall", "Keeps"]

Keeps = Callable[[Any, int], bool] | frozenset[int]

_OTHER, _CAST, _COSTLY = range(3)
_kinds: dict[Any, int] = {}  # a cache: the kind of an operator is needed at every call of it


class KeepingCall(Call):
    """A recomputed call whose chosen operators run only once.

    Kept: the tensors in the arguments, the outputs of the chosen operators, and 5 KB of random
    state for each of them that draws. Backward pays one more run without these operators. The
    overhead of both runs together is 10 microseconds for each operator, and 20 and a copy for each
    kept one.

    Args:
        name: the name of the call in errors.
        fn: the function to call.
        args: its arguments.
        kwargs: its keyword arguments.
        module: the module whose forward `fn` is; None if there is none, or `fn` is the module.
        keeps: the numbers of the chosen costly operators, or a function from an operator and its
            number to whether it is chosen.
    """

    __slots__ = ("_outputs",)

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None,
        keeps: Keeps,
    ) -> None:
        super().__init__(name, fn, args, kwargs, module)
        self._outputs = _Outputs(name, keeps, pair_in_force())

    def _called(self, given: Any) -> Any:
        outputs = self._outputs
        if outputs.is_noted:
            try:
                with InMode(_Met(outputs.hand_out)):
                    return super()._called(given)
            finally:
                outputs.forget()
        with InMode(_Met(outputs.note)):
            result = super()._called(given)
        outputs.first_run_ended()
        return result


class _Met(TorchDispatchMode):
    """A mode in which costly operators go through `run`, with their place (See Rule 2)."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, Any, Any, int], Any]) -> None:
        super().__init__()
        self._run = run
        self._start = num_nodes()
        self._num_casts = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = _kind_of(func)
        if kind == _COSTLY:
            mark = num_nodes() - self._start - self._num_casts
            return self._run(func, args, kwargs or {}, mark)
        if kind == _CAST:
            self._num_casts += 1
        return func(*args, **kwargs) if kwargs else func(*args)


def _kind_of(func: Any) -> int:
    if func is torch.ops.aten._to_copy.default:
        return _CAST
    return _COSTLY if is_costly(func) else _OTHER


class _Operator(NamedTuple):
    """A costly operator of the first run.

    Args:
        func: the operator.
        mark: its place in the graph (See Rule 2).
        shapes: the shapes of its input tensors.
    """

    func: Any
    mark: int
    shapes: tuple[torch.Size, ...]


class _Made(NamedTuple):
    """A copy of the output of a chosen operator.

    Args:
        result: the output, with an `_Output` in place of each tensor.
        states: the states of the generators after it, if it drew (See Rule 3).
        bits: the draws of a mask (See Rule 6).
    """

    result: Any
    states: States | None
    bits: Bits | None = None


class _Outputs:
    """The outputs of the chosen operators of one call.

    Args:
        name: the name of the call in errors.
        keeps: the chosen operators, as in `KeepingCall`.
        pair: the saved-tensor hooks in force around the call.
    """

    __slots__ = ("_keeps", "_made", "_name", "_operators", "_pair", "_place", "is_noted")

    def __init__(self, name: str, keeps: Keeps, pair: Pair | None) -> None:
        self.is_noted = False
        self._name = name
        self._keeps = keeps
        self._pair = pair
        self._operators: list[_Operator] = []
        self._made: dict[int, _Made] = {}
        self._place = 0

    # -- the first run ---------------------------------------------------------------------

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], mark: int) -> Any:
        """Run an operator, and copy its output if it is chosen."""
        place, keeps = len(self._operators), self._keeps
        given = tuple(_tensors((args, tuple(kwargs.values()))))
        self._operators.append(_Operator(func, mark, tuple(tensor.shape for tensor in given)))
        if not (place in keeps if isinstance(keeps, frozenset) else keeps(func, place)):
            return func(*args, **kwargs)
        before = generator_states() if _may_draw(func) else None
        result = func(*args, **kwargs)
        if is_mask(func):
            if before is not None and type(result) is Tensor and not result.is_sparse:
                self._made[place] = _Made(None, generator_states(), Bits(result))
            return result
        after = None if before is None else generator_states()
        drew = before is not None and after is not None and not same_states(before, after)
        if not _writes(func) and _can_be_kept(result, given):
            self._made[place] = _Made(_mapped(_Output, result), after if drew else None)
        return result

    def first_run_ended(self) -> None:
        """Pass the outputs to the saved-tensor hooks (See Rule 7)."""
        pair, self._pair = self._pair, None
        self.is_noted = True
        for place, made in self._made.items():
            for output in _outputs(made.result):
                output.keep(f"What {self._operators[place].func} made in {self._name}", pair)

    # -- later runs ------------------------------------------------------------------------

    def hand_out(self, func: Any, args: Any, kwargs: dict[str, Any], mark: int) -> Any:
        """Return the output of an operator in the first run, or run the operator again."""
        place = self._place
        self._place = place + 1
        made = self._made.pop(place, None)
        is_same = place < len(self._operators) and self._operators[place].mark == mark
        if is_same:
            self._check(self._operators[place], func, args, kwargs)
        if made is None or not is_same:
            return func(*args, **kwargs)
        if made.states is not None:
            set_generator_states(made.states)
        if made.bits is not None:
            return args[0].copy_(made.bits.unpacked())
        return _mapped(_Output.get, made.result)

    def forget(self) -> None:
        """Free the outputs that were not returned, and reset the place (See Rule 7)."""
        self._made.clear()
        self._place = 0

    def _check(self, first: _Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        shapes = tuple(tensor.shape for tensor in _tensors((args, tuple(kwargs.values()))))
        if first.func is not func or first.shapes != shapes:
            raise ReplayError(
                f"Running {self._name} again called {func} on shapes {[*map(tuple, shapes)]} where "
                f"the first run called {first.func} on {[*map(tuple, first.shapes)]}. A region "
                "must do the same when it runs again: look for outside state that it reads."
            )


class _Output:
    """A copy of a tensor that a chosen operator made (See Rule 4)."""

    __slots__ = ("_geometry", "_kept")

    def __init__(self, tensor: Tensor) -> None:
        self._geometry = geometry_of(tensor)
        self._kept: Tensor | Kept = tensor.clone()

    def keep(self, name: str, pair: Pair | None) -> None:
        """Pass the copy to the saved-tensor hooks `pair` (See Rule 7)."""
        self._kept = Kept(cast("Tensor", self._kept), name, pair)

    def get(self) -> Tensor:
        """Return the tensor in its original layout, as hooks may return it in another one."""
        tensor = cast("Kept", self._kept).get()
        # Detached: the result gets its history later, and hooks may hold the tensor they returned.
        return laid_out(tensor, self._geometry).detach()


@functools.cache
def _may_draw(func: Any) -> bool:
    name = str(func)
    is_known = name.startswith("aten.") and "attention" not in name and "rnn" not in name
    return not is_known or is_mask(func)


@functools.cache
def _writes(func: Any) -> bool:
    """Whether the schema of an operator says that it writes to an input (See Rule 5)."""
    schema = getattr(func, "_schema", None)
    aliases = [] if schema is None else [argument.alias_info for argument in schema.arguments]
    return any(alias is not None and alias.is_write for alias in aliases)


def _can_be_kept(result: Any, given: tuple[Tensor, ...]) -> bool:
    """Whether the outputs are plain and share no memory (See Rule 5)."""
    met = {storage_id(t) for t in given if t.layout is torch.strided}
    for tensor in _tensors(result):
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not is_plain or tensor.is_inference() or storage_id(tensor) in met:
            return False
        met.add(storage_id(tensor))
    return True


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in cast("tuple[Any, ...]", value):
            yield from _tensors(each)


def _outputs(result: Any) -> Iterator[_Output]:
    if isinstance(result, _Output):
        yield result
    elif isinstance(result, tuple):
        for each in cast("tuple[Any, ...]", result):
            yield from _outputs(each)


def _mapped(change: Callable[[Any], Any], result: Any) -> Any:
    """Return a result with `change` applied to each tensor and each `_Output` in it."""
    if isinstance(result, (Tensor, _Output)):
        return change(result)
    if isinstance(result, (tuple, list)):
        return tuple(_mapped(change, each) for each in cast("tuple[Any, ...]", result))
    return result
