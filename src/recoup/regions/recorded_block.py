"""The operators of a block, and their replay, which makes the values that backward asks for.

NOTE [ A replay ]

Rule 1. A replay runs the operators that make the values that backward may still ask for, in the
        order of the block. It sets all of these values, and frees other tensors as soon as it can.
        Tensors have the strides of the first run, or layouts would not fit.
Rule 2. The first run leaves sketches of its last values: of those that come out of the block and
        of which no other of these is made, and of the last one that was saved. A replay makes
        only values that lead to one of these, or all of these, too; and it compares them.
Rule 3. While the block runs, a replay runs what was recorded so far, and is itself recorded as any
        other code of the block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from recoup._core.lazy_values import Source
from recoup._core.operators import map_instances
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import grad_mode, version_of
from recoup._core.sketch import Sketch, difference, sketch_of, tolerance_of
from recoup.errors import ReplayError
from recoup.regions.operator_draws import DrawReplayer
from recoup.regions.recorded_memory import Layout, Memory, RecordedOp, RecordedTensor

__all__ = ["MemorySource", "RecordedBlock"]

_AsRecorded = torch._C._AutoDispatchBelowAutograd
_plainly = torch._C.DisableTorchFunctionSubclass


class RecordedBlock:
    """The operators of one block, and the sources of the values that backward may ask for.

    Args:
        name: the name of the block in errors.

    Attributes:
        look: takes the sketches of what was made so far; None after the block (See Rule 3).
        sketches: the sketches by which a replay is compared, and the layouts of what they show.
        asks_other_sources: whether a replay asks sources of values from outside.
        is_whole: whether the block has ended without an exception.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: list[RecordedOp] = []
        self.lock = threading.RLock()
        self.look: Callable[[], None] | None = None
        self.sketches: dict[Memory, tuple[Layout, Sketch]] = {}
        self.asks_other_sources = False
        self.is_whole = False
        self._sources = WeakValueDictionary[tuple[Memory, int, torch.dtype], MemorySource]()

    def source(self, memory: Memory, tensor: Tensor) -> MemorySource:
        """Return the source that makes `memory` again, for the current version of `tensor`."""
        # A value that was saved and then changed within the block is another one: the first is
        # an error if backward asks for it, as in plain torch.
        key = (memory, version_of(tensor), tensor.dtype)
        source = self._sources.get(key)
        if source is None:
            self._sources[key] = source = MemorySource(self, memory, tensor)
        return source

    def last_made(self, memories: AbstractSet[Memory]) -> Iterator[AbstractSet[Memory]]:
        """Yield those of `memories` from which no other one is made, by operator."""
        leads_to_one: set[Memory] = set()
        for op in reversed(self.ops):
            if leads_to_one.isdisjoint(op.changes):
                if memories.isdisjoint(op.changes):
                    continue
                yield op.changes & memories
            leads_to_one |= op.takes | op.changes

    def replay(self) -> None:
        """Run the operators again and set the values (See Rule 1)."""
        if self.look is not None:
            self.look()
        elif not self.is_whole:
            raise ReplayError(
                f"Backward needs a value that {self.name} made before it raised an exception. Call "
                "backward within the block, or after a run of it that ended without an exception."
            )
        wanted = [source for source in self._sources.values() if source.is_wanted]
        memories, seen = {source.whole.memory for source in wanted}, self.sketches.keys()
        if not all(last & seen for last in self.last_made(memories)):
            memories |= seen
        replay = _Replay(self.name)
        for op, last_used in reversed(list(self._needed(memories))):
            replay.run(op, last_used)
        for memory in memories & seen:
            self._compare(memory, replay)
        for source in wanted:
            source.give(replay.tensor(source.whole))

    def _needed(
        self, memories: AbstractSet[Memory]
    ) -> Iterator[tuple[RecordedOp, AbstractSet[Memory]]]:
        """Yield the operators that make `memories`, last first, each with what it uses last."""
        needed, streams = set(memories), set[Any]()
        for op in reversed(self.ops):
            if op.draw is not None and (op.draw.stream in streams or needed & op.changes):
                # A draw that follows another one needs that one to have been drawn.
                (streams.add if op.draw.before is None else streams.discard)(op.draw.stream)
            elif needed.isdisjoint(op.changes):
                continue
            used = op.takes | op.changes
            yield op, used - needed
            needed |= used

    def _compare(self, memory: Memory, replay: _Replay) -> None:
        layout, first = self.sketches[memory]
        again = sketch_of(replay.tensor(RecordedTensor(memory, layout)))
        off = 0.0 if again is None else difference(first, again)
        if off > tolerance_of(layout.dtype):
            func = next(op.func for op in reversed(self.ops) if memory in op.changes)
            raise ReplayError(
                f"Backward ran {self.name} again, and {func} returned other numbers than in "
                f"forward: {layout.geometry[0]} of {layout.dtype}, off by {off:.1e} of it. "
                "A tensor that the block takes was changed unseen (by a fused optimizer, `.data` "
                "or numpy), or an operator depends on something outside of torch. Run backward "
                "before the change, or move it out of the block. If kernels within are not "
                "deterministic, use recoup.recomputing(compare=False)."
            )


