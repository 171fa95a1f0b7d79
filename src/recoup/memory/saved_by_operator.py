"""The residuals of a function: the operator, the module and the way of each saved tensor.

NOTE [ Listening to saved tensors ]

Rule 1. Around the function, a pair of saved-tensor hooks is installed that records each tensor and
        passes it on to the pair that was in force before. Autograd calls the innermost pair alone.
        So at the next operator, a pair that other code has pushed is replaced on the stack by a
        recording pair that wraps it. The code that pushed it pops it.
Rule 2. Regions and values of recoup report to the listener what they save. A tensor that was
        reported while the wrapped pair packed it is not counted again.
Rule 3. The tensors that count are those that autograd still holds when the function has returned.
        So each object that autograd receives is referred to weakly: a slot, or the wrapper of the
        result of the wrapped pair.
Rule 4. Compiled code runs eagerly, since torch.compile cannot listen. Code in this file that
        inspects tensors runs without `__torch_function__`, so that it does not listen to itself.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recoup._core.closures import Held
from recoup._core.compile import is_loaded, never_compiled
from recoup._core.listening import Way, here
from recoup._core.saved_tensors import (
    Kept,
    Pair,
    pair_in_force,
    pop_saved_tensors_hooks,
    saving,
    without_torch_function,
)
from recoup._core.storage_ids import Tokens
from recoup.memory.foreign_hooks import way_beneath
from recoup.memory.module_names import Place, Running, named

__all__ = ["Save", "saves_of"]

_PACKAGE = __name__.partition(".")[0]
_CHECKPOINT = torch.utils.checkpoint.__name__
_HOOKS_AND_COMPILER = r"Using `torch.compile\(module\)` when there are global hooks"
_MOST_FRAMES = 6  # from a hook up to the code that saves, through this file and a region


class Save(NamedTuple):
    """A tensor that autograd saved.

    Args:
        operator: the operator that saved it.
        shape: its shape.
        dtype: its type.
        module: the module that was running; empty outside any module.
        num_bytes: the bytes of its storages, except those that another save has counted.
        way: "keep", or the way in which backward gets it instead.
    """

    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str
    num_bytes: int
    way: Way


def saves_of(fn: Callable[[], object]) -> list[Save]:
    """Run `fn` with grad, and return the tensors that autograd then holds, without parameters."""
    watch = _Watch(fn)
    try:
        with watch:
            result = fn()
        found = watch.found()
        del result  # alive until here, since it holds the graph
        return found
    finally:
        watch.close()


class _Packed:
    """The packed value of a recording pair: the result of the wrapped pair, or the kept tensor."""

    __slots__ = ("__weakref__", "packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


@never_compiled
def _unpack(packed: _Packed) -> Tensor:
    return packed.unpack(packed.packed)


class _Noted(NamedTuple):
    """A saved tensor as it is recorded while the function runs."""

    held: weakref.ref[Any]
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place | None
    way: Way
    storages: list[tuple[object, int]]
    is_parameter: bool


class _Watch(TorchFunctionMode):
    """A mode that records every tensor that autograd saves."""

    def __init__(self, fn: Callable[[], object]) -> None:
        super().__init__()
        self._noted: list[_Noted] = []
        self._tokens = Tokens()
        self._running = Running(Held(fn).modules)
        self._operator: str | None = None
        self._within = ExitStack()

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if is_loaded():  # See Rule 4
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", _HOOKS_AND_COMPILER, UserWarning)
            stack.enter_context(saving(partial(self._pack, pair_in_force()), _unpack))
            stack.enter_context(self._running.followed())
            stack.callback(setattr, here, "listener", here.listener)
            here.listener = self
            super().__enter__()
            leave = cast("Any", super().__exit__)
            stack.push(leave)
            self._within = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._within.__exit__(*exc_info)

    def close(self) -> None:
        """Release the records: packed values hold the hooks, and the hooks hold this mode."""
        self._noted, self._tokens, self._running = [], Tokens(), Running(())

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
        if pair is not None and not _is_ours(pair):
            pop_saved_tensors_hooks()
            saving(partial(self._pack, pair), _unpack).__enter__()

    # -- saving ----------------------------------------------------------------------------

    @never_compiled
    def _pack(self, beneath: Pair | None, tensor: Tensor) -> _Packed:
        if beneath is None:
            with without_torch_function():
                name = f"A tensor that {self._said()} saved"
                packed = _Packed(Kept(tensor, name, None), Kept.get)
                self._note(tensor, packed, "keep", [tensor])
            return packed
        num_noted = len(self._noted)
        packed = _Packed(beneath[0](tensor), beneath[1])
        if len(self._noted) == num_noted:  # See Rule 2
            with without_torch_function():
                way, counted = way_beneath(tensor, packed.packed, beneath)
                self._note(tensor, packed, way, counted)
        return packed

    def told(self, tensor: Tensor, slot: Any, way: Way) -> None:
        """Record that autograd holds `slot` in place of `tensor`."""
        with without_torch_function():
            self._note(tensor, slot, way, [tensor])

    def _note(self, tensor: Tensor, held: Any, way: Way, counted: list[Tensor]) -> None:
        of_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        self._noted.append(
            _Noted(
                held=weakref.ref(held),
                operator=self._said(),
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                place=self._running.place,
                way=way,
                storages=[each for value in counted for each in self._tokens.of(value)],
                is_parameter=of_parameter,
            )
        )

    def _said(self) -> str:
        # A local variable that holds this frame would form a reference cycle.
        return self._operator or _operator_of(cast("Any", sys)._getframe(1))

    # -- afterwards ------------------------------------------------------------------------

    def found(self) -> list[Save]:
        """Return the saves that autograd still holds; a storage counts once, kept saves first."""
        parameters = {
            token for value in self._running.tensors() for token, _ in self._tokens.of(value)
        }
        alive = [
            noted
            for noted in self._noted
            if noted.held() is not None
            and not noted.is_parameter
            and any(size and token not in parameters for token, size in noted.storages)
        ]
        name_of = named(noted.place for noted in alive if noted.place is not None)
        counted: set[object] = set(parameters)
        num_bytes: dict[int, int] = {}
        for noted in sorted(alive, key=lambda noted: noted.way != "keep"):
            fresh = {token: size for token, size in noted.storages if token not in counted}
            counted.update(fresh)
            num_bytes[id(noted)] = sum(fresh.values())
        return [
            Save(
                noted.operator,
                noted.shape,
                noted.dtype,
                "" if noted.place is None else name_of(noted.place),
                num_bytes[id(noted)],
                noted.way,
            )
            for noted in alive
        ]


def _name(func: Any) -> str:
    return getattr(func, "__name__", type(func).__name__).strip("_").partition(".")[0]


def _is_ours(pair: Pair) -> bool:
    return getattr(pair[1], "__module__", "").partition(".")[0] == _PACKAGE


def _operator_of(frame: FrameType | None) -> str:
    """Name a saver that is no operator of torch: a Function, a checkpoint, a region of recoup."""
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code is Kept.__init__.__code__:
            return frame.f_locals["name"].removeprefix("The ")
        if frame.f_globals.get("__name__") == _CHECKPOINT:
            return "input of checkpoint"
        if frame.f_code.co_name == "apply" and "cls" in frame.f_locals:
            cls = frame.f_locals["cls"]
            return "input of checkpoint" if cls.__module__ == _CHECKPOINT else cls.__name__
        frame = frame.f_back
    return "an operator"
