"""Values that are not kept: tensors that backward uses although nothing stored them.

NOTE [ A value brings its hooks along ]

Rule 1. A `Value` is a tensor whose `Source` can make it again. Each operator that takes one, and no
        other, runs under a pair of saved-tensor hooks of ours: between two of them, and after an
        exception, nothing of ours is on the stack.
Rule 2. A saved tensor is identified by its storage: a view of a value is a value too, and its
        sizes, strides and offset are recorded. Every other tensor goes to the pair beneath.
Rule 3. A copy in another dtype (autocast makes one) has its own storage. It is identified by the
        node that made it, and made again by casting.
Rule 4. Under hooks that were not in force where a value was made or read, its saves go to those
        hooks: a region counts saves, and in its second run its arguments are plain tensors.
Rule 5. A compiled graph takes no subclass, and would keep its inputs. So the graph breaks where
        compiled code passes a value to an operator.

NOTE [ A source and its slots ]

Rule 1. A value that was changed in place before it was saved can no longer be made again, so the
        tensor itself is kept. Changing it after it was saved is an error in backward: a tensor
        without memory shares the value's version counter and reveals the change. One that stands
        for a parameter needs none: a write to it is an error at once.
Rule 2. The slots of a source share one recomputed value: it is made when the first slot is unpacked
        and freed after the last, or where backward ends. So a weight of every time step is made
        once.
Rule 3. A source holds no node of the graph that holds it.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable
from types import GetSetDescriptorType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor

from recoup._core.compile import never_compiled
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import (
    Kept,
    Packed,
    Pair,
    Way,
    current,
    is_in_backward,
    is_transformed,
    pair_in_force,
    pop_down_to,
    pop_pair,
    push_pair,
    storage_id,
    unpack,
    version_of,
    when_backward_ends,
)
from recoup._core.tensors import PLAIN, Cast, cast_of
from recoup.errors import ChangedError, RecoupError, ReplayError

_plainly = torch._C.DisableTorchFunctionSubclass
_NESTED = frozenset((tuple, list, dict))
_NONE: set[int] = set()  # never added to


class Source:
    """The recipe of a value: a subclass implements `make`, which makes the value again.

    Its lock is held meanwhile; sources that are made together share one.
    """

    way: ClassVar[Way] = "recompute"

    def __init__(self, name: str, lock: threading.RLock | None = None) -> None:
        self.name = name
        self._lock = threading.RLock() if lock is None else lock
        self._slots: list[weakref.ref[_Slot]] = []

    # As long as nothing was made or saved; set on the class, since most sources are short-lived.
    stands_for = ""  # the name of a parameter that code may want, to change it
    dtype = torch.float32
    _made: Tensor | None = None
    _waiting: set[int] = _NONE  # the slots that will still ask for what was made
    _witness: Tensor | None = None  # See Rule 1
    _version = 0
    _is_exposed = False
    _is_asked = False  # whether a slot asks for the value, so that it is not left with the source

    def make(self) -> None:
        """Make the value again and `give` it."""
        raise NotImplementedError

    @property
    def is_wanted(self) -> bool:
        """Whether autograd still holds any slot."""
        return any(ref() is not None for ref in self._slots)

    def give(self, made: Tensor) -> None:
        """Store the recomputed value if autograd still holds any slot (See Rule 2)."""
        self._waiting = {id(slot) for ref in self._slots if (slot := ref()) is not None}
        if self._waiting:
            self._made = made.detach()
            if len(self._waiting) > self._is_asked and is_in_backward():
                when_backward_ends(self._forget)

    def watch(self, tensor: Tensor) -> None:
        """Remember `tensor` as it is now: from here on it is the value."""
        self.dtype = tensor.dtype
        self._version = version_of(tensor)

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor`, in the memory of the value, still has the numbers of it."""
        version = 0 if tensor.is_inference() else tensor._version
        if version != self._version or tensor.dtype is not self.dtype:
            return False
        return not (self._is_exposed or tensor.is_conj() or tensor.is_neg())

    def slot(self, tensor: Tensor, cast: Cast | None = None) -> Packed:
        """Return what autograd saves in place of `tensor`, a view or a cast of the value."""
        slot = _Slot(self, tensor, cast)
        if self._witness is None and cast is None and not self.stands_for:  # See Rule 1
            with torch._C.DisableTorchFunctionSubclass():  # it may be a value
                self._witness = tensor.detach()
                self._witness.data = tensor.new_empty(0)
        self._slots.append(weakref.ref(slot))
        if current.observer is not None:
            current.observer.saved(tensor, slot, self.way)
        return slot

    def get(self, slot: _Slot) -> Tensor:
        """Return the value for a slot, and make it if it was not made yet."""
        with self._lock:
            if self._witness is not None and version_of(self._witness) != self._version:
                raise ChangedError(
                    f"{self.name} is recomputed in backward, but was changed in place after an "
                    "operator had saved it. Change a clone instead."
                )
            if self._made is None:
                self._is_asked = True
                try:
                    self.make()
                finally:
                    self._is_asked = False
            made = self._made
            if made is None:
                raise ReplayError(
                    f"{self.name} could not be recomputed: its second run ended without it. A "
                    "region must do the same again: look for outside state that it reads."
                )
            self._waiting.discard(id(slot))
            if not self._waiting or not is_in_backward():
                self._made, self._waiting = None, _NONE
            return made

    def _forget(self) -> None:
        with self._lock:
            self._made, self._waiting = None, _NONE


class _Slot:
    """The object that autograd saves in place of a value, or of a view or cast of it."""

    __slots__ = ("__weakref__", "_cast", "_geometry", "_source")

    def __init__(self, source: Source, tensor: Tensor, cast: Cast | None) -> None:
        self._source = source
        self._cast = cast
        self._geometry = tensor.size(), tensor.stride(), tensor.storage_offset()

    @never_compiled
    def get(self) -> Tensor:
        made = self._source.get(self)
        made = made if self._cast is None else self._cast(made)
        return made.as_strided(*self._geometry)


class Value(Tensor):
    """A tensor that no operator keeps for backward (See Rule 1)."""

    _recoup_source: Source
    _recoup_within: object  # the hooks that were in force (See Rule 4)

    @classmethod
    @never_compiled
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator without keeping the values among its arguments."""
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(  # See Rule 5
                "A value that recoup does not keep is used in compiled code. A graph cannot take "
                "it: leave out fullgraph, or use `y.as_subclass(torch.Tensor)`, which is kept."
            )
        kwargs = kwargs or {}
        with _plainly():
            if func in _EXPOSES:
                for value in args:
                    if isinstance(value, Value):
                        value._recoup_source._is_exposed = True
            first: Any = kwargs.get("out", args[0] if args else None)
            stands_for = type(first) is cls and first._recoup_source.stands_for
            if stands_for and func in _OF_PARAMETERS:
                return _OF_PARAMETERS[func](func, first, *args[1:], **kwargs)
            if func in _LOOKS or not torch.is_grad_enabled() or is_transformed():
                result = func(*args, **kwargs)
                _check_unchanged(func, cast("Any", first) if type(first) is list else args)
                if kwargs:
                    _check_unchanged(func, kwargs.values())
                if not stands_for:
                    return result
                value = cast("Value", first)
                is_view = type(result) in PLAIN and result.layout is torch.strided
                is_view = is_view and storage_id(result) == storage_id(value)
                return marked(result, value._recoup_source) if is_view else result
            seam = _Seam(func, args, kwargs)
            pack = seam.pack
            push_pair(pack, unpack)
            try:
                result = func(*args, **kwargs)
                _check_unchanged(func, seam.values)
                return seam.marked(result)
            finally:
                top = pair_in_force()
                if top is not None and top[0] is pack:
                    pop_pair()
                else:
                    pop_down_to(seam.beneath)
                seam.values, seam.storages = (), {}  # each saved tensor holds the pair of hooks

    # A copy is a tensor as any other. What is copied stays alive until `memo` ends: it knows it by
    # its address.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.as_subclass(Tensor)
        return plain.__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)


class _FakeValue(Value, FakeTensor):
    """A value of a step without values (NOTE [ Steps without values ])."""


# Attributes and methods that only look: no operator runs, or it must run as it does elsewhere.
_VIEWS = frozenset(("T", "H", "mT", "mH", "real", "imag", "data", "grad"))
_LOOKS: frozenset[Any] = frozenset(
    attribute.__get__ for name, attribute in vars(torch._C.TensorBase).items()
    if isinstance(attribute, GetSetDescriptorType) and name not in _VIEWS
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point,
     Tensor.storage_offset, Tensor.data_ptr, Tensor.is_contiguous, Tensor.is_complex,
     Tensor.nelement, Tensor.element_size, Tensor.__len__, Tensor.__hash__, Tensor.__repr__,
     Tensor.register_hook, Tensor.backward, torch.autograd.backward, torch.autograd.grad,
     Tensor.as_subclass}  # fmt: skip
_DATA: Any = getattr(Tensor, "data").__get__  # noqa: B009
# Through these a value may change without a new version: it is kept from then on.
_ways_past_versions: list[Any] = [
    _DATA, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.untyped_storage,
    Tensor.storage, torch.unsafe_chunk, Tensor.unsafe_chunk, torch.unsafe_split,
    Tensor.unsafe_split, torch.unsafe_split_with_sizes, Tensor.unsafe_split_with_sizes,
]  # fmt: skip
_EXPOSES: frozenset[Any] = frozenset(_ways_past_versions)


def as_value(tensor: Tensor, source: Source) -> Tensor:
    """Return `tensor` marked as a value: it is not kept, since `source` can make it again."""
    source.dtype = tensor.dtype
    source._version = 0 if tensor.is_inference() else tensor._version
    return marked(tensor, source)


def read_anew(tensor: Tensor) -> Tensor:
    """Return `tensor`; if it is a value, operators under the current hooks do not keep it."""
    if isinstance(tensor, Value):
        tensor._recoup_within = _hooks()
    return tensor


def keep(tensor: Tensor, name: str, pair: Pair | None) -> Packed:
    """Return a slot of the source if `tensor` is a value, else the tensor kept (See Rule 4)."""
    around = _hooks()
    if isinstance(tensor, Value) and (around is None or around is tensor._recoup_within):
        source = tensor._recoup_source
        if source.owns(tensor):
            return source.slot(tensor)
    # A parameter is alive anyway, and must come back as itself.
    return Kept(tensor, name, None if isinstance(tensor, nn.Parameter) else pair)


def _hooks() -> object:
    """Return what stands for the saved-tensor hooks in force (See Rule 4)."""
    pair = pair_in_force()
    return None if pair is None else pair[0]


def marked(tensor: Tensor, source: Source) -> Value:
    """Return `tensor`, read under the hooks in force, marked as the value of `source`."""
    value: Any = tensor
    # Not an alias, which would add a node to the graph.
    value.__class__ = _FakeValue if isinstance(tensor, FakeTensor) else Value
    pair = pair_in_force()
    value._recoup_source, value._recoup_within = source, None if pair is None else pair[0]
    return value


def _check_unchanged(func: Any, given: Iterable[Any]) -> None:
    """Raise if an operator has changed a value that stands for a parameter."""
    for each in given:
        source = each._recoup_source if isinstance(each, Value) else None
        if source is not None and source.stands_for and version_of(each) != source._version:
            raise _lost(each, f"`{getattr(func, '__name__', 'an operator')}` changed it")


def _lost(value: Value, what: str) -> RecoupError:
    source = value._recoup_source
    return RecoupError(
        f"{source.name} was read as it is computed here, and {what}, which the parameter would not "
        f'see. Read the parameter by `get_parameter("{source.stands_for}")`, or within '
        "`recoup.weights.disabled(model)`."
    )


def _refuse(func: Any, value: Value, *args: Any, **kwargs: Any) -> Any:
    """Raise where code takes a value for the parameter that it stands for."""
    name = getattr(getattr(func, "__self__", func), "__name__", "it")
    is_seen = name == "grad" and (value.retains_grad or TracingContext.try_get() is not None)
    if is_seen or is_in_backward():  # by the compiler, by code that torch's checkpoints run again
        return func(value, *args)
    raise _lost(value, f"`{name}` was used")


def _is_no_leaf(func: Any, value: Value) -> bool:
    """Return False: an optimizer then asks for `retains_grad`."""
    del func, value
    return False


class _Typename(str):
    """The name of a type, which in torch's error that a value is no parameter tells more."""

    told = ""

    def __format__(self, spec: str) -> str:
        return f"{format(str(self), spec)}: {self.told}"


def _typename(func: Any, value: Value, *args: Any, **kwargs: Any) -> Any:
    name = func(value, *args, **kwargs)
    if isinstance(name, str):
        name = _Typename(name)
        name.told = str(_lost(value, "assigning it as a parameter would be a copy"))
    return name


# What means a parameter where a value stands for one: its memory, its gradient, that it is a leaf.
_OF_PARAMETERS: dict[Any, Callable[..., Any]] = {
    Tensor.requires_grad_: _refuse,
    Tensor.type: _typename,
    vars(torch._C.TensorBase)["is_leaf"].__get__: _is_no_leaf,
}
for _attribute in ("data", "grad", "retains_grad"):
    _OF_PARAMETERS[vars(torch._C.TensorBase)[_attribute].__get__] = _refuse
    _OF_PARAMETERS[vars(torch._C.TensorBase)[_attribute].__set__] = _refuse


class _Seam:
    """The pair of hooks around one operator."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        is_flat = not kwargs and _NESTED.isdisjoint(map(type, args))
        self.values: tuple[Value, ...] = ()  # that the operator takes
        self.storages: dict[int, Value] = {}  # those with a layout of strides, by their storages
        for each in args if is_flat else tensors_in((args, kwargs)):
            if isinstance(each, Value):
                self.values = (*self.values, each)
                if each.layout is torch.strided:
                    self.storages[each.untyped_storage()._cdata] = each
        self.beneath = pair_in_force()
        self._around = None if self.beneath is None else self.beneath[0]
        self._func = func

    @never_compiled
    def pack(self, tensor: Tensor) -> Packed:
        if tensor.layout is torch.strided:
            value = self.storages.get(tensor.untyped_storage()._cdata)
            owned, cast = tensor, None
            if value is None and tensor.grad_fn is not None:
                value, cast = cast_of(tensor, self.values) or (None, None)  # See Rule 3
                owned = value
            if value is not None and owned is not None:
                source = value._recoup_source
                is_here = self._around is None or self._around is value._recoup_within
                if is_here and source.owns(owned):  # See Rule 4
                    return source.slot(tensor, cast)  # See Rule 2
        return Kept(tensor, self, self.beneath)

    def __str__(self) -> str:
        return f"A tensor that {getattr(self._func, '__name__', 'an operator')} saved"

    def marked(self, result: Any) -> Any:
        """Mark the results that are views of values (See Rule 2)."""
        if type(result) in PLAIN and result.layout is torch.strided:
            value = self.storages.get(result.untyped_storage()._cdata)
            if value is not None and value._recoup_source.owns(result):
                view = marked(result, value._recoup_source)
                view._recoup_within = value._recoup_within
        elif type(result) in (tuple, list):
            return type(result)(self.marked(item) for item in result)
        return result
