"""Costly operators: their work, counted and not clocked, and calls that keep what they make.

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
from collections.abc import Callable, Container, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from recoup._core.call import Call
from recoup._core.compile import never_compiled
from recoup._core.dispatch_modes import DispatchMode, InMode
from recoup._core.generators import States, generator_states, same_states, set_generator_states
from recoup._core.memory_layout import geometry_of, laid_out
from recoup._core.operators import has_schema, map_instances, traits_of
from recoup._core.packed_masks import PackedMask
from recoup._core.pytree import tensors_in
from recoup._core.save_observer import Way, observed_by
from recoup._core.saved_tensors import Kept, Pair, num_nodes, pair_in_force, storage_id
from recoup._core.storage_tracking import bytes_of, storages_of
from recoup.errors import ReplayError
from recoup.planning.forwards import Args, Kwargs

__all__ = [
    "KeepingCall",
    "KeptTensor",
    "Product",
    "WorkCounter",
    "is_costly",
    "is_mask",
]

# The approximate number of floating-point operations in the time in which one byte is moved. It
# weighs products against elementwise operators. Choices depend little on it; a constant keeps them
# reproducible.
_FLOPS_PER_BYTE = {"cpu": 10.0, "cuda": 100.0}
# Drawing a byte of random numbers takes as long as moving this many bytes.
_BYTES_PER_DRAWN_BYTE = {"cpu": 30.0}

_COSTLY_NAMES = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_scaled_mm", "_grouped_mm", "linear",
    "convolution", "mkldnn_convolution", "_mkldnn_linear", "mkldnn_rnn_layer", "_cudnn_rnn",
))  # fmt: skip


def is_costly(func: Any) -> bool:
    """Whether the output of an operator is worth keeping.

    That holds for products, convolutions, attention, recurrent layers, and dropout masks, which are
    kept as bits.
    """
    name = getattr(getattr(func, "_overloadpacket", func), "__name__", "")
    return name in _COSTLY_NAMES or "_attention" in name or is_mask(func)


def is_mask(func: Any) -> bool:
    """Whether an operator fills a tensor with draws of 0 and 1."""
    return func is torch.ops.aten.bernoulli_.float or func is torch.ops.aten.bernoulli_.Tensor


class Product(NamedTuple):
    """A costly operator that ran.

    Args:
        name: the name of the operator.
        work: its counted work.
        num_bytes: the bytes of its output.
        is_needed: whether a residual was saved after it began, so that recomputation reaches it.
    """

    name: str
    work: float
    num_bytes: int
    is_needed: bool


class WorkCounter(DispatchMode):
    """A mode that counts the work of operators, and the residuals that regions do not keep.

    Work is measured in bytes moved; a floating-point operation of a product counts as a fraction of
    a byte.

    Args:
        counts_operators: whether operators are counted. If not, no mode is active, under which
            nothing would be compiled.
    """

    supports_higher_order_operators = True

    def __init__(self, *, counts_operators: bool = True) -> None:
        super().__init__()
        self._mode = InMode(self) if counts_operators else nullcontext()
        self.work = 0.0
        self.num_operators = 0
        self._products: list[Product] = []
        self._outputs: list[WeakSet[torch.UntypedStorage]] = []  # of each product
        self._residuals = WeakSet[torch.UntypedStorage]()
        self._num_needed = 0
        self._around: Any = None

    @contextmanager
    def counting(self) -> Generator[None]:
        """Return a context in which operators are counted."""
        with self._mode, observed_by(self) as self._around:
            yield

    def saved(self, tensor: Tensor, slot: Any, way: Way) -> None:
        """Record that a region does not keep the residual `tensor`."""
        self._num_needed = len(self._products)
        if (
            getattr(slot, "expected", None) is None
        ):  # else the region itself keeps it, for this step
            self._residuals.update(storages_of([tensor]))
        if self._around is not None:
            self._around.saved(tensor, slot, way)

    @property
    def products(self) -> list[Product]:
        """The costly operators, in order."""
        needed = self._products[: self._num_needed]
        return [each._replace(is_needed=True) for each in needed] + self._products[len(needed) :]

    def alive_bytes(self, left_out: Container[torch.UntypedStorage]) -> int:
        """Return the bytes of residuals that regions do not keep, but other code keeps alive."""
        return sum(each.nbytes() for each in self._residuals if each not in left_out)

    def products_alive(self) -> list[bool]:
        """Return, for each costly operator, whether its output is alive."""
        return [len(storages) > 0 for storages in self._outputs]

    @never_compiled
    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count it."""
        kwargs = {} if kwargs is None else kwargs
        result = func(*args, **kwargs)
        self.num_operators += 1
        if not getattr(func, "is_view", False):
            outputs = tensors_in(result)
            work = _work(func, args, kwargs, result, outputs)
            self.work += work
            if is_costly(func):
                self._add(func, work, outputs)
        return result

    def _add(self, func: Any, work: float, outputs: Sequence[Tensor]) -> None:
        if is_mask(func):
            num_bytes = -(-outputs[0].numel() // 8)
            outputs = ()  # the bits themselves are no residual
        else:
            num_bytes = bytes_of(outputs)
        self._products.append(Product(str(func), work, num_bytes, is_needed=False))
        self._outputs.append(WeakSet(storages_of(outputs)))


@functools.cache
def _flop_registry() -> dict[Any, Any]:
    # Imported late, because this module of torch imports triton where that is installed.
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _work(
    func: Any, args: Any, kwargs: dict[str, Any], result: Any, outputs: Sequence[Tensor]
) -> float:
    num_bytes, device = 0, "cpu"
    for tensor in (*outputs, *tensors_in((args, kwargs))):
        num_bytes += tensor.numel() * tensor.element_size()
        device = tensor.device.type
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and outputs:
        drawn_bytes = outputs[0].numel() * outputs[0].element_size()
        num_bytes += int(_BYTES_PER_DRAWN_BYTE.get(device, 0.0) * drawn_bytes)
    count = _flop_registry().get(getattr(func, "_overloadpacket", func))
    flops = 0.0 if count is None else float(count(*args, **kwargs, out_val=result))
    return num_bytes + flops / _FLOPS_PER_BYTE.get(device, _FLOPS_PER_BYTE["cuda"])


_OTHER, _CAST, _COSTLY = range(3)


class _CostlyOp(NamedTuple):
    """A costly operator of the first run.

    Args:
        func: the operator.
        mark: its place in the graph (See Rule 2).
        shapes: the shapes of its input tensors.
    """

    func: Any
    mark: int
    shapes: tuple[torch.Size, ...]


class _KeptOutput(NamedTuple):
    """A copy of the output of a chosen operator.

    Args:
        output: the output, with a `KeptTensor` in place of each tensor; or the `PackedMask`.
        states: the states of the generators after it, if it drew (See Rule 3).
    """

    output: Any
    states: States | None


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
        chosen: the numbers of the chosen costly operators.
    """

    __slots__ = ("_chosen", "_is_recorded", "_kept", "_num_seen", "_ops", "_pair", "kept_nodes")

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        module: nn.Module | None,
        chosen: frozenset[int],
    ) -> None:
        super().__init__(name, fn, args, kwargs, module)
        self._chosen = chosen
        self._pair = pair_in_force()
        self._ops: list[_CostlyOp] = []
        self._kept: dict[int, _KeptOutput] = {}  # by number
        self._is_recorded = False  # whether the first run has ended
        self._num_seen = 0  # the costly operators that a later run has reached
        self.kept_nodes: set[int] = set()  # of the operators whose outputs are kept

    def _called(self, given: Any) -> Any:
        if not self._is_recorded:
            with InMode(_Interceptor(self._run_first)):
                result = super()._called(given)
            self._first_run_ended()
            return result
        try:
            with InMode(_Interceptor(self._run_again)):
                return super()._called(given)
        finally:
            self._kept.clear()  # See Rule 7
            self._num_seen = 0

    def _run_first(self, func: Any, args: Any, kwargs: dict[str, Any], mark: int) -> Any:
        """Run an operator, and copy its output if it is chosen."""
        number = len(self._ops)
        given = tensors_in((args, kwargs))
        self._ops.append(_CostlyOp(func, mark, tuple(tensor.shape for tensor in given)))
        if number not in self._chosen:
            return func(*args, **kwargs)
        before = generator_states() if _may_draw(func) else None
        result = func(*args, **kwargs)
        after = None if before is None else generator_states()
        if is_mask(func):
            if type(result) is Tensor and not result.is_sparse:
                self._kept[number] = _KeptOutput(PackedMask(result), after)
        elif _can_be_kept(func, result, given):
            drew = before is not None and after is not None and not same_states(before, after)
            copy = map_instances(result, Tensor, KeptTensor)
            self._kept[number] = _KeptOutput(copy, after if drew else None)
            self.kept_nodes.add(num_nodes() - 1)
        return result

    def _first_run_ended(self) -> None:
        """Pass the outputs to the saved-tensor hooks (See Rule 7)."""
        pair, self._pair = self._pair, None
        self._is_recorded = True
        for number, kept in self._kept.items():
            name = f"What {self._ops[number].func} made in {self.name}"
            keep = functools.partial(KeptTensor.keep, name=name, pair=pair)
            map_instances(kept.output, KeptTensor, keep)

    def _run_again(self, func: Any, args: Any, kwargs: dict[str, Any], mark: int) -> Any:
        """Return the output of an operator in the first run, or run the operator again."""
        number = self._num_seen
        self._num_seen = number + 1
        kept = self._kept.pop(number, None)
        if number >= len(self._ops) or self._ops[number].mark != mark:
            return func(*args, **kwargs)
        self._check(self._ops[number], func, args, kwargs)
        if kept is None:
            return func(*args, **kwargs)
        if kept.states is not None:
            set_generator_states(kept.states)
        if isinstance(kept.output, PackedMask):
            return args[0].copy_(kept.output.unpacked())
        return map_instances(kept.output, KeptTensor, KeptTensor.get)

    def _check(self, first: _CostlyOp, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        shapes = tuple(tensor.shape for tensor in tensors_in((args, kwargs)))
        if first.func is not func or first.shapes != shapes:
            raise ReplayError(
                f"Running {self.name} again called {func} on shapes {[*map(tuple, shapes)]} where "
                f"the first run called {first.func} on {[*map(tuple, first.shapes)]}. A region "
                "must do the same when it runs again: look for outside state that it reads."
            )


class _Interceptor(DispatchMode):
    """A mode in which costly operators go through `run`, with their place (See Rule 2)."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, Any, Any, int], Any]) -> None:
        super().__init__()
        self._run = run
        self._start = num_nodes()
        self._num_casts = 0

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        kind = _kind_of(func)
        if kind == _COSTLY:
            mark = num_nodes() - self._start - self._num_casts
            return self._run(func, args, kwargs or {}, mark)
        if kind == _CAST:
            self._num_casts += 1
        return func(*args, **kwargs) if kwargs else func(*args)


@functools.cache
def _kind_of(func: Any) -> int:
    if func is torch.ops.aten._to_copy.default:
        return _CAST
    return _COSTLY if is_costly(func) else _OTHER


def _may_draw(func: Any) -> bool:
    return not has_schema(func) or traits_of(func).may_draw


def _can_be_kept(func: Any, result: Any, given: Sequence[Tensor]) -> bool:
    """Whether the outputs are plain, share no memory, and are all that `func` does (Rule 5)."""
    if has_schema(func) and traits_of(func).writes:
        return False
    seen = {storage_id(tensor) for tensor in given if tensor.layout is torch.strided}
    for tensor in tensors_in(result):
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not is_plain or tensor.is_inference() or storage_id(tensor) in seen:
            return False
        seen.add(storage_id(tensor))
    return True


class KeptTensor:
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
