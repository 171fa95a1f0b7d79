"""The storages that a block of code uses while it runs: those it makes, and those from outside.

NOTE [ Ours or from outside ]

Rule 1. A storage is identified by its address and a weak reference, so that storages that the block
        makes are freed as in plain torch. Tensors that it takes from outside are held until the
        block ends, and kept then.
Rule 2. A tensor whose content came from no operator is from outside: memory that was allocated and
        not overwritten as a whole (a custom kernel may have written to it unseen), constants,
        sparse tensors and subclasses, and results of higher-order operators.
Rule 3. A value from outside whose source asks no other source is not kept: a replay asks that
        source for it. Any other value is kept, since a chain of blocks would otherwise be
        recomputed as a whole, at once; so is one from outside of the saved-tensor hooks in force
        (see `lazy_values`).
Rule 4. The tensors that are kept, and their order, depend on what the code does and not on which
        tensors are alive, so that hooks beneath (those of a checkpoint) count alike in a second
        run.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.lazy_values import Source, Value
from recoup._core.saved_tensors import Kept, Pair, version_of
from recoup.errors import ChangedError, ReplayError
from recoup.regions.operator_arguments import tensors_in
from recoup.regions.recorded import Begins, Layout, Look, Made, Memory, layout_of

__all__ = ["Storages"]

_PLAIN = frozenset((Tensor, nn.Parameter, Value))


class _Met:
    """A storage that a block has used, or a tensor without one."""

    __slots__ = ("is_ours", "memory", "reads", "start", "storage", "value")

    def __init__(self, memory: Memory, storage: torch.UntypedStorage | None, is_ours: bool) -> None:
        self.memory = memory
        self.storage = None if storage is None else weakref.ref(storage)
        self.is_ours = is_ours  # whether the block allocated it
        self.value: tuple[Source, object] | None = None  # its source and hooks
        self.reads: dict[Layout | None, tuple[Tensor, int]] = {}
        self.start: Tensor | None = None


class Storages:
    """The storages that one block has used so far.

    Args:
        name: the name of the block in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[int, _Met] = {}
        self._outside: dict[_Met, None] = {}  # in the order in which they were taken

    def look(self, tensor: Tensor) -> Look:
        """Return the `Look` of a tensor that an operator takes."""
        met = self._met(tensor)
        layout = layout_of(tensor) if _is_plain(tensor) else None
        if met.memory.begins is Begins.OUTSIDE and layout not in met.reads:
            met.reads[layout] = (tensor, version_of(tensor))
            self._outside[met] = None
        return Look(met.memory, layout)

    def note(self, args: Any) -> None:
        """Remember the values among the arguments of a view, since operators will take the view."""
        for tensor in tensors_in(args):
            if isinstance(tensor, Value):
                self._met(tensor)

    def will_change(self, tensor: Tensor, operator: str, *, is_overwritten: bool) -> None:
        """Prepare for an operator that changes `tensor`; call it after `look` on what it reads."""
        if not _is_plain(tensor):
            raise ReplayError(
                f"{operator} changes a {type(tensor).__name__} of layout {tensor.layout} in place "
                f"in {self._name}, which cannot be repeated without changing it again. Do it "
                "outside of the block."
            )
        met = self._met(tensor)
        if met.memory.begins is not Begins.OUTSIDE:
            return
        if is_overwritten and not met.reads and _is_all(tensor):
            met.memory.begins = Begins.BLANK
            return
        self._check(met)
        met.memory.begins = Begins.COPY
        num_entries = _storage_of(tensor).nbytes() // tensor.element_size()
        met.start = tensor.detach().as_strided((num_entries,), (1,), 0).clone()
        met.reads.clear()
        self._outside[met] = None

    def made(self, tensor: Tensor, *, is_blank: bool) -> Memory | None:
        """Register a tensor that an operator has returned; return its memory if that is new."""
        if not _is_plain(tensor) or self._find(tensor) is not None:
            return None
        met = self._add(tensor, Begins.OUTSIDE if is_blank else Begins.MADE, is_ours=True)
        return None if is_blank else met.memory

    def forget(self, args: Any) -> None:
        """Treat the storages of `args` as ones from outside, since their content is unknown now."""
        for tensor in tensors_in(args):
            if _is_plain(tensor):
                self._known.pop(_storage_of(tensor)._cdata, None)

    def to_be_made(self, tensor: Tensor) -> Memory | None:
        """Return the memory of `tensor` if it need not be kept, since the block makes it."""
        if not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return None
        met = self._find(tensor)
        if met is None or not met.is_ours or met.memory.begins is Begins.OUTSIDE:
            return None
        return met.memory

    def source_of(self, tensor: Tensor, pair: Pair | None) -> Source | None:
        """Return the source of `tensor` if it need not be kept, since it is a value from outside.

        Args:
            tensor: a tensor that an operator within the block saves.
            pair: the pair of hooks beneath.
        """
        met = self._met(tensor) if isinstance(tensor, Value) else self._find(tensor)
        return None if met is None else _asked(met, tensor, pair)

    def keep(self, pair: Pair | None) -> bool:
        """Keep the tensors from outside; return whether a replay asks other sources for any.

        Args:
            pair: the pair of hooks beneath.
        """
        asks_others = False
        for met in self._outside:
            self._check(met)
            for layout, (tensor, _) in met.reads.items():
                source = _asked(met, tensor, pair)
                if source is not None:
                    met.memory.kept[layout] = source._slot(tensor, None)
                    asks_others = True
                else:
                    name = f"A tensor of shape {tuple(tensor.shape)} that {self._name} takes"
                    met.memory.kept[layout] = Kept(tensor, name, pair)
            if met.start is not None:
                met.memory.start = Kept(met.start, "A copy", pair)
        return asks_others

    def _check(self, met: _Met) -> None:
        for tensor, version in met.reads.values():
            if version_of(tensor) != version:
                raise ChangedError(
                    f"A tensor of shape {tuple(tensor.shape)} that {self._name} takes was changed "
                    "in place within it in a way that is not seen. Change a clone."
                )

    def _met(self, tensor: Tensor) -> _Met:
        met = self._find(tensor)
        if met is None:
            met = self._add(tensor, Begins.OUTSIDE, is_ours=False)
        if isinstance(tensor, Value):
            met.value = (tensor._recoup_source, tensor._recoup_within)
        return met

    def _find(self, tensor: Tensor) -> _Met | None:
        if not _is_plain(tensor):
            return self._known.get(-id(tensor))  # it is held, so that nothing else has its address
        storage = _storage_of(tensor)
        met = self._known.get(storage._cdata)
        if met is None or met.storage is None or met.storage() is not storage:
            return None  # See Rule 1
        return met

    def _add(self, tensor: Tensor, begins: Begins, *, is_ours: bool) -> _Met:
        memory = Memory(begins, tensor.device)
        if _is_plain(tensor):
            storage = _storage_of(tensor)
            memory.num_bytes = storage.nbytes()
            met = self._known[storage._cdata] = _Met(memory, storage, is_ours)
        else:
            met = self._known[-id(tensor)] = _Met(memory, None, is_ours)
        return met


def _asked(met: _Met, tensor: Tensor, pair: Pair | None) -> Source | None:
    """Return the source that a replay asks for a tensor from outside, or None (See Rule 3)."""
    if met.value is None:
        return None
    source, within = met.value
    if isinstance(source, Made) and source.asks_others:
        return None
    is_here = pair is None or pair[0] is within
    return source if is_here and source._owns(tensor) else None


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():  # which would regard a value as exposed
        return tensor.untyped_storage()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a storage and a layout describe all of `tensor`."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested)


def _is_all(tensor: Tensor) -> bool:
    """Whether `tensor` covers every byte of its storage exactly once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() * tensor.element_size() == _storage_of(tensor).nbytes()
