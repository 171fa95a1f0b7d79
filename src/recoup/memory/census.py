"""The census of residuals: the tensors that backward will need after a forward.

NOTE [ Observing saved tensors ]

Rule 1. Around the function, a pair of saved-tensor hooks is installed that records each tensor and
        passes it on to the pair that was in force before. Autograd calls the innermost pair alone.
        So at the next operator, a pair that other code has pushed is replaced on the stack by a
        recording pair that wraps it. The code that pushed it pops it.
Rule 2. Regions and values of recoup report what they do not keep. A tensor that was reported while
        the wrapped pair packed it is not counted again.
Rule 3. The tensors that count are those that autograd still holds when the function has returned.
        So each object that autograd receives is referred to weakly: a slot, or the wrapper of the
        result of the wrapped pair.
Rule 4. Compiled code runs eagerly, since torch.compile cannot be observed. Code in this file that
        inspects tensors runs without `__torch_function__`, so that it does not observe itself.
Rule 5. The way of a tensor that hooks of another library pack is inferred from their result. A
        tensor that a checkpoint replaced is recomputed. One that was moved to another device, to
        pinned memory, into a copy of the same shape and type, or to a place that cannot be
        inspected is offloaded. Any other is kept.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, cast, get_args

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recoup._arguments import check_callable
from recoup._core.captured import parts_of
from recoup._core.compile import is_loaded, never_compiled
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import (
    Kept,
    Pair,
    Way,
    observed_by,
    pair_in_force,
    pop_pair,
    saving,
    without_torch_function,
)
from recoup._core.storage_tracking import storages_of
from recoup.memory.size import aligned
from recoup.memory.step_recorder import ModulePath, RunningModules, names_of

_WAYS: tuple[Way, ...] = get_args(Way)
_PACKAGE = __name__.partition(".")[0]
_CHECKPOINT = torch.utils.checkpoint.__name__
_HOOKS_AND_COMPILER = r"Using `torch.compile\(module\)` when there are global hooks"
_MOST_FRAMES = 6  # from a hook up to the code that saves, through this file and a region


@dataclass(frozen=True, slots=True)
class Residual:
    """A residual: a tensor that backward needs, kept or obtained in another way.

    Args:
        value: the operator that saved it, its shape and its type, such as
            "linear [32, 16] float32".
        module: the qualified name of the module that was running; the name of its class for the
            outermost one, "-" outside any module.
        num_bytes: the bytes that it keeps or, if it is not kept, those that keeping it would take;
            0 if an earlier residual counts the same memory.
        way: how backward gets it: "keep", "recompute", "regenerate", "invert" or "offload".

    Example:
        >>> import torch
        >>> from recoup import residuals
        >>> x = torch.zeros(256, requires_grad=True)
        >>> print(residuals(lambda: x.exp()).entries[0])
        Residual(value='exp [256] float32', module='-', num_bytes=1024, way='keep')
    """

    value: str
    module: str
    num_bytes: int
    way: Way


@dataclass(frozen=True, slots=True)
class Residuals:
    """The residuals of a call, as `residuals` returns them. Printing shows a table.

    They can be iterated over; `len` is the number of residuals, not of rows of the table, in which
    equal ones share a row.

    Args:
        entries: the residuals, in the order in which they were saved.

    Example:
        >>> import torch
        >>> from recoup import residuals
        >>> x = torch.zeros(256, requires_grad=True)
        >>> found = residuals(lambda: x.exp().sin())
        >>> [each.value for each in found]
        ['exp [256] float32', 'sin [256] float32']
        >>> len(found), found.total_bytes(), found.total_bytes("recompute")
        (2, 1024, 0)
    """

    entries: tuple[Residual, ...]

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def total_bytes(self, way: Way | None = None) -> int:
        """Return the bytes of the residuals of one way, or of all.

        Args:
            way: "keep", "recompute", "regenerate", "invert" or "offload"; None for all.

        Raises:
            ValueError: if `way` is unknown.
        """
        if way is not None and way not in _WAYS:
            raise ValueError(f"`way` is {way!r}, but must be one of {', '.join(_WAYS)}, or None.")
        return sum(each.num_bytes for each in self.entries if way in (None, each.way))

    def __str__(self) -> str:
        groups: dict[tuple[str, str, Way], list[int]] = {}
        for each in self.entries:
            if each.num_bytes:
                groups.setdefault((each.value, each.module, each.way), []).append(each.num_bytes)
        ordered = sorted(groups.items(), key=lambda group: -sum(group[1]))
        rows = [("value", "module", "count", "MiB", "way")] + [
            (value, module, str(len(sizes)), _mib(sum(sizes)), way)
            for (value, module, way), sizes in ordered
        ]
        totals = [
            ("total" if way == "keep" else "", "", "", _mib(self.total_bytes(way)), way)
            for way in _WAYS
            if way == "keep" or any(each.way == way for each in self.entries)
        ]
        lines = aligned([*rows, *totals], left=[0, 1, 4])
        num_shared = sum(not each.num_bytes for each in self.entries)
        if num_shared:
            lines.append(f"{num_shared} more look at memory that is counted above")
        return "\n".join(lines)


def residuals(fn: Callable[[], object]) -> Residuals:
    """List the residuals that a call leaves for backward, kept or to be recomputed.

    `fn` is called once, with grad, and its result is released. The call is a forward like any
    other: it updates running statistics and advances the random stream. The residuals are those
    that autograd holds when `fn` returns, so a backward within `fn` leaves few of them.

    Bytes are counted by distinct storages, each for the first residual that uses it, without
    parameters and buffers. So the kept bytes are those that `fn` leaves allocated for backward, and
    those of its inputs. With saved-tensor hooks of other libraries, a residual counts as "offload"
    if the hooks moved it to another device, to pinned memory, into a copy, or to a place that
    cannot be inspected. Not listed are residuals of other threads, of code that runs without a
    graph (reentrant checkpoints), and those that a selective checkpoint has cached. Compiled code
    runs eagerly.

    Args:
        fn: a function without arguments that returns a value with the graph, such as a loss.

    Returns:
        The residuals, printable, the largest first, with values, modules, bytes and ways.

    Raises:
        RuntimeError: from torch, if `fn` uses a transform of torch.func.

    Example:
        >>> import torch
        >>> from recoup import residuals
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU())
        >>> x = torch.zeros(1024, 256)
        >>> print(residuals(lambda: model(x)))
        value                       module  count    MiB  way
        linear [1024, 256] float32  0           1  1.000  keep
        gelu [1024, 256] float32    1           1  1.000  keep
        total                                      2.000  keep

    Source: the hooks of `torch.autograd.graph.saved_tensors_hooks`.
    """
    check_callable(fn=fn)
    recorder = _Recorder(fn)
    try:
        with recorder.recording():
            result = fn()
        found = recorder.found()
        del result  # alive until here, since it holds the graph
        return found
    finally:
        recorder.close()


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3f}"


# -- recording -------------------------------------------------------------------------------------


class _Packed:
    """The object that autograd holds in place of a tensor: the result of another pair of hooks."""

    __slots__ = ("__weakref__", "_unpack", "packed", "way")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed = packed
        self.way: Way = "keep"
        self._unpack = unpack

    def get(self) -> Tensor:
        return self._unpack(self.packed)


@never_compiled
def _unpack(packed: _Packed) -> Tensor:
    return packed.get()


class _Record(NamedTuple):
    """A saved tensor, and the module that was running."""

    packed: weakref.ref[Any]  # what autograd holds in place of it
    value: str
    path: ModulePath | None
    way: Way
    storages: list[tuple[object, int]]  # an identity and the bytes of each one that counts


class _Recorder(TorchFunctionMode):
    """A mode that records every tensor that autograd saves."""

    def __init__(self, fn: Callable[[], object]) -> None:
        super().__init__()
        self._records: list[_Record] = []
        self._num_observed = 0
        # A later storage at the same address has another identity.
        self._identities = weakref.WeakKeyDictionary[torch.UntypedStorage, object]()
        self._modules = RunningModules(parts_of(fn)[1])
        self._operator: str | None = None

    @contextmanager
    def recording(self) -> Generator[None]:
        with (
            torch.enable_grad(),
            _uncompiled(),
            saving(partial(self._pack, pair_in_force()), _unpack),
            self._modules.followed(),
            observed_by(self),
            self,
        ):
            yield

    def close(self) -> None:
        """Release the records: packed tensors hold the hooks, and the hooks hold this mode."""
        self._records.clear()
        self._identities.clear()
        self._modules = RunningModules(())

    # -- running ---------------------------------------------------------------------------

    @never_compiled
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and remember its name meanwhile."""
        self._wrap_innermost()
        outer, self._operator = self._operator, _name(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._operator = outer

    def _wrap_innermost(self) -> None:
        """Replace a pair of hooks that other code has pushed by one that wraps it (See Rule 1)."""
        pair = pair_in_force()
        if pair is not None and getattr(pair[1], "__module__", "").partition(".")[0] != _PACKAGE:
            pop_pair()
            saving(partial(self._pack, pair), _unpack).__enter__()

    # -- saving ----------------------------------------------------------------------------

    @never_compiled
    def _pack(self, beneath: Pair | None, tensor: Tensor) -> _Packed:
        if beneath is None:
            with without_torch_function():
                name = f"A tensor that {self._saver()} saved"
                packed = _Packed(Kept(tensor, name, None), Kept.get)
                self._record(tensor, packed, "keep", [tensor])
            return packed
        num_observed = self._num_observed
        packed = _Packed(beneath[0](tensor), beneath[1])
        if self._num_observed == num_observed:  # See Rule 2
            with without_torch_function():
                packed.way, counted = _way_of(tensor, packed.packed, beneath)
                self._record(tensor, packed, packed.way, counted)
        return packed

    def saved(self, tensor: Tensor, slot: Any, way: Way) -> None:
        """Record that autograd holds `slot` in place of `tensor`."""
        with without_torch_function():
            self._record(tensor, slot, way, [tensor])

    def _record(self, tensor: Tensor, packed: Any, way: Way, counted: list[Tensor]) -> None:
        self._num_observed += 1
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        value = f"{self._saver()} {list(tensor.shape)} {dtype}"
        storages = [(self._identity(each), each.nbytes()) for each in storages_of(counted)]
        self._records.append(_Record(weakref.ref(packed), value, self._modules.path, way, storages))

    def _identity(self, storage: torch.UntypedStorage) -> object:
        return self._identities.setdefault(storage, object())

    def _saver(self) -> str:
        # A local variable that holds this frame would form a reference cycle.
        return self._operator or _saver_above(cast("Any", sys)._getframe(1))

    # -- afterwards ------------------------------------------------------------------------

    def found(self) -> Residuals:
        """Return what autograd still holds; a storage counts once, for what is kept first."""
        counted = set(map(self._identity, storages_of(self._modules.tensors())))
        alive = [
            record
            for record in self._records
            if record.packed() is not None
            and any(size and identity not in counted for identity, size in record.storages)
        ]
        name_of = names_of(each.path for each in alive if each.path is not None)
        num_bytes: dict[int, int] = {}
        for record in sorted(alive, key=lambda record: record.way != "keep"):
            fresh = {each: size for each, size in record.storages if each not in counted}
            counted.update(fresh)
            num_bytes[id(record)] = sum(fresh.values())
        names = ["-" if each.path is None else name_of(each.path) for each in alive]
        entries = [
            Residual(each.value, name, num_bytes[id(each)], each.way)
            for each, name in zip(alive, names, strict=True)
        ]
        return Residuals(tuple(entries))


@contextmanager
def _uncompiled() -> Generator[None]:
    """Return a context in which compiled code runs eagerly (See Rule 4)."""
    if not is_loaded():
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", _HOOKS_AND_COMPILER, UserWarning)
        yield


def _way_of(tensor: Tensor, packed: Any, pair: Pair) -> tuple[Way, list[Tensor]]:
    """Return the way of a tensor that a pair of hooks has packed, and the tensors that count."""
    if isinstance(packed, _Packed):  # another census around this one
        return packed.way, [tensor]
    held = tensors_in((packed, getattr(packed, "__dict__", None)))
    if not set(storages_of(held)).isdisjoint(storages_of([tensor])):
        return "keep", [tensor]
    if "checkpoint" in getattr(pair[0], "__module__", ""):
        return "recompute", [tensor]
    for value in held:
        is_copy = value.dtype is tensor.dtype and value.shape == tensor.shape
        if value.device != tensor.device or is_copy or value.is_pinned():
            return "offload", [tensor]
    return ("keep", held) if held else ("offload", [tensor])


def _name(func: Any) -> str:
    return getattr(func, "__name__", type(func).__name__).strip("_").partition(".")[0]


def _saver_above(frame: FrameType | None) -> str:
    """Name a saver that is no operator of torch: a Function, a checkpoint, a region of recoup."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code is Kept.__init__.__code__:
            return frame.f_locals["name"].removeprefix("The ")
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            return "input of checkpoint"
        if frame.f_code.co_name == "apply" and "cls" in frame.f_locals:
            cls = frame.f_locals["cls"]  # reentrant checkpoints are Functions, too
            return "input of checkpoint" if cls.__module__ == _CHECKPOINT else cls.__name__
        frame = frame.f_back
    return "an operator"
