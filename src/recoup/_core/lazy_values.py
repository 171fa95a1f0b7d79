"""Values that are not kept: tensors that backward uses although nothing stored them.

NOTE [ A value brings its hooks along ]

Rule 1. A `Value` is a tensor whose `Source` can make it again. Each operator that takes one runs
        under a pair of saved-tensor hooks of ours, and no other operator does; so between two
        operators, and after an exception, nothing of ours is on the stack of hooks.
Rule 2. A saved tensor is identified by its storage: a view of a value is a value too, and its
        sizes, strides and offset are recorded. Every other tensor goes to the pair beneath.
Rule 3. A copy in another dtype (autocast makes one) has its own storage. It is identified by the
        node that made it, and made again by casting.
Rule 4. A value that was changed in place before it was saved can no longer be made again, so the
        tensor itself is kept. Changing it after it was saved is an error in backward: a tensor
        without memory shares the value's version counter and reveals the change.
Rule 5. The slots of a source share one recomputed value: it is made when the first slot is unpacked
        and freed after the last, so a weight that is used at every time step is made once. It is
        freed at the end of a backward even if some slot was not unpacked.
Rule 6. Under hooks that were not in force where a value was made or read, its saves go to those
        hooks, as the saves of any tensor do: a region counts saves, and in its second run its
        arguments are plain tensors.
Rule 7. A source holds no node of the graph that holds it.
Rule 8. A compiled graph takes no subclass, and would keep its inputs. So the graph breaks where
        compiled code passes a value to an operator, which then runs as it does in eager mode.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from recoup._core.autocast_copies import Cast, cast_of
from recoup._core.compile import never_compiled
from recoup._core.memory_layout import geometry_of
from recoup._core.pytree import tensors_in
from recoup._core.restoring import new_lock
from recoup._core.save_observer import Way, current
from recoup._core.saved_tensors import (
    Kept,
    Packed,
    Pair,
    is_in_backward,
    is_transformed,
    pair_in_force,
    saving,
    version_of,
    when_backward_ends,
)
from recoup._core.storage_tracking import storage_id
from recoup.errors import ChangedError, RecoupError, ReplayError

__all__ = [
    "HasTensor",
    "Source",
    "Value",
    "as_value",
    "hooks_around",
    "keep",
    "marked",
    "read_anew",
]

_plainly = torch._C.DisableTorchFunctionSubclass


class Source:
    """The recipe of a value: a subclass implements `make`, which makes the value again.

    Args:
        name: the name of the value in error messages.
        lock: held while the value is made; sources that are made together share one.

    Attributes:
        stands_for: what code may want that changes the value without a graph, which is an error.
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
        "stands_for",
    )

    way: ClassVar[Way] = "recompute"

    def __init__(self, name: str, lock: threading.RLock | None = None) -> None:
        self.name = name
        self._lock = new_lock() if lock is None else lock
        self._slots: list[weakref.ref[_Slot]] = []
        self._made: Tensor | None = None
        self._waiting: set[int] = set()
        self._witness: Tensor | None = None
        self._version = 0
        self._dtype: torch.dtype | None = None
        self._is_exposed = False
        self.stands_for = ""

    def make(self) -> None:
        """Make the value again and `give` it."""
        raise NotImplementedError

    @property
    def is_wanted(self) -> bool:
        """Whether autograd still holds any slot."""
        return any(ref() is not None for ref in self._slots)

    def give(self, made: Tensor) -> None:
        """Store the recomputed value if autograd still holds any slot (See Rule 5)."""
        alive = [slot for ref in self._slots if (slot := ref()) is not None]
        if alive:
            self._made = made.detach()
            self._waiting = {id(slot) for slot in alive}
            if is_in_backward():
                when_backward_ends(self._forget)

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
        return not (tensor.is_conj() or tensor.is_neg())  # the storage holds other numbers

    def _slot(self, tensor: Tensor, cast: Cast | None) -> _Slot:
        slot = _Slot(self, tensor, cast)
        self._slots.append(weakref.ref(slot))
        if current.observer is not None:
            current.observer.saved(tensor, slot, self.way)
        return slot

    def _get(self, slot: _Slot) -> Tensor:
        with self._lock:
            self._check("after an operator had saved it")
            if self._made is None:
                self.make()
            made = self._made
            if made is None:
                raise ReplayError(
                    f"{self.name} could not be recomputed: the run that should have made it ended "
                    "without it. A region must do the same when it runs again: look for outside "
                    "state that it reads."
                )
            self._waiting.discard(id(slot))
            if not self._waiting or not is_in_backward():
                self._forget()
            return made

    def _check(self, when: str) -> None:
        if self._witness is not None and version_of(self._witness) != self._version:
            raise ChangedError(
                f"{self.name} is recomputed in backward, but was changed in place {when}. Change "
                "a clone instead."
            )

    def _forget(self) -> None:
        with self._lock:
            self._made = None
            self._waiting = set()


