"""The memory that a block of code uses, and how tensors lie in it.

NOTE [ Operators over memory ]

Rule 1. Operators are recorded below autograd and autocast. A tensor that they take or make is
        identified by its storage (a `Memory`) and by its view of that storage (a `Layout`); so
        views are not recorded, and in-place operators need no special treatment.
Rule 2. The content of a memory comes from outside of the block, and is kept; or an operator makes
        it; or it comes from outside, and an operator of the block writes to it. Then the block
        begins with making a copy from before the change, and a replay has no effect outside.
Rule 3. A storage is known by its address and a weak reference, so that storages that the block
        makes are freed as in plain torch.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from recoup._core.lazy_values import HasTensor, Source, Value
from recoup._core.memory_layout import Geometry, geometry_of
from recoup.regions.operator_draws import Draw

__all__ = ["Layout", "Memories", "Memory", "RecordedOp", "RecordedTensor", "is_plain"]

_PLAIN = (Tensor, nn.Parameter, Value)


class Layout(NamedTuple):
    """The view that a tensor has of its storage."""

    geometry: Geometry
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the layout of `tensor`."""
        return cls(geometry_of(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg())

    @classmethod
    def whole(cls, memory: Memory, dtype: torch.dtype) -> Self:
        """Return the layout of a flat tensor of all of `memory`."""
        return cls(((memory.num_bytes // dtype.itemsize,), (1,), 0), dtype)

    def view(self, tensor: Tensor) -> Tensor:
        """Return a view, with this layout, of the storage of `tensor`."""
        whole = torch.empty(0, dtype=self.dtype, device=tensor.device).set_(_storage_of(tensor))
        view = whole.as_strided(*self.geometry)
        view = view.conj() if self.is_conj else view
        return cast("Any", torch)._neg_view(view) if self.is_neg else view

    def strided(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or a copy, with the strides of this layout."""
        size, stride, _ = self.geometry
        if tensor.stride() == stride or 0 in stride:
            return tensor
        return tensor.new_empty_strided(size, stride).copy_(tensor)


class Memory:
    """A storage that a block uses, or a tensor without one.

    Attributes:
        num_bytes: its size.
        is_own: whether the block allocated it.
        made_as: the layout in which an operator made it; None if its content comes from outside.
        kept: what the block took of it from outside: a tensor while the block runs. None is the
            layout of a tensor without a storage.
    """

    def __init__(self, num_bytes: int, made_as: Layout | None = None, *, is_own: bool) -> None:
        self.num_bytes = num_bytes
        self.made_as = made_as
        self.is_own = is_own
        self.kept: dict[Layout | None, Tensor | HasTensor] = {}


class RecordedTensor(NamedTuple):
    """A tensor among the arguments or results of a recorded operator."""

    memory: Memory
    layout: Layout | None


class RecordedOp(NamedTuple):
    """An operator with its arguments, each tensor in them replaced by a `RecordedTensor`.

    Attributes:
        func: the operator.
        arguments: its arguments, by position and by name.
        makes: the tensors with new memory that it returns, by their position in the result.
        changes: the memory that it makes or writes to.
        takes: the memory that it reads.
        draw: its draw of random numbers, if it drew.
        with_grad: whether grad mode was on: some kernels make a workspace for backward only then.
    """

    func: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    makes: dict[int, RecordedTensor]
    changes: frozenset[Memory]
    takes: frozenset[Memory] = frozenset()
    draw: Draw | None = None
    with_grad: bool = False


class Memories:
    """The memory that a block has used so far."""

    def __init__(self) -> None:
        self._used: dict[int, tuple[weakref.ref[Any], Memory]] = {}  # See Rule 3
        self.sources: dict[Memory, tuple[Source, object]] = {}  # of values, with their hooks

    def find(self, tensor: Tensor) -> Memory | None:
        """Return the memory of `tensor`; None if the block has not used it."""
        address, owner = _place_of(tensor)
        ref, memory = self._used.get(address, (None, None))
        return memory if ref is not None and ref() is owner else None

    def add(self, tensor: Tensor, made_as: Layout | None, *, is_own: bool) -> Memory:
        """Return the memory of `tensor`, as a new one."""
        address, owner = _place_of(tensor)
        memory = Memory(owner.nbytes() if is_plain(tensor) else 0, made_as, is_own=is_own)
        self._used[address] = weakref.ref(owner), memory
        return memory

    def of(self, tensor: Tensor) -> Memory:
        """Return the memory of `tensor`, which is from outside if it was not used before."""
        memory = self.find(tensor) or self.add(tensor, None, is_own=False)
        if isinstance(tensor, Value):
            self.sources[memory] = tensor._recoup_source, tensor._recoup_within
        return memory

    def forget(self, tensor: Tensor) -> None:
        """Take the memory of `tensor` as one from outside from now on."""
        self._used.pop(_place_of(tensor)[0], None)


def is_plain(tensor: Tensor) -> bool:
    """Whether a storage and a layout describe all of `tensor`."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():  # which would regard a value as exposed
        return tensor.untyped_storage()


def _place_of(tensor: Tensor) -> tuple[int, Any]:
    """Return the address of a tensor's storage, and the storage; or of the tensor itself."""
    if not is_plain(tensor):
        return -id(tensor), tensor
    storage = _storage_of(tensor)
    return storage._cdata, storage
