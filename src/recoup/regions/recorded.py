"""The record of a block of code whose values are not kept: its operators, to be run again.

NOTE [ Operators over storages ]

Rule 1. Operators are recorded below autograd and autocast. A tensor that they take or make is
        identified by its storage (a `Memory`) and by its view of that storage (a `Layout`); so
        views are not recorded, and in-place operators need no special treatment.
Rule 2. A memory comes from outside of the block, and is kept; or an operator makes it; or it comes
        from outside, and an operator of the block changes it. A replay then works on a copy from
        before the change, and has no effect outside. Memory that is overwritten as a whole starts
        blank.
Rule 3. A replay runs the operators that make the values that backward may still ask for, in the
        order of the block. It sets all of these values, and frees other tensors as soon as it can.
Rule 4. A tensor that is made again has the strides of the first run, or layouts would not fit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from recoup._core.inner_gradients import FirstRun, place_of
from recoup._core.lazy_values import Source
from recoup._core.saved_tensors import set_grad_enabled, version_of
from recoup.errors import ReplayError
from recoup.regions.operator_arguments import mapped, tensors_in
from recoup.regions.operator_draws import Draw, Redrawing

__all__ = [
    "Begins",
    "Layout",
    "Look",
    "Made",
    "Memory",
    "Operator",
    "Record",
    "layout_of",
    "mapped",
    "tensors_in",
]


class Layout(NamedTuple):
    """The view that a tensor has of its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool


class Begins(Enum):
    """The origin of the content of a memory (See Rule 2)."""

    OUTSIDE = "outside"
    MADE = "made"
    COPY = "copy"
    BLANK = "blank"


class _Kept(Protocol):
    def get(self) -> Tensor: ...


class Memory:
    """A storage that operators of a block take, make or change.

    Attributes:
        begins: the origin of its content.
        num_bytes: its size in bytes.
        device: its device.
        kept: tensors from outside, by layout; None is for those that have no storage.
        start: its bytes at the beginning, if it begins as a copy.
    """

    __slots__ = ("begins", "device", "kept", "num_bytes", "start")

    def __init__(self, begins: Begins, device: torch.device) -> None:
        self.begins = begins
        self.device = device
        self.num_bytes = 0
        self.kept: dict[Layout | None, _Kept] = {}
        self.start: _Kept | None = None


class Look(NamedTuple):
    """A tensor among the arguments or results of an operator."""

    memory: Memory
    layout: Layout | None


