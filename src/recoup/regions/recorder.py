"""The dispatch mode that records the operators of a block of code whose values are not kept.

NOTE [ A block ]

Rule 1. A dispatch mode records the operators. A pair of saved-tensor hooks around the block handles
        the tensors that operators within save; values that come out of the block bring hooks along
        for operators after it (`lazy_values`). Mode and hooks are removed when the block ends.
Rule 2. A tensor is marked as a value when the block ends, since it may change until then, and since
        operators are faster on plain tensors.
Rule 3. Tensors that the block takes from outside are referenced until it ends, and kept then.
Rule 4. A tensor whose content came from no operator is from outside: memory that was allocated and
        not overwritten as a whole (a custom kernel may have written to it unseen), constants,
        sparse tensors and subclasses. So are, after that, arguments and results of a higher-order
        operator, which may do anything, and of one that communicates with other processes.
Rule 5. A value from outside whose source asks no other source is not kept: a replay asks that
        source for it. Any other value is kept, or a chain of blocks would be recomputed as a whole,
        at once; so is one from outside of the saved-tensor hooks in force (see `lazy_values`).
Rule 6. The tensors that are kept, and their order, depend on what the code does and not on which
        tensors are alive, so that outer hooks (those of a checkpoint) count alike in a second run.
Rule 7. A storage is known by its address and a weak reference, so that storages that the block
        makes are freed as in plain torch.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.lazy_values import Value, marked, read_anew
from recoup._core.operators import (
    DispatchMode,
    OperatorTraits,
    has_schema,
    map_instances,
    traits_of,
    unseen,
)
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import Kept, Packed, Pair
from recoup._core.sketch import sketch_of
from recoup.errors import ReplayError
from recoup.regions.recorded_block import (
    Draws,
    Layout,
    Memory,
    MemorySource,
    RecordedBlock,
    RecordedOp,
    RecordedTensor,
)

_BETWEEN_PROCESSES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


class OpRecorder(DispatchMode):
    """The dispatch mode that records the operators of one block, under a pair of hooks."""

    supports_higher_order_operators = True

    def __init__(self, name: str, pair: Pair | None, *, compare: bool) -> None:
        super().__init__()
        self._block = RecordedBlock(name)
        self._block.look = self._look
        self._draws, self._pair, self._compare = Draws(), pair, compare
        self._used: dict[int, tuple[weakref.ref[Any], Memory]] = {}  # See Rule 7
        self._taken: list[tuple[Memory, Layout | None]] = []  # in order
        self._results: list[weakref.ref[Tensor]] = []
        self._last_saved: dict[Memory, Tensor] = {}  # one at most

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        traits = traits_of(func) if has_schema(func) else None
        if traits is None or func.namespace in _BETWEEN_PROCESSES:  # See Rule 4
            result = func(*args, **kwargs)
            for tensor in tensors_in((args, kwargs)):
                self._used.pop(_place_of(tensor)[0], None)
            return result
        if traits.makes_or_writes and not traits.is_view:
            result = self._run(func, traits, args, kwargs)
        else:
            for tensor in tensors_in(args) if traits.is_view else ():
                if isinstance(tensor, Value):  # operators will take the view
                    self._memory_of(tensor)
            result = func(*args, **kwargs)
        self._results.extend(weakref.ref(tensor) for tensor in tensors_in(result))
        return result

    def _run(self, func: Any, traits: OperatorTraits, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator that makes or changes memory, and record it."""
        arguments: dict[Any, Any] = {**dict(enumerate(cast("list[Any]", args))), **kwargs}
        takes, changes = set[Memory](), set[Memory]()
        # Arguments that are read come first: an operator may read a tensor that it overwrites.
        for key in sorted(arguments, key=traits.writes.__contains__):
            for tensor in tensors_in(arguments[key]) if key in traits.writes else ():
                self._will_change(tensor, func, is_overwritten=traits.overwrites)
            record = partial(self._recorded, changes if key in traits.writes else takes)
            arguments[key] = map_instances(arguments[key], Tensor, record)
        draw = None
        if traits.may_draw:
            result, draw = self._draws.first(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        makes: dict[int, RecordedTensor] = {}
        for place, tensor in enumerate(tensors_in(result)):
            if kwargs.get("device") is not None:
                arguments["device"] = tensor.device  # another may be current in backward
            if _is_plain(tensor) and self._find(tensor) is None:
                layout = None if traits.allocates else Layout.of(tensor)
                memory = self._add(tensor, layout, is_own=True)
                if layout is not None:
                    makes[place] = RecordedTensor(memory, layout)
        changes.update(memory for memory, _ in makes.values())
        if changes or draw is not None:
            names = [key for key in kwargs if draw is None or key != "generator"]
            given = tuple(arguments[i] for i in range(len(args))), {k: arguments[k] for k in names}
            sets = frozenset(changes), frozenset(takes)
            op = RecordedOp(func, given, makes, *sets, draw, torch.is_grad_enabled())
            self._block.ops.append(op)
        return result

    def _recorded(self, memories: set[Memory], tensor: Tensor) -> RecordedTensor:
        """Return the record of an argument, and add its memory to `memories`."""
        memory = self._memory_of(tensor)
        memories.add(memory)
        layout = Layout.of(tensor) if _is_plain(tensor) else None
        if memory.made_as is None and layout not in memory.kept:
            self._take(memory, layout, tensor)
        return RecordedTensor(memory, layout)

    def _take(self, memory: Memory, layout: Layout | None, tensor: Tensor) -> None:
        memory.kept[layout] = tensor  # which operators beneath autograd cannot keep
        self._taken.append((memory, layout))

    def _will_change(self, tensor: Tensor, func: Any, *, is_overwritten: bool) -> None:
        """Prepare for an operator that writes to `tensor`, after what it reads was recorded."""
        if not _is_plain(tensor):
            raise ReplayError(
                f"{func} changes a {type(tensor).__name__} of layout {tensor.layout} in place in "
                f"{self._block.name}, and would change it again. Do it outside of the block."
            )
        memory = self._memory_of(tensor)
        if memory.made_as is not None:
            return
        memory.made_as = layout = memory.whole(tensor.dtype)
        made = {0: RecordedTensor(memory, layout)}, frozenset((memory,))
        is_whole = False  # whether every byte of the memory is overwritten, exactly once
        if is_overwritten and not memory.kept and tensor.nbytes == memory.num_bytes:
            dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
            is_whole = tensor.permute(dims).is_contiguous()
        if is_whole:
            kwargs = {"dtype": tensor.dtype, "device": tensor.device}
            self._block.ops.append(RecordedOp(torch.empty, (layout.geometry[0], kwargs), *made))
            return
        # What the block read before is the same as at its beginning.
        before = Memory(memory.num_bytes, is_own=False)
        self._take(before, layout, tensor.detach().as_strided(*layout.geometry).clone())
        args: Any = (RecordedTensor(before, layout),), {}
        self._block.ops.insert(0, RecordedOp(torch.clone, args, *made, frozenset((before,))))
        memory.kept.clear()

    @never_compiled
    def pack(self, tensor: Tensor) -> Packed:
        """Keep a tensor that an operator within the block saves, unless the block makes it."""
        memory = self._to_be_made(tensor)
        if memory is None:
            return self._keep(self._memory_of(tensor), tensor, "saves")
        with unseen():
            if self._compare and tensor.is_floating_point():
                self._last_saved = {memory: tensor.detach()}
            return self._block.source(memory, tensor).slot(tensor)

    def finish(self) -> None:
        """Keep the tensors that the block took, and mark the values that it made (See Rule 2)."""
        self._look()
        for memory, layout in self._taken:
            tensor = memory.kept.get(layout)
            if isinstance(tensor, Tensor):  # or the block has changed it, and has a copy
                memory.kept[layout] = self._keep(memory, tensor, "takes")
        self._block.is_whole = True
        for tensor in self._alive():
            memory = self._to_be_made(tensor)
            if memory is None or (tensor.is_leaf and tensor.requires_grad):
                continue  # a leaf that requires grad is a parameter
            if type(tensor) is Tensor:
                marked(tensor, self._block.source(memory, tensor))
            else:
                read_anew(tensor)  # a value already, of a source within the block

    def close(self) -> None:
        """Drop all references: the saved tensors hold references to the pair of hooks."""
        self._block.look = None
        vars(self).clear()

    def _alive(self) -> list[Tensor]:
        return [tensor for ref in self._results if (tensor := ref()) is not None]

    def _look(self) -> None:
        """Take the sketches by which a replay is compared (NOTE [ Operators over memory ])."""
        if not self._compare:
            return
        alive = {m: t for t in self._alive() if (m := self._find(t)) is not None and m.made_as}
        alive = self._last_saved | alive
        last = self._last_saved.keys() | set[Memory]().union(*self._block.last_made(alive.keys()))
        self._block.sketches = {}
        with unseen():
            for memory in last:
                layout = cast("Layout", memory.made_as)
                sketch = sketch_of(layout.view(alive[memory]))
                if sketch is not None and layout.dtype is not torch.uint8:
                    self._block.sketches[memory] = layout, sketch

    def _keep(self, memory: Memory, tensor: Tensor, how: str) -> Packed:
        """Keep a tensor from outside, or have its source make it again (See Rule 5)."""
        source, hooks = memory.source
        asks_others = isinstance(source, MemorySource) and source.block.asks_other_sources
        is_under_its_hooks = self._pair is None or self._pair[0] is hooks
        if source is None or asks_others or not is_under_its_hooks or not source.owns(tensor):
            name = f"A tensor of shape {tuple(tensor.shape)} that {self._block.name} {how}"
            return Kept(tensor, name, self._pair)
        self._block.asks_other_sources = True
        return source.slot(tensor)

    def _to_be_made(self, tensor: Tensor) -> Memory | None:
        """Return the memory of `tensor` if it need not be kept, since the block makes it."""
        memory = self._find(tensor)
        if memory is None or not memory.is_own or memory.made_as is None:
            return None
        return None if tensor.is_conj() or tensor.is_neg() or tensor.is_inference() else memory

    # -- the memory that was used so far ---------------------------------------------------

    def _find(self, tensor: Tensor) -> Memory | None:
        """Return the memory of `tensor`; None if the block has not used it."""
        address, owner = _place_of(tensor)
        ref, memory = self._used.get(address, (None, None))
        return memory if ref is not None and ref() is owner else None

    def _add(self, tensor: Tensor, made_as: Layout | None, *, is_own: bool) -> Memory:
        address, owner = _place_of(tensor)
        memory = Memory(owner.nbytes() if _is_plain(tensor) else 0, made_as, is_own=is_own)
        self._used[address] = weakref.ref(owner), memory
        return memory

    def _memory_of(self, tensor: Tensor) -> Memory:
        """Return the memory of `tensor`, which is from outside if it was not used before."""
        memory = self._find(tensor) or self._add(tensor, None, is_own=False)
        if isinstance(tensor, Value):
            memory.source = tensor._recoup_source, tensor._recoup_within
        return memory


def _is_plain(tensor: Tensor) -> bool:
    """Whether a storage and a layout describe all of `tensor`."""
    if type(tensor) not in (Tensor, nn.Parameter, Value) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested)


def _place_of(tensor: Tensor) -> tuple[int, Any]:
    """Return the address of a tensor's storage, and the storage; or of the tensor itself."""
    if not _is_plain(tensor):
        return -id(tensor), tensor
    with torch._C.DisableTorchFunctionSubclass():  # which would regard a value as exposed
        storage = tensor.untyped_storage()
    return storage._cdata, storage
