"""Dispatch modes as contexts that are restored even if they are cut off."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from recoup._core.restoring import Restoring

__all__ = ["InMode"]

# Flags that torch sets beside the stack of modes; the names differ between releases.
_FLAGS = tuple(
    name
    for name, value in vars(dispatch).items()
    if name.startswith("_is_in_") and isinstance(value, bool)
)
_modes: Any = torch._C


class InMode(Restoring):
    """A context in which a dispatch mode is active.

    Args:
        mode: the mode.
    """

    __slots__ = ("_flags", "_mode", "_num_around")

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode
        self._num_around = -1
        self._flags: list[Any] = []

    def __enter__(self) -> Any:
        self._flags = [getattr(dispatch, name) for name in _FLAGS]
        self._num_around = _modes._len_torch_dispatch_stack()
        self._mode.__enter__()
        return self._mode

    def restore(self) -> None:
        if self._num_around < 0:
            return
        while _modes._len_torch_dispatch_stack() > self._num_around:
            _modes._pop_torch_dispatch_stack(None)
        for name, value in zip(_FLAGS, self._flags, strict=True):
            setattr(dispatch, name, value)
        tell: Any = getattr(dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
        if tell is not None:
            tell(getattr(dispatch, "_is_in_any_mode_without_ignore_compile_internals", False))
        self._num_around = -1

    def leave(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        if kind is not None:
            self.restore()
        elif self._num_around >= 0:
            self._mode.__exit__(kind, value, traceback)
            self._num_around = -1