class Operator(NamedTuple):
    """An operator with its arguments, every tensor in them replaced by a `Look`."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    takes: frozenset[Memory]
    makes: dict[int, Look]  # by place among the tensors that it returns
    changes: frozenset[Memory]
    draw: Draw | None
    with_grad: bool  # some kernels make a workspace for backward only where grad mode is on


class Record:
    """The operators of one block, and the values that backward may ask for.

    Args:
        name: the name of the block in errors.
    """

    __slots__ = (
        "_sources",
        "asks_others",
        "at_hand",
        "first_run",
        "has_ended",
        "is_whole",
        "lock",
        "name",
        "operators",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.operators: list[Operator] = []
        self.asks_others = False
        self.is_whole = False
        self.has_ended = False
        self.first_run = FirstRun((place_of(name),), is_training=True)
        self.at_hand: weakref.WeakKeyDictionary[Made, Tensor] = weakref.WeakKeyDictionary()
        self.lock = threading.RLock()
        self._sources: dict[tuple[Memory, int, torch.dtype], weakref.ref[Made]] = {}

    def source(self, memory: Memory, tensor: Tensor) -> Made:
        """Return the source that makes `memory` again, for the current version of `tensor`."""
        # A value that was saved and then changed within the block is another one: the first is
        # an error if backward asks for it, as in plain torch.
        key = (memory, version_of(tensor), tensor.dtype)
        ref = self._sources.get(key)
        source = None if ref is None else ref()
        if source is None:
            source = Made(self, memory)
            source._watch(tensor)
            self._sources[key] = weakref.ref(source)
        return source

    def keep_at_hand(self, source: Made, tensor: Tensor) -> None:
        """Keep a saved tensor until the block ends, if the block may ask for it before then."""
        if self.first_run.keeps and not self.is_whole:
            self.at_hand[source] = tensor.detach()

    def end(self, *, is_whole: bool) -> None:
        """Mark the block as ended: normally if `is_whole`, else by an exception."""
        self.is_whole = is_whole
        self.has_ended = True
        self.at_hand.clear()
        self.first_run.end(is_whole=is_whole)

    def run_again(self) -> None:
        """Run the operators again and set the values (See Rule 3)."""
        if not self.is_whole:
            if not self.has_ended:
                self.first_run.asked(self.name)
            raise ReplayError(
                f"A value made in {self.name} was asked for after an exception in it. Call "
                "backward, or take a gradient, in the block or after it has ended."
            )
        alive = [source for ref in self._sources.values() if (source := ref()) is not None]
        wanted = [source for source in alive if source.is_wanted]
        memories = self._made_again({source.memory for source in wanted})
        for source in wanted:
            source.give(memories.whole(source.memory, cast("torch.dtype", source._dtype)))

    def _made_again(self, wanted: set[Memory]) -> _Memories:
        memories = _Memories(self.name)
        redrawing = Redrawing()
        for operator, last_used in reversed(list(_needed(self.operators, wanted))):
            args = mapped(operator.args, Look, memories.tensor)
            kwargs = mapped(operator.kwargs, Look, memories.tensor)
            result = _run(operator, args, kwargs, redrawing)
            del args, kwargs
            memories.take(operator, result)
            del result
            memories.drop(last_used)
        return memories


def _run(operator: Operator, args: Any, kwargs: dict[str, Any], redrawing: Redrawing) -> Any:
    before = torch.is_grad_enabled()
    try:
        set_grad_enabled(operator.with_grad)
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():  # See Rule 1
            if operator.draw is None:
                return operator.func(*args, **kwargs)
            return redrawing.run(operator.func, args, kwargs, operator.draw)
    finally:
        set_grad_enabled(before)


class Made(Source):
    """The source of the values of one storage that a block made."""

    __slots__ = ("_record", "memory")

    def __init__(self, record: Record, memory: Memory) -> None:
        super().__init__(f"A value made in {record.name}", record.lock)
        self._record = record
        self.memory = memory

    @property
    def asks_others(self) -> bool:
        """Whether other sources must make something before this one can."""
        return self._record.asks_others

    def make(self) -> None:
        record = self._record
        at_hand = record.at_hand.get(self)
        if at_hand is None:
            record.run_again()
            return
        record.first_run.asked(record.name)
        self._made = _whole(at_hand, at_hand.dtype)


def _needed(
    operators: list[Operator], wanted: set[Memory]
) -> Iterator[tuple[Operator, frozenset[Memory]]]:
    """Yield the operators that make `wanted`, last first, each with what it uses last."""
    needed = set(wanted)
    streams: set[Any] = set()
    for operator in reversed(operators):
        draw = operator.draw
        if needed.isdisjoint(operator.changes) and (draw is None or draw.stream not in streams):
            continue
        # A draw that follows another one needs that one to have been drawn.
        if draw is not None and draw.state is None:
            streams.add(draw.stream)
        elif draw is not None:
            streams.discard(draw.stream)
        used = operator.takes | operator.changes
        yield operator, frozenset(used - needed)
        needed |= used


class _Memories:
    """The tensors of a replay, by memory and layout."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors: dict[Memory, dict[Layout | None, Tensor]] = {}

    def tensor(self, look: Look) -> Tensor:
        """Return a tensor with the memory and the layout of one of the first run."""
        memory, layout = look
        tensors = self._tensors.get(memory)
        if tensors is None:
            tensors = self._tensors[memory] = _begun(memory)
        tensor = tensors.get(layout)
        if tensor is None:
            if memory.begins is Begins.OUTSIDE:
                tensor = _laid_out(self._kept(memory, layout), layout)
            else:
                tensor = _looking(next(iter(tensors.values())), cast("Layout", layout))
            tensors[layout] = tensor
        return tensor

    def _kept(self, memory: Memory, layout: Layout | None) -> Tensor:
        tensor = memory.kept[layout].get().detach()
        if layout is not None and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise ReplayError(
                f"A tensor of shape {tuple(tensor.shape)} that {self._name} takes has no memory "
                "any more: a sharded module frees its parameters after its forward. Use "
                "recoup.recompute(module), which runs the module again."
            )
        return tensor

    def whole(self, memory: Memory, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of a whole memory."""
        return _whole(next(iter(self._tensors[memory].values())), dtype)

    def take(self, operator: Operator, result: Any) -> None:
        """Store the tensors that an operator has made, or raise if they do not fit."""
        tensors = list(tensors_in(result))
        for place, (memory, layout) in operator.makes.items():
            tensor = tensors[place] if place < len(tensors) else None
            if tensor is None or layout is None or not _fits(tensor, layout):
                raise ReplayError(
                    f"Running {operator.func} of {self._name} again did not make the tensor that "
                    "it made first. It depends on something outside of torch."
                )
            self._tensors.setdefault(memory, {})[layout] = _laid_out(tensor, layout)

    def drop(self, memories: frozenset[Memory]) -> None:
        for memory in memories:
            self._tensors.pop(memory, None)


def _begun(memory: Memory) -> dict[Layout | None, Tensor]:
    if memory.begins is Begins.OUTSIDE:
        return {}
    if memory.begins is Begins.COPY:
        return {None: cast("_Kept", memory.start).get().detach().clone()}
    return {None: torch.empty(memory.num_bytes, dtype=torch.uint8, device=memory.device)}


def _fits(tensor: Tensor, layout: Layout) -> bool:
    same = tensor.size() == layout.size and tensor.dtype is layout.dtype
    return same and tensor.storage_offset() == layout.offset


def _laid_out(tensor: Tensor, layout: Layout | None) -> Tensor:
    """Return `tensor` with the strides of the first run (See Rule 4)."""
    if layout is None or tensor.stride() == layout.stride or 0 in layout.stride:
        return tensor
    fresh = torch.empty_strided(
        layout.size, layout.stride, dtype=tensor.dtype, device=tensor.device
    )
    return fresh.copy_(tensor)


def _looking(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a view, of the given layout, of the storage of `tensor`."""
    found = _whole(tensor, layout.dtype).as_strided(layout.size, layout.stride, layout.offset)
    found = found.conj() if layout.is_conj else found
    return cast("Any", torch)._neg_view(found) if layout.is_neg else found


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())


def layout_of(tensor: Tensor) -> Layout:
    """Return the view that `tensor` has of its storage."""
    return Layout(
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )
