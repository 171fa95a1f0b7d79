"""The replay of a block's recorded operators, which makes the values that backward asks for.

NOTE [ A replay ]

Rule 1. A replay runs the operators that make the values that backward may still ask for, in the
        order of the block. It sets all of these values, and frees other tensors as soon as it can.
Rule 2. A tensor that is made again has the strides of the first run, or layouts would not fit.
Rule 3. Operators run below autograd and autocast, as they were recorded.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from recoup._core.inner_gradients import FirstRun, place_of
from recoup._core.lazy_values import Source
from recoup._core.operators import map_instances
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import set_grad_enabled, version_of
from recoup.errors import ReplayError
from recoup.regions.operator_draws import DrawReplayer
from recoup.regions.recorded_ops import (
    Layout,
    Origin,
    RecordedOp,
    RecordedStorage,
    RecordedTensor,
)

__all__ = ["RecordedBlock", "StorageSource"]


class RecordedBlock:
    """The operators of one block, and the sources of the values that backward may ask for.

    Args:
        name: the name of the block in errors.
    """

    __slots__ = (
        "_at_hand",
        "_first_run",
        "_has_ended",
        "_sources",
        "asks_other_sources",
        "is_whole",
        "lock",
        "name",
        "ops",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: list[RecordedOp] = []
        self.asks_other_sources = False  # whether a replay asks sources of values from outside
        self.is_whole = False
        self.lock = threading.RLock()
        self._has_ended = False
        self._first_run = FirstRun((weakref.ref(place_of(name)),), is_training=True)
        self._at_hand: weakref.WeakKeyDictionary[StorageSource, Tensor]
        self._at_hand = weakref.WeakKeyDictionary()
        self._sources: dict[
            tuple[RecordedStorage, int, torch.dtype], weakref.ref[StorageSource]
        ] = {}

    def source(self, storage: RecordedStorage, tensor: Tensor) -> StorageSource:
        """Return the source that makes `storage` again, for the current version of `tensor`."""
        # A value that was saved and then changed within the block is another one: the first is
        # an error if backward asks for it, as in plain torch.
        key = (storage, version_of(tensor), tensor.dtype)
        ref = self._sources.get(key)
        source = None if ref is None else ref()
        if source is None:
            source = StorageSource(self, storage)
            source._watch(tensor)
            self._sources[key] = weakref.ref(source)
        return source

    def keep_at_hand(self, source: StorageSource, tensor: Tensor) -> None:
        """Keep a saved tensor until the block ends, if the block may ask for it before then."""
        if self._first_run.keeps and not self.is_whole:
            self._at_hand[source] = tensor.detach()

    def end(self, *, is_whole: bool) -> None:
        """Mark the block as ended: normally if `is_whole`, else by an exception."""
        self.is_whole = is_whole
        self._has_ended = True
        self._at_hand.clear()
        self._first_run.end(is_whole=is_whole)

    def make(self, source: StorageSource) -> None:
        """Make the value of `source`, and all others that backward may ask for, again."""
        at_hand = self._at_hand.get(source)
        if at_hand is None:
            self.replay()
        else:
            self._first_run.asked(self.name)
            source._made = _whole(at_hand, at_hand.dtype)

    def replay(self) -> None:
        """Run the operators again and set the values (See Rule 1)."""
        if not self.is_whole:
            if not self._has_ended:
                self._first_run.asked(self.name)
            raise ReplayError(
                f"Backward needs a value that {self.name} made before it raised an exception, and "
                "that it can no longer recompute. Call backward within the block, or after a run "
                "of it that ended without an exception."
            )
        alive = [source for ref in self._sources.values() if (source := ref()) is not None]
        wanted = [source for source in alive if source.is_wanted]
        replay = _Replay(self.name)
        replay.run(self.ops, {source.storage for source in wanted})
        for source in wanted:
            source.give(replay.whole(source.storage, cast("torch.dtype", source._dtype)))


class StorageSource(Source):
    """The source of the values of one storage that a block made."""

    __slots__ = ("_block", "storage")

    def __init__(self, block: RecordedBlock, storage: RecordedStorage) -> None:
        super().__init__(f"A value made in {block.name}", block.lock)
        self._block = block
        self.storage = storage

    @property
    def asks_other_sources(self) -> bool:
        """Whether other sources must make something before this one can."""
        return self._block.asks_other_sources

    def make(self) -> None:
        self._block.make(self)


class _Replay:
    """A replay of operators: the tensors that they take and make, by storage and layout.

    Args:
        name: the name of the block in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors: dict[RecordedStorage, dict[Layout | None, Tensor]] = {}
        self._draws = DrawReplayer()

    def run(self, ops: Sequence[RecordedOp], wanted: set[RecordedStorage]) -> None:
        """Run the operators that make `wanted`."""
        for op, last_used in reversed(list(_needed(ops, wanted))):
            args = map_instances(op.args, RecordedTensor, self._tensor)
            kwargs = map_instances(op.kwargs, RecordedTensor, self._tensor)
            result = self._call(op, args, kwargs)
            del args, kwargs
            self._take(op, result)
            del result
            for storage in last_used:
                self._tensors.pop(storage, None)

    def whole(self, storage: RecordedStorage, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of a whole storage."""
        return _whole(next(iter(self._tensors[storage].values())), dtype)

    def _call(self, op: RecordedOp, args: Any, kwargs: dict[str, Any]) -> Any:
        before = torch.is_grad_enabled()
        try:
            set_grad_enabled(op.with_grad)
            with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():  # See Rule 3
                if op.draw is None:
                    return op.func(*args, **kwargs)
                return self._draws.run(op.func, args, kwargs, op.draw)
        finally:
            set_grad_enabled(before)

    def _tensor(self, recorded: RecordedTensor) -> Tensor:
        """Return a tensor with the storage and the layout of one of the first run."""
        storage, layout = recorded
        tensors = self._tensors.setdefault(storage, {})
        tensor = tensors.get(layout)
        if tensor is None:
            if storage.origin is Origin.OUTSIDE:
                tensor = _with_strides(self._from_outside(storage, layout), layout)
            else:
                some = next(iter(tensors.values()), None)
                whole = _beginning_of(storage) if some is None else some
                tensor = _view(whole, cast("Layout", layout))
            tensors[layout] = tensor
        return tensor

    def _from_outside(self, storage: RecordedStorage, layout: Layout | None) -> Tensor:
        tensor = storage.kept[layout].get().detach()
        if layout is not None and tensor.numel() and not tensor.untyped_storage().nbytes():
            raise ReplayError(
                f"A tensor of shape {tuple(tensor.shape)} that {self._name} reads was freed before "
                "backward, as FSDP2 does with the parameters of a module after its forward. Use "
                "recoup.recompute(module), which runs the whole module again."
            )
        return tensor

    def _take(self, op: RecordedOp, result: Any) -> None:
        """Store the tensors that an operator has made, or raise if they do not fit."""
        tensors = tensors_in(result)
        for position, (storage, layout) in op.makes.items():
            tensor = tensors[position] if position < len(tensors) else None
            if tensor is None or layout is None or not _fits(tensor, layout):
                raise ReplayError(
                    f"Running {op.func} of {self._name} again returned another tensor than in the "
                    "first run, so it depends on something outside of torch. Move it out of the "
                    "block."
                )
            self._tensors.setdefault(storage, {})[layout] = _with_strides(tensor, layout)


def _needed(
    ops: Sequence[RecordedOp], wanted: set[RecordedStorage]
) -> Iterator[tuple[RecordedOp, frozenset[RecordedStorage]]]:
    """Yield the operators that make `wanted`, last first, each with what it uses last."""
    needed = set(wanted)
    streams: set[Any] = set()
    for op in reversed(ops):
        draw = op.draw
        if needed.isdisjoint(op.changes) and (draw is None or draw.stream not in streams):
            continue
        # A draw that follows another one needs that one to have been drawn.
        if draw is not None and draw.state is None:
            streams.add(draw.stream)
        elif draw is not None:
            streams.discard(draw.stream)
        used = op.takes | op.changes
        yield op, frozenset(used - needed)
        needed |= used


def _beginning_of(storage: RecordedStorage) -> Tensor:
    """Return a storage that no operator of the block makes, as it was before the first change."""
    if storage.copy is not None:
        return storage.copy.get().detach().clone()
    return torch.empty(storage.num_bytes, dtype=torch.uint8, device=storage.device)


def _fits(tensor: Tensor, layout: Layout) -> bool:
    same = tensor.size() == layout.size and tensor.dtype is layout.dtype
    return same and tensor.storage_offset() == layout.offset


def _with_strides(tensor: Tensor, layout: Layout | None) -> Tensor:
    """Return `tensor` with the strides of the first run (See Rule 2)."""
    if layout is None or tensor.stride() == layout.stride or 0 in layout.stride:
        return tensor
    fresh = torch.empty_strided(
        layout.size, layout.stride, dtype=tensor.dtype, device=tensor.device
    )
    return fresh.copy_(tensor)


def _view(tensor: Tensor, layout: Layout) -> Tensor:
    """Return a view, of the given layout, of the storage of `tensor`."""
    found = _whole(tensor, layout.dtype).as_strided(layout.size, layout.stride, layout.offset)
    found = found.conj() if layout.is_conj else found
    return cast("Any", torch)._neg_view(found) if layout.is_neg else found


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())
