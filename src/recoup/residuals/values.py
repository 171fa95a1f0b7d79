"""Values that are not kept: tensors that backward is given although nobody held them.

NOTE [ A value brings its hooks along ]

Rule 1. A `Value` is a tensor whose `Source` can make it again. Each operator that takes one runs
        under a pair of saved-tensor hooks of ours, and no other operator does; so between two
        operators, and after an exception, nothing of ours is on the stack of hooks.
Rule 2. What an operator saves is told by its storage: views of a value are values, with sizes,
        strides and offset remembered. Everything else goes to the pair beneath.
Rule 3. A copy in another type (autocast makes one) has a storage of its own. It is told by the
        node that made it, and made again by casting.
Rule 4. A value that was changed in place before it was saved is nobody's, and is kept as it is.
        One that is changed after it was saved is an error in backward: a tensor without memory
        shares its version counter and is the witness.
Rule 5. The slots of a source own what it makes together: it is made when the first of them is
        asked for and dies with the last, so a weight that is used at every time step is made
        once. What some slot did not ask for by the end of a backward is let go then.
Rule 6. A source holds no node of the graph that holds it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from recoup.errors import ChangedError, ReplayError
from recoup.residuals.compiler import never_compiled
from recoup.residuals.hooks import Kept, Pair, pair_in_force, saving, version_of
from recoup.residuals.listening import here

__all__ = ["Source", "Value", "as_value"]

_engine: Any = torch.autograd.Variable._execution_engine
_plainly = torch._C.DisableTorchFunctionSubclass


class Source:
    """What can make a value again.

    Args:
        name: what errors call the value.
        lock: taken while it is made; sources that are made together share one.
    """

    __slots__ = (
        "__weakref__",
        "_dtype",
        "_is_exposed",
        "_lock",
        "_made",
        "_slots",
        "_version",
        "_waiting",
        "_witness",
        "name",
    )

    def __init__(self, name: str, lock: threading.RLock | None = None) -> None:
        self.name = name
        self._lock = threading.RLock() if lock is None else lock
        self._slots: list[weakref.ref[_Slot]] = []
        self._made: Tensor | None = None
        self._waiting: set[int] = set()
        self._witness: Tensor | None = None
        self._version = 0
        self._dtype: torch.dtype | None = None
        self._is_exposed = False

    def make(self) -> None:
        """Make the value again and `give` it."""
        raise NotImplementedError

    @property
    def is_wanted(self) -> bool:
        """Whether any slot can still be asked for."""
        return any(ref() is not None for ref in self._slots)

    def give(self, made: Tensor) -> None:
        """Take the value that was made, if any slot can still be asked for (See Rule 5)."""
        alive = [slot for ref in self._slots if (slot := ref()) is not None]
        if alive:
            self._made = made.detach()
            self._waiting = {id(slot) for slot in alive}

    def _watch(self, tensor: Tensor) -> None:
        self._dtype = tensor.dtype
        self._version = version_of(tensor)
        self._witness = tensor.detach()  # shares the version counter (See Rule 4)
        self._witness.data = tensor.new_empty(0)

    def _owns(self, tensor: Tensor) -> bool:
        if version_of(tensor) != self._version or tensor.dtype is not self._dtype:
            return False
        if self._is_exposed:
            return False
        return not (tensor.is_conj() or tensor.is_neg())  # their numbers are not the storage's

    def _slot(self, tensor: Tensor, cast_from: Tensor | None) -> _Slot:
        slot = _Slot(self, tensor, cast_from)
        self._slots.append(weakref.ref(slot))
        if here.listener is not None:
            here.listener.told(tensor, slot)
        return slot

    def _get(self, slot: _Slot) -> Tensor:
        with self._lock:
            if self._witness is not None and version_of(self._witness) != self._version:
                raise ChangedError(
                    f"{self.name} is made again in backward, and was changed in place after an "
                    "operator had saved it. Change a clone."
                )
            is_fresh = self._made is None
            if is_fresh:
                self.make()
            made = self._made
            if made is None:
                raise ReplayError(f"{self.name} could not be made again.")
            self._waiting.discard(id(slot))
            if not self._waiting or not _is_in_backward():
                self._forget()
            elif is_fresh:
                _engine.queue_callback(_Forgetting(self))
            return made

    def _forget(self) -> None:
        with self._lock:
            self._made = None
            self._waiting = set()


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class _Forgetting:
    """At the end of a backward: let go of what nobody asked for (See Rule 5)."""

    def __init__(self, source: Source) -> None:
        self._source = weakref.ref(source)

    def __call__(self) -> None:
        source = self._source()
        if source is not None:
            source._forget()


class _Slot:
    """What autograd holds in the place of a value, or of a view or a cast of it."""

    __slots__ = ("__weakref__", "_cast", "_geometry", "_source")

    def __init__(self, source: Source, tensor: Tensor, cast_from: Tensor | None) -> None:
        self._source = source
        self._cast = None if cast_from is None else (_geometry(cast_from), tensor.dtype)
        self._geometry = _geometry(tensor)

    def get(self) -> Tensor:
        made = self._source._get(self)
        if self._cast is not None:
            geometry, dtype = self._cast
            made = made.as_strided(*geometry).to(dtype)  # See Rule 3
        return made.as_strided(*self._geometry)


def _geometry(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())


class Value(Tensor):
    """A tensor that is not kept for backward, by whichever operator takes it (See Rule 1)."""

    _recoup_source: Source

    @classmethod
    @never_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator with the values among its arguments not kept."""
        kwargs = kwargs or {}
        if func in _COPIES:
            args = tuple(_plain(value) for value in args)
        with _plainly():
            if func in _EXPOSES:
                _expose(args)
            if func in _LOOKS or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return func(*args, **kwargs)
            return _run(func, args, kwargs)