class MemorySource(Source):
    """The source of the values in one memory that a block made."""

    def __init__(self, block: RecordedBlock, memory: Memory, tensor: Tensor) -> None:
        super().__init__(f"A value made in {block.name}", block.lock)
        self.watch(tensor)
        self.block = block
        self.whole = RecordedTensor(memory, Layout.whole(memory, tensor.dtype))

    def make(self) -> None:
        self.block.replay()


class _Replay:
    """The tensors that operators of a block take and make, by memory and layout.

    Args:
        name: the name of the block in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors: dict[Memory, dict[Layout | None, Tensor]] = {}
        self._draws = DrawReplayer()

    def run(self, op: RecordedOp, last_used: AbstractSet[Memory]) -> None:
        """Run an operator, and free the memory that it is the last to use."""
        args, kwargs = map_instances(op.arguments, RecordedTensor, self.tensor)
        with grad_mode(op.with_grad), _AsRecorded(), torch._C._DisableAutocast(), _plainly():
            result = self._draws.run(op.func, args, kwargs, op.draw)
        made = tensors_in(result)
        for place, (memory, any_layout) in op.makes.items():
            layout = cast("Layout", any_layout)
            self._tensors[memory] = {layout: self._fitting(op, made[place : place + 1], layout)}
        for memory in last_used:
            self._tensors.pop(memory, None)

    def tensor(self, recorded: RecordedTensor) -> Tensor:
        """Return a tensor with the memory and the layout of one of the first run."""
        memory, layout = recorded
        tensors = self._tensors.setdefault(memory, {})
        if layout not in tensors and memory.made_as is None:
            kept = memory.kept[layout]
            given = kept if isinstance(kept, Tensor) else kept.get()
            tensors[layout] = self._given(given.detach(), layout)
        elif layout not in tensors:
            tensors[layout] = cast("Layout", layout).view(next(iter(tensors.values())))
        return tensors[layout]

    def _given(self, tensor: Tensor, layout: Layout | None) -> Tensor:
        if layout is None:
            return tensor
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise ReplayError(
                f"A tensor of shape {tuple(tensor.shape)} that {self._name} reads was freed before "
                "backward, as FSDP2 does with the parameters of a module after its forward. Use "
                "recoup.recompute(module), which runs the whole module again."
            )
        return layout.strided(tensor)

    def _fitting(self, op: RecordedOp, made: list[Tensor], layout: Layout) -> Tensor:
        (size, _, offset), dtype, *_ = layout
        found = [(each.size(), each.storage_offset(), each.dtype) for each in made]
        if found != [(size, offset, dtype)]:
            raise ReplayError(
                f"Running {op.func} of {self._name} again returned another tensor than in the "
                "first run, so it depends on something outside of torch. Move it out of the block."
            )
        return layout.strided(made[0])