class _Slot:
    """The object that autograd saves in place of a value, or of a view or cast of it."""

    __slots__ = ("__weakref__", "_cast", "_geometry", "_source")

    def __init__(self, source: Source, tensor: Tensor, cast: Cast | None) -> None:
        self._source = source
        self._cast = cast
        self._geometry = geometry_of(tensor)

    def check(self, when: str) -> None:
        """Raise if the value was changed in place since it was saved (See Rule 4)."""
        self._source._check(when)

    @never_compiled
    def get(self) -> Tensor:
        made = self._source._get(self)
        if self._cast is not None:
            made = self._cast.of(made)  # See Rule 3
        return made.as_strided(*self._geometry)


class Value(Tensor):
    """A tensor that no operator keeps for backward (See Rule 1)."""

    _recoup_source: Source
    _recoup_within: object  # the hooks that were in force (See Rule 6)

    @classmethod
    @never_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator without keeping the values among its arguments."""
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(  # See Rule 8
                "A value that recoup does not keep is used in compiled code. A graph cannot take "
                "it: leave out fullgraph, or use `y.as_subclass(torch.Tensor)`, which is kept."
            )
        kwargs = kwargs or {}
        if func in _COPIES:
            args = tuple(_plain(value) for value in args)
        with _plainly():
            if func in _EXPOSES:
                _expose(args)
            changed: Any = kwargs.get("out", args[0] if args else None)
            if type(changed) is cls and changed._recoup_source.stands_for:
                _check_change(func, changed, kwargs)
            if func in _LOOKS or not torch.is_grad_enabled() or is_transformed():
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
_DATA: Any = getattr(Tensor, "data").__get__  # noqa: B009
# Through these a value may change without a new version: it is kept from then on.
_EXPOSING: list[Any] = [
    _DATA, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__,
    Tensor.untyped_storage, Tensor.storage, torch.unsafe_chunk, Tensor.unsafe_chunk,
    torch.unsafe_split, Tensor.unsafe_split, torch.unsafe_split_with_sizes,
    Tensor.unsafe_split_with_sizes,
]  # fmt: skip
_EXPOSES: frozenset[Any] = frozenset(_EXPOSING)
_COPIES: frozenset[Any] = frozenset(
    getattr(Tensor, name) for name in ("__deepcopy__", "__format__", "__reduce_ex__")
)


def as_value(tensor: Tensor, source: Source) -> Tensor:
    """Return `tensor` marked as a value: it is not kept, since `source` can make it again."""
    source._watch(tensor)
    return marked(tensor, source, hooks_around())


def read_anew(tensor: Tensor) -> Tensor:
    """Return `tensor`; if it is a value, operators under the current hooks do not keep it."""
    if isinstance(tensor, Value):
        tensor._recoup_within = hooks_around()
    return tensor


class HasTensor(Packed, Protocol):
    """An object that gives a tensor back in backward: a slot, or the kept tensor."""

    def check(self, when: str) -> None:
        """Raise if it was changed in place."""
        ...


def keep(tensor: Tensor, name: str, pair: Pair | None) -> HasTensor:
    """Return a slot of the source if `tensor` is a value, else the tensor kept (See Rule 6)."""
    if isinstance(tensor, Value) and _is_here(tensor._recoup_within, hooks_around()):
        source = tensor._recoup_source
        if source._owns(tensor):
            return source._slot(tensor, None)
    return Kept(tensor, name, pair)


def hooks_around() -> object:
    """Return what stands for the saved-tensor hooks in force (See Rule 6)."""
    pair = pair_in_force()
    return None if pair is None else pair[0]


def _is_here(within: object, around: object) -> bool:
    """Whether a value read under the hooks `within` counts as one under `around` (Rule 6)."""
    return around is None or around is within


def marked(tensor: Tensor, source: Source, within: object) -> Tensor:
    """Return `tensor`, read under the hooks `within`, marked as the value of `source`."""
    tensor.__class__ = Value  # not an alias, which would add a node to the graph
    value = cast("Value", tensor)
    value._recoup_source = source
    value._recoup_within = within
    return value


def _check_change(func: Callable[..., Any], changed: Value, kwargs: dict[str, Any]) -> None:
    """Raise if an operator changes, without a graph, a value that stands for another tensor."""
    name, source = func.__name__, changed._recoup_source
    changes = "out" in kwargs or name == "__setitem__" or (name[-1] == "_" and name[-2:] != "__")
    is_data = func == _DATA
    if is_data or (changes and not (torch.is_grad_enabled() and changed.requires_grad)):
        raise RecoupError(
            f"{source.name} was read as this step uses it, and `{'data' if is_data else name}` "
            f"would change that tensor alone. To change {source.stands_for}, read it within "
            "`torch.no_grad()`, or by `get_parameter`."
        )


def _expose(args: tuple[Any, ...]) -> None:
    for value in args:
        if isinstance(value, Value):
            value._recoup_source._is_exposed = True


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Value) else value


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [each for each in tensors_in((args, kwargs)) if isinstance(each, Value)]
    seam = _Seam(func, values)
    try:
        with saving(seam.pack):
            result = func(*args, **kwargs)
        return seam.marked(result)
    finally:
        seam.close()


class _Seam:
    """The pair of hooks around one operator."""

    __slots__ = ("_around", "_beneath", "_name", "_sources", "_values")

    def __init__(self, func: Callable[..., Any], values: list[Value]) -> None:
        self._values = values
        self._sources = {
            storage_id(value): (value._recoup_source, value._recoup_within)
            for value in values
            if value.layout is torch.strided
        }
        self._beneath: Pair | None = pair_in_force()
        self._around = None if self._beneath is None else self._beneath[0]
        self._name = f"A tensor that {getattr(func, '__name__', 'an operator')} saved"

    @never_compiled
    def pack(self, tensor: Tensor) -> _Slot | Kept:
        if tensor.layout is torch.strided:
            source, within = self._sources.get(storage_id(tensor), (None, None))
            if source is not None:
                if _is_here(within, self._around) and source._owns(tensor):
                    return source._slot(tensor, None)  # See Rule 2
            elif tensor.grad_fn is not None:
                slot = self._slot_of_cast(tensor)
                if slot is not None:
                    return slot
        return Kept(tensor, self._name, self._beneath)

    def _slot_of_cast(self, tensor: Tensor) -> _Slot | None:
        """Return a slot if `tensor` is a cast of a value, or a view of one (See Rule 3)."""
        found = cast_of(tensor, self._values)
        if found is None:
            return None
        value = cast("Value", found[0])
        is_here = _is_here(value._recoup_within, self._around)
        is_ours = is_here and value._recoup_source._owns(value)
        return value._recoup_source._slot(tensor, found[1]) if is_ours else None

    def close(self) -> None:
        """Release the values, since each saved tensor holds the pair of hooks."""
        self._values = []
        self._sources = {}

    def marked(self, result: Any) -> Any:
        """Mark the results that are views of values (See Rule 2)."""
        if isinstance(result, Tensor):
            if type(result) is Tensor and result.layout is torch.strided:
                source, within = self._sources.get(storage_id(result), (None, None))
                if source is not None and source._owns(result):
                    return marked(result, source, within)
        elif type(result) in (tuple, list):
            return type(result)(self.marked(item) for item in result)
        return result
