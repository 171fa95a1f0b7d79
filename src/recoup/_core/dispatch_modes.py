"""Dispatch modes as contexts that leave no mode and no flag of torch behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from recoup._core.compile import never_compiled

# Flags that torch sets beside the stack of modes; the names differ between releases.
_FLAGS = tuple(
    name
    for name, value in vars(dispatch).items()
    if name.startswith("_is_in_") and isinstance(value, bool)
)
_modes: Any = torch._C
# Returns how many dispatch modes are active; not a function of ours, for speed.
num_dispatch_modes: Callable[[], int] = _modes._len_torch_dispatch_stack
# The flags are those of the process, and every mode restores the ones that it found. So threads
# whose modes overlap would leave them set: the last of our modes to end restores the flags that
# the first one found.
_lock = threading.RLock()
_active: set[int] = set()
_found: list[Any] = []


def compiles_nothing() -> bool:
    """Whether a dispatch mode is active under which the compiler compiles nothing."""
    return num_dispatch_modes() > 0 and dispatch.is_in_any_mode_without_ignore_compile_internals()


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not import the compiler.

    Torch wraps `__torch_dispatch__` so that the compiler skips it, and imports the compiler for
    that, which takes seconds at the first operator. Subclasses mark theirs `never_compiled`.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class PassingMode(DispatchMode):
    """A mode that passes each operator on."""

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        return func(*args, **(kwargs or {}))


class InMode:
    """A context in which a dispatch mode is active.

    Args:
        mode: the mode.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode = mode
        self._num_around = 0

    def __enter__(self) -> Any:
        with _lock:
            if not _active:
                _found[:] = [getattr(dispatch, name) for name in _FLAGS]
            self._num_around = num_dispatch_modes()
            _active.add(id(self))
            self._mode.__enter__()
        return self._mode

    @never_compiled
    def __exit__(self, *error: Any) -> None:
        with _lock:
            # Where a forward raises, torch 2.11 leaves the modes of its checkpoints on the stack.
            while num_dispatch_modes() > self._num_around + 1:
                _modes._pop_torch_dispatch_stack(None)
            if num_dispatch_modes() > self._num_around:
                self._mode.__exit__(*error)
            _active.discard(id(self))
            if not _active:
                _restore_flags()


def _restore_flags() -> None:
    for name, flag in zip(_FLAGS, _found, strict=True):
        setattr(dispatch, name, flag)
    tell: Any = getattr(dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
    if tell is not None:
        tell(getattr(dispatch, "_is_in_any_mode_without_ignore_compile_internals", False))
