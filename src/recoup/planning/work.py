"""The work of a call, counted instead of timed, so that it is reproducible."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from recoup._core.compile import never_compiled
from recoup._core.kept_products import is_mask
from recoup._core.operators import DispatchMode, InMode
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import Way, observed_by
from recoup._core.storage_tracking import bytes_of, storages_of
from recoup._core.tensors import is_without_values
from recoup.errors import RecoupError

# The approximate number of floating-point operations in the time in which one byte is moved. It
# weighs products against elementwise operators. Choices depend little on it; a constant keeps them
# reproducible.
_FLOPS_PER_BYTE = {"cpu": 10.0}
_FLOPS_PER_BYTE_OF_ACCELERATORS = 100.0
# Drawing a byte of random numbers takes as long as moving this many bytes.
_BYTES_PER_DRAWN_BYTE = {"cpu": 30.0}

# Bytes that are moved in a second, where time is counted; the times of a step are compared with one
# another, so only what is not counted (the hooks of a region) depends on it.
_BYTES_PER_SECOND = 1e10
# The seconds of moving a byte to host memory and back: those of 120 bytes within a device.
SECONDS_PER_MOVED_BYTE = 120.0 / _BYTES_PER_SECOND

# Operators that return a workspace, which is empty where they run without values.
_WITH_WORKSPACE = frozenset((
    torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten._cudnn_rnn, torch.ops.aten.miopen_rnn,
))  # fmt: skip

_COSTLY_NAMES = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "_scaled_mm", "_grouped_mm", "linear",
    "convolution", "mkldnn_convolution", "_mkldnn_linear", "mkldnn_rnn_layer", "_cudnn_rnn",
))  # fmt: skip


def is_costly(func: Any) -> bool:
    """Whether the output of an operator is worth keeping; masks of dropout are kept as bits."""
    return _name_of(func) in _COSTLY_NAMES or is_attention(func) or is_mask(func)


def is_attention(func: Any) -> bool:
    """Whether an operator is a kernel of attention."""
    return "_attention" in _name_of(func)


def _name_of(func: Any) -> str:
    return getattr(getattr(func, "_overloadpacket", func), "__name__", "")


class Product(NamedTuple):
    """A costly operator that ran.

    Args:
        func: the operator.
        work: its counted work.
        num_bytes: the bytes of its output.
        start: the work that was counted before it.
        is_saved: whether the memory of its output is that of a residual.
        is_unchanged: whether nothing was written to it before, so that it is the residual itself.
    """

    func: Any
    work: float
    num_bytes: int
    start: float
    is_saved: bool = False
    is_unchanged: bool = True

    @property
    def is_residual(self) -> bool:
        """Whether its output is a residual, as it is."""
        return self.is_saved and self.is_unchanged


class Residual(NamedTuple):
    """A residual that was saved by a call, other than a parameter.

    Args:
        num_bytes: its bytes.
        work: the work that was counted before it was saved.
        product: the number of the costly operator whose output it is, or a view of; None for none.
        is_output: whether the call returns it.
    """

    num_bytes: int
    work: float
    product: int | None
    is_output: bool = False


class WorkCounter(DispatchMode):
    """A mode that counts the work of operators, and the residuals that regions do not keep.

    Work is measured in bytes moved; a floating-point operation of a product counts as a fraction of
    a byte.

    Args:
        call: the call whose residuals are listed; None for none.
        counts_operators: whether operators are counted. If not, no mode is active, under which
            nothing would be compiled.
    """

    supports_higher_order_operators = True

    def __init__(self, call: object = None, *, counts_operators: bool = True) -> None:
        super().__init__()
        self._call = call
        self._counts_operators = counts_operators
        self.work = 0.0
        self.products: list[Product] = []
        self._outputs: list[WeakSet[torch.UntypedStorage]] = []  # of each product
        self.saved_storages = WeakSet[torch.UntypedStorage]()
        self._listed: list[tuple[Residual, WeakSet[torch.UntypedStorage]]] = []
        self._around: Any = None
        self._due: tuple[float, Callable[[], None]] | None = None

    def when(self, work: float, call: Callable[[], None]) -> None:
        """Let `call` be called once, before the first operator after so much work."""
        self._due = (work, call)

    @contextmanager
    def counting(self) -> Generator[None]:
        """Return a context in which operators are counted."""
        # No attribute, which would be a cycle: this holds a call, with all that it was given.
        mode = InMode(self) if self._counts_operators else nullcontext()
        with mode, observed_by(self) as self._around:
            yield

    def saved(self, tensor: Tensor, slot: Any, way: Way) -> None:
        """Record that a region does not keep the residual `tensor`."""
        if getattr(slot, "expected", None) is None:  # else the region keeps it, for this step
            self.saved_storages.update(storages_of([tensor]))
        region = getattr(slot, "residuals", None)
        if self._call is not None and getattr(region, "stage", None) is self._call:
            self._list(tensor)
        if self._around is not None:
            self._around.saved(tensor, slot, way)

    def _list(self, tensor: Tensor) -> None:
        storages = WeakSet(storages_of([tensor]))
        of_product: int | None = None
        for place, outputs in enumerate(self._outputs):
            if storages and storages <= outputs:
                is_unchanged = self.products[place].is_unchanged and tensor._version == 0
                self.products[place] = self.products[place]._replace(
                    is_saved=True, is_unchanged=is_unchanged
                )
                of_product = place if is_unchanged else None
        found = Residual(bytes_of([tensor], ()), self.work, of_product)
        self._listed.append((found, storages))

    def residuals(self, outputs: Container[torch.UntypedStorage]) -> list[Residual]:
        """Return the residuals of the call, in order, given the memory of what it returned."""
        return [
            each._replace(is_output=any(storage in outputs for storage in storages))
            for each, storages in self._listed
        ]

    def alive_bytes(self, left_out: Container[torch.UntypedStorage]) -> int:
        """Return the bytes of residuals that regions do not keep, but other code keeps alive."""
        return sum(each.nbytes() for each in self.saved_storages if each not in left_out)

    @never_compiled
    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count it; a RecoupError without values if it keeps a workspace."""
        kwargs = {} if kwargs is None else kwargs
        if getattr(func, "_overloadpacket", None) in _WITH_WORKSPACE and is_without_values():
            raise RecoupError(
                f"`{func}` runs a recurrent layer, which keeps a workspace whose size is not known "
                "without running it. Use recoup.plan, where it can run."
            )
        if self._due is not None and self.work >= self._due[0]:
            (_, call), self._due = self._due, None
            call()
        result = func(*args, **kwargs)
        outputs = tensors_in(result)  # none of a question, such as of the device of a tensor
        if outputs and not getattr(func, "is_view", False):
            work = _work(func, args, kwargs, result, outputs)
            if is_costly(func):
                self._add(func, work, outputs)
            self.work += work
        return result

    def _add(self, func: Any, work: float, outputs: Sequence[Tensor]) -> None:
        if is_mask(func):
            num_bytes = -(-outputs[0].numel() // 8)
            outputs = ()  # the bits themselves are no residual
        else:
            num_bytes = bytes_of(outputs)
        self.products.append(Product(func, work, num_bytes, self.work))
        self._outputs.append(WeakSet(storages_of(outputs)))


class _Here(threading.local):
    clock: WorkCounter | None = None


_here = _Here()


@contextmanager
def timed_by_work() -> Generator[None]:
    """Return a context without values in which `counted_seconds` goes on as operators run."""
    around, _here.clock = _here.clock, WorkCounter()
    try:
        with InMode(_here.clock):
            yield
    finally:
        _here.clock = around


def counted_seconds() -> float:
    """Return the time of the operators that have run in `timed_by_work`, by their counted work."""
    return 0.0 if _here.clock is None else _here.clock.work / _BYTES_PER_SECOND


@functools.cache
def _flop_registry() -> dict[Any, Any]:
    # Imported late, because this module of torch imports triton where that is installed.
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> float:
    """Return the floating-point operations of an operator; 0 if torch cannot count them."""
    count = _flop_registry().get(getattr(func, "_overloadpacket", func))
    if count is None:
        return 0.0
    try:
        return float(count(*args, **kwargs, out_val=result))
    except AssertionError:
        if not is_attention(func):
            raise
    # torch 2.11 refuses heads that share keys. It is given the shapes of heads that do not.
    at = 1 if "backward" in _name_of(func) else 0
    q, *pair = args[at : at + 3]
    shapes = (torch.Size((*q.shape[:2], *each.shape[2:])) for each in pair)
    with suppress(AssertionError):
        return float(count(*args[:at], q, *shapes, *args[at + 3 :], **kwargs, out_val=result))
    return 0.0


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
    flops = _flops(func, args, kwargs, result)
    return num_bytes + flops / _FLOPS_PER_BYTE.get(device, _FLOPS_PER_BYTE_OF_ACCELERATORS)
