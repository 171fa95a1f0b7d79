"""The operators of a block, and their replay, which makes the values that backward asks for.

NOTE [ Operators over memory ]

Rule 1. Operators are recorded below autograd and autocast. A tensor that they take or make is
        identified by its storage (a `Memory`) and by its view of that storage (a `Layout`); so
        views are not recorded, and in-place operators need no special treatment.
Rule 2. The content of a memory comes from outside of the block, and is kept; or an operator makes
        it; or it comes from outside, and an operator of the block writes to it. Then the block
        begins with making a copy from before the change, and a replay has no effect outside.
Rule 3. A replay runs the operators that make the values that backward may still ask for, in the
        order of the block. It sets all of these values, and frees other tensors as soon as it can.
        Tensors have the strides of the first run, or layouts would not fit.
Rule 4. The first run leaves sketches of its last values: of those that come out of the block and
        of which no other of these is made, and of the last one that was saved. A replay makes only
        values that lead to one of these, or all of these, too; and it compares them.
Rule 5. While the block runs, a replay runs what was recorded so far, and is itself recorded as any
        other code of the block.

NOTE [ One operator, one state ]

Rule 6. An operator draws from the generator that it is given, or from the default one of the device
        that it works on. It has drawn if the state of that generator has changed.
Rule 7. A draw keeps the state before it where that is not the one that the previous draw of the
        block left: at the first draw, and where other code seeded the generator or drew from it in
        between.
Rule 8. The numbers come from a private generator in the same state, in forward too, since other
        threads may draw from the original one. An operator that takes no generator, or that works
        on a device for which torch makes none, draws from the default one, which is set to the
        state and restored afterwards. There a draw of another thread leaves another state behind
        than the first run did, which is an error.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from recoup._core import devices
from recoup._core.devices import hash_of, same_states
from recoup._core.lazy_values import Source
from recoup._core.operators import map_instances
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import Packed, grad_mode, version_of
from recoup._core.sketch import Sketch, difference, sketch_of, tolerance_of
from recoup._core.tensors import Geometry, geometry_of, strided
from recoup.errors import ReplayError

_lock = threading.RLock()  # blocks of several threads draw one after the other


class Draw(NamedTuple):
    """A draw: its generator, by address or device, its device, and its states (See Rule 7)."""

    stream: Any
    device: torch.device
    before: Tensor | None  # None if the previous draw left that state
    after: int  # a hash


class Draws:
    """The generators that operators draw from, in one run of a block, and what is left of them."""

    def __init__(self) -> None:
        self._left: dict[Any, tuple[Any, Tensor]] = {}  # by address, which the generator holds

    def first(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Draw | None]:
        """Run an operator; return its result, and a `Draw` if it drew (See Rule 6)."""
        generator = kwargs.get("generator")
        stream: Any = None if generator is None else generator._cdata  # each call gets a new object
        device = generator.device if generator is not None else _device_of(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs), None
        if generator is None:
            devices.refuse_draws(func, device)
            stream, generator = device, devices.default_generator(device)
        with _lock:
            before = generator.get_state()
            result, after = _run(func, args, kwargs, device, before)
            generator.set_state(after)
        if same_states((before,), (after,)):
            return result, None
        goes_on = stream in self._left and same_states((self._left[stream][1],), (before,))
        self._left[stream] = generator, after
        return result, Draw(stream, device, None if goes_on else before, hash_of((after,)))

    def again(self, func: Any, args: Any, kwargs: dict[str, Any], draw: Draw | None) -> Any:
        """Run an operator so that it repeats its draw."""
        if draw is None:
            return func(*args, **kwargs)
        state = self._left[draw.stream][1] if draw.before is None else draw.before
        result, after = _run(func, args, kwargs, draw.device, state)
        if hash_of((after,)) != draw.after:
            raise ReplayError(
                f"{func} drew other numbers in backward than in forward: its arguments changed, or "
                f"another thread drew from the default generator of {draw.device} at the same "
                "time. Draw in one thread at a time, or from a torch.Generator of its own in each."
            )
        self._left[draw.stream] = None, after
        return result


def _run(
    func: Any, args: Any, kwargs: dict[str, Any], device: torch.device, state: Tensor
) -> tuple[Any, Tensor]:
    """Run an operator from a state; return its result, and the state after it (See Rule 8)."""
    with_generator = _with_generator(func)
    if with_generator is not None and devices.makes_generators(device.type):
        ours = devices.own_generator(device, 0)
        ours.set_state(state)
        return with_generator(*args, **kwargs | {"generator": ours}), ours.get_state()
    default = devices.default_generator(device)
    with _lock:
        before = default.get_state()
        try:
            default.set_state(state)
            return func(*args, **kwargs), default.get_state()
        finally:
            default.set_state(before)


def _device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    given = tensors_in((args, kwargs))
    return kwargs.get("device") or (given[0].device if given else torch.device("cpu"))


@cache
def _with_generator(func: Any) -> Any:
    """Return the overload of `func` that takes a generator, if there is one."""

    def arguments(of: Any) -> dict[str, str]:
        return {argument.name: str(argument.type) for argument in of._schema.arguments}

    own, packet = arguments(func), func.overloadpacket
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        theirs = arguments(overload)
        if theirs.get("generator") and own | {"generator": theirs["generator"]} == theirs:
            return overload
    return None


_AsRecorded = torch._C._AutoDispatchBelowAutograd
_plainly = torch._C.DisableTorchFunctionSubclass


class Layout(NamedTuple):
    """The view that a tensor has of its storage."""

    geometry: Geometry
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Return the layout of `tensor`."""
        return cls(geometry_of(tensor), tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def view(self, tensor: Tensor) -> Tensor:
        """Return a view, with this layout, of the storage of `tensor`."""
        with _plainly():  # which would regard a value as exposed
            storage: Any = tensor.untyped_storage()
        whole = torch.empty(0, dtype=self.dtype, device=tensor.device).set_(storage)
        view = whole.as_strided(*self.geometry)
        view = view.conj() if self.is_conj else view
        return cast("Any", torch)._neg_view(view) if self.is_neg else view


class Memory:
    """A storage that a block uses, or a tensor without one; `is_own` if the block allocated it.

    An operator made it in the layout `made_as`; that is None if its content comes from outside.
    """

    def __init__(self, num_bytes: int, made_as: Layout | None = None, *, is_own: bool) -> None:
        self.num_bytes, self.made_as, self.is_own = num_bytes, made_as, is_own
        # What the block took of it from outside: a tensor while the block runs. None is the layout
        # of a tensor without a storage.
        self.kept: dict[Layout | None, Tensor | Packed] = {}
        # What makes it, if it is the memory of a value from outside, and the hooks of that.
        self.source: tuple[Source | None, object] = None, None

    def whole(self, dtype: torch.dtype) -> Layout:
        """Return the layout of a flat tensor of all of it."""
        return Layout(((self.num_bytes // dtype.itemsize,), (1,), 0), dtype)


class RecordedTensor(NamedTuple):
    """A tensor among the arguments or results of a recorded operator."""

    memory: Memory
    layout: Layout | None


class RecordedOp(NamedTuple):
    """An operator with its arguments, each tensor in them replaced by a `RecordedTensor`."""

    func: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    makes: dict[int, RecordedTensor]  # with new memory, by their position in the result
    changes: frozenset[Memory]  # what it makes or writes to
    takes: frozenset[Memory] = frozenset()  # what it reads
    draw: Draw | None = None
    with_grad: bool = False  # grad mode: some kernels make a workspace for backward only then


class RecordedBlock:
    """The operators of one block, and the sources of the values that backward may ask for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: list[RecordedOp] = []
        self.lock = threading.RLock()
        # Takes the sketches of what was made so far; None after the block (See Rule 5).
        self.look: Callable[[], None] | None = None
        # By which a replay is compared, with the layouts of what they show.
        self.sketches: dict[Memory, tuple[Layout, Sketch]] = {}
        self.asks_other_sources = False  # whether a replay asks sources of values from outside
        self.is_whole = False  # whether the block has ended without an exception
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
        """Run the operators again and set the values (See Rule 3)."""
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
        self.whole = RecordedTensor(memory, memory.whole(tensor.dtype))

    def make(self) -> None:
        self.block.replay()


class _Replay:
    """The tensors that operators of a block take and make, by memory and layout."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors = defaultdict[Memory, dict[Layout | None, Tensor]](dict)
        self._draws = Draws()

    def run(self, op: RecordedOp, last_used: AbstractSet[Memory]) -> None:
        """Run an operator, and free the memory that it is the last to use."""
        args, kwargs = map_instances(op.arguments, RecordedTensor, self.tensor)
        with grad_mode(op.with_grad), _AsRecorded(), torch._C._DisableAutocast(), _plainly():
            result = self._draws.again(op.func, args, kwargs, op.draw)
        made = dict(enumerate(tensors_in(result)))
        for place, (memory, any_layout) in op.makes.items():
            layout, tensor = cast("Layout", any_layout), made.get(place)
            (size, _, offset), dtype, *_ = layout
            found = tensor is not None and (tensor.size(), tensor.storage_offset(), tensor.dtype)
            if tensor is None or found != (size, offset, dtype):
                raise ReplayError(
                    f"Running {op.func} of {self._name} again returned another tensor than in the "
                    "first run, so it depends on something outside of torch. Move it out of the "
                    "block."
                )
            self._tensors[memory] = {layout: strided(tensor, layout.geometry[1])}
        for memory in last_used:
            self._tensors.pop(memory, None)

    def tensor(self, recorded: RecordedTensor) -> Tensor:
        """Return a tensor with the memory and the layout of one of the first run."""
        memory, layout = recorded
        tensors = self._tensors[memory]
        if layout not in tensors and memory.made_as is None:
            kept = memory.kept[layout]
            given = (kept if isinstance(kept, Tensor) else kept.get()).detach()
            if layout is not None and given.numel() and not given.untyped_storage().nbytes():
                raise ReplayError(
                    f"A tensor of shape {tuple(given.shape)} that {self._name} reads was freed "
                    "before backward, as FSDP2 does with the parameters of a module after its "
                    "forward. Use recoup.recompute(module), which runs the whole module again."
                )
            tensors[layout] = given if layout is None else strided(given, layout.geometry[1])
        elif layout not in tensors:
            tensors[layout] = cast("Layout", layout).view(next(iter(tensors.values())))
        return tensors[layout]
