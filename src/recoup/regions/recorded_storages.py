"""The storages that a block of code uses while it runs: its own, and those from outside.

NOTE [ Its own or from outside ]

Rule 1. A storage is identified by its address and a weak reference, so that storages that the block
        makes are freed as in plain torch. Tensors that it takes from outside are referenced until
        the block ends, and kept then.
Rule 2. A tensor whose content came from no operator is from outside: memory that was allocated and
        not overwritten as a whole (a custom kernel may have written to it unseen), constants,
        sparse tensors and subclasses, and results of higher-order operators.
Rule 3. A value from outside whose source asks no other source is not kept: a replay asks that
        source for it. Any other value is kept, since a chain of blocks would otherwise be
        recomputed as a whole, at once; so is one from outside of the saved-tensor hooks in force
        (see `lazy_values`).
Rule 4. The tensors that are kept, and their order, depend on what the code does and not on which
        tensors are alive, so that outer hooks (those of a checkpoint) count alike in a second run.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.lazy_values import Source, Value
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import Kept, Pair, version_of
from recoup.errors import ChangedError, ReplayError
from recoup.regions.recorded_block import StorageSource
from recoup.regions.recorded_ops import Layout, Origin, RecordedStorage, RecordedTensor, layout_of

__all__ = ["Storages"]

_PLAIN = frozenset((Tensor, nn.Parameter, Value))


class _UsedStorage:
    """A storage that a running block has used, or a tensor without one.

    Args:
        recorded: its record.
        storage: the storage; None for a tensor without one.
        is_own: whether the block allocated it.
    """

    __slots__ = ("copy", "is_own", "reads", "recorded", "source_and_hooks", "storage")

    def __init__(
        self, recorded: RecordedStorage, storage: torch.UntypedStorage | None, is_own: bool
    ) -> None:
        self.recorded = recorded
        self.storage = None if storage is None else weakref.ref(storage)
        self.is_own = is_own
        self.source_and_hooks: tuple[Source, object] | None = None  # if a `Value` has it
        self.reads: dict[Layout | None, tuple[Tensor, int]] = {}  # with versions
        self.copy: Tensor | None = None  # from before the first change


class Storages:
    """The storages that one block has used so far.

    Args:
        name: the name of the block in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._used: dict[int, _UsedStorage] = {}
        self._outside: dict[_UsedStorage, None] = {}  # in the order in which they were taken

    def record(self, tensor: Tensor) -> RecordedTensor:
        """Return the record of a tensor that an operator takes."""
        used = self._of(tensor)
        layout = layout_of(tensor) if _is_plain(tensor) else None
        if used.recorded.origin is Origin.OUTSIDE and layout not in used.reads:
            used.reads[layout] = (tensor, version_of(tensor))
            self._outside[used] = None
        return RecordedTensor(used.recorded, layout)

    def note(self, args: Any) -> None:
        """Remember the values among the arguments of a view, since operators will take the view."""
        for tensor in tensors_in(args):
            if isinstance(tensor, Value):
                self._of(tensor)

    def will_change(self, tensor: Tensor, operator: str, *, is_overwritten: bool) -> None:
        """Prepare for an operator that writes to `tensor`; first call `record` on what it reads."""
        if not _is_plain(tensor):
            raise ReplayError(
                f"{operator} changes a {type(tensor).__name__} of layout {tensor.layout} in place "
                f"in {self._name}, which cannot be repeated without changing it again. Do it "
                "outside of the block."
            )
        used = self._of(tensor)
        if used.recorded.origin is not Origin.OUTSIDE:
            return
        if is_overwritten and not used.reads and _covers_its_storage(tensor):
            used.recorded.origin = Origin.BLANK
            return
        self._check(used)
        used.recorded.origin = Origin.COPY
        num_entries = _storage_of(tensor).nbytes() // tensor.element_size()
        used.copy = tensor.detach().as_strided((num_entries,), (1,), 0).clone()
        used.reads.clear()
        self._outside[used] = None

    def made(self, tensor: Tensor, *, is_blank: bool) -> RecordedStorage | None:
        """Add a tensor that an operator has returned; return its storage if that is new."""
        if not _is_plain(tensor) or self._find(tensor) is not None:
            return None
        used = self._add(tensor, Origin.OUTSIDE if is_blank else Origin.MADE, is_own=True)
        return None if is_blank else used.recorded

    def forget(self, args: Any) -> None:
        """Treat the storages of `args` as ones from outside, since their content is unknown now."""
        for tensor in tensors_in(args):
            if _is_plain(tensor):
                self._used.pop(_storage_of(tensor)._cdata, None)

    def to_be_made(self, tensor: Tensor) -> RecordedStorage | None:
        """Return the storage of `tensor` if it need not be kept, since the block makes it."""
        if not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return None
        used = self._find(tensor)
        if used is None or not used.is_own or used.recorded.origin is Origin.OUTSIDE:
            return None
        return used.recorded

    def source_of(self, tensor: Tensor, pair: Pair | None) -> Source | None:
        """Return the source of `tensor` if it need not be kept, since it is a value from outside.

        Args:
            tensor: a tensor that an operator within the block saves.
            pair: the outer pair of hooks.
        """
        used = self._of(tensor) if isinstance(tensor, Value) else self._find(tensor)
        return None if used is None else _source_to_ask(used, tensor, pair)

    def keep(self, pair: Pair | None) -> bool:
        """Keep the tensors from outside; return whether a replay asks other sources for any.

        Args:
            pair: the outer pair of hooks.
        """
        asks_other_sources = False
        for used in self._outside:
            self._check(used)
            kept = used.recorded.kept
            for layout, (tensor, _) in used.reads.items():
                source = _source_to_ask(used, tensor, pair)
                if source is not None:
                    kept[layout] = source._slot(tensor, None)
                    asks_other_sources = True
                else:
                    name = f"A tensor of shape {tuple(tensor.shape)} that {self._name} takes"
                    kept[layout] = Kept(tensor, name, pair)
            if used.copy is not None:
                used.recorded.copy = Kept(used.copy, "A copy", pair)
        return asks_other_sources

    def _check(self, used: _UsedStorage) -> None:
        for tensor, version in used.reads.values():
            if version_of(tensor) != version:
                raise ChangedError(
                    f"A tensor of shape {tuple(tensor.shape)} that {self._name} reads was changed "
                    "in place within it, past torch's version counter (through `.data` or numpy, "
                    "for instance). Change a clone."
                )

    def _of(self, tensor: Tensor) -> _UsedStorage:
        used = self._find(tensor) or self._add(tensor, Origin.OUTSIDE, is_own=False)
        if isinstance(tensor, Value):
            used.source_and_hooks = (tensor._recoup_source, tensor._recoup_within)
        return used

    def _find(self, tensor: Tensor) -> _UsedStorage | None:
        if not _is_plain(tensor):
            return self._used.get(-id(tensor))  # it is referenced, so its address is its own
        storage = _storage_of(tensor)
        used = self._used.get(storage._cdata)
        if used is None or used.storage is None or used.storage() is not storage:
            return None  # See Rule 1
        return used

    def _add(self, tensor: Tensor, origin: Origin, *, is_own: bool) -> _UsedStorage:
        storage = _storage_of(tensor) if _is_plain(tensor) else None
        num_bytes = 0 if storage is None else storage.nbytes()
        recorded = RecordedStorage(origin, tensor.device, num_bytes)
        key = -id(tensor) if storage is None else storage._cdata
        used = self._used[key] = _UsedStorage(recorded, storage, is_own)
        return used


def _source_to_ask(used: _UsedStorage, tensor: Tensor, pair: Pair | None) -> Source | None:
    """Return the source that a replay asks for a tensor from outside, or None (See Rule 3)."""
    if used.source_and_hooks is None:
        return None
    source, hooks = used.source_and_hooks
    if isinstance(source, StorageSource) and source.asks_other_sources:
        return None
    is_under_its_hooks = pair is None or pair[0] is hooks
    return source if is_under_its_hooks and source._owns(tensor) else None


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():  # which would regard a value as exposed
        return tensor.untyped_storage()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a storage and a layout describe all of `tensor`."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested)


def _covers_its_storage(tensor: Tensor) -> bool:
    """Whether `tensor` covers every byte of its storage exactly once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() * tensor.element_size() == _storage_of(tensor).nbytes()