_LOOKS: frozenset[Any] = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "grad_fn",
        "_version", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "is_meta",
        "itemsize", "nbytes", "names", "is_mkldnn", "is_mps", "is_xpu", "output_nr",
    )
    if hasattr(Tensor, name)
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point,
     Tensor.storage_offset, Tensor.data_ptr, Tensor.is_contiguous,
     Tensor.is_complex, Tensor.nelement, Tensor.element_size, Tensor.__len__, Tensor.__hash__,
     Tensor.__repr__, Tensor.register_hook, Tensor.backward, torch.autograd.backward,
     torch.autograd.grad, Tensor.as_subclass}  # fmt: skip
# Through these a value may be changed without its version telling: it is kept from then on.
_EXPOSES: frozenset[Any] = frozenset(
    (getattr(Tensor, "data").__get__, Tensor.numpy, Tensor.untyped_storage)  # noqa: B009
)
_COPIES: frozenset[Any] = frozenset(
    getattr(Tensor, name) for name in ("__deepcopy__", "__reduce_ex__")
)


def as_value(tensor: Tensor, source: Source) -> Tensor:
    """Return `tensor`, not kept from now on: `source` can make it again."""
    source._watch(tensor)
    return _marked(tensor, source)


def _marked(tensor: Tensor, source: Source) -> Tensor:
    tensor.__class__ = Value  # no alias, which would be a node more in the graph
    value = cast("Value", tensor)
    value._recoup_source = source
    return value


def _expose(args: tuple[Any, ...]) -> None:
    for value in args:
        if isinstance(value, Value):
            value._recoup_source._is_exposed = True


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Value) else value


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values: list[Value] = []
    _collect(args, values)
    if kwargs:
        _collect(kwargs, values)
    seam = _Seam(func, values)
    try:
        with saving(seam.pack, _unpack):
            result = func(*args, **kwargs)
        return seam.marked(result)
    finally:
        seam.close()


def _collect(value: Any, found: list[Value]) -> None:
    if isinstance(value, Tensor):
        if isinstance(value, Value):
            found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in cast("Iterable[Any]", value):
            _collect(item, found)
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            _collect(item, found)


class _Seam:
    """The pair of hooks around one operator."""

    __slots__ = ("_beneath", "_name", "_sources", "_values")

    def __init__(self, func: Callable[..., Any], values: list[Value]) -> None:
        self._values = values
        self._sources = {
            value.untyped_storage()._cdata: value._recoup_source
            for value in values
            if value.layout is torch.strided
        }
        self._beneath: Pair | None = pair_in_force()
        self._name = f"A tensor that {getattr(func, '__name__', 'an operator')} saved"

    @never_compiled
    def pack(self, tensor: Tensor) -> _Slot | Kept:
        if tensor.layout is torch.strided:
            source = self._sources.get(tensor.untyped_storage()._cdata)
            if source is not None:
                if source._owns(tensor):
                    return source._slot(tensor, None)  # See Rule 2
            elif tensor.grad_fn is not None:
                value = self._cast_value(tensor)
                if value is not None:
                    return value._recoup_source._slot(tensor, value)
        return Kept(tensor, self._name, self._beneath)

    def _cast_value(self, tensor: Tensor) -> Value | None:
        """Return the value that `tensor` is a cast of, or a view of a cast of."""
        base = tensor if tensor._base is None else tensor._base
        node = base.grad_fn
        if node is None or node.name() != "ToCopyBackward0" or version_of(base) != 0:
            return None
        before = node.next_functions[0][0]
        for value in self._values:
            if before is not None and value.grad_fn is before:
                return value if value._recoup_source._owns(value) else None
        return None

    def close(self) -> None:
        """Let go of the values: whatever was saved holds on to the pair of hooks."""
        self._values = []
        self._sources = {}

    def marked(self, result: Any) -> Any:
        """Mark the results that are views of values (See Rule 2)."""
        if isinstance(result, Tensor):
            if type(result) is Tensor and result.layout is torch.strided:
                source = self._sources.get(result.untyped_storage()._cdata)
                if source is not None and source._owns(result):
                    return _marked(result, source)
        elif type(result) in (tuple, list):
            return type(result)(self.marked(item) for item in result)
        return result


@never_compiled
def _unpack(packed: _Slot | Kept) -> Tensor:
    return packed.get()
