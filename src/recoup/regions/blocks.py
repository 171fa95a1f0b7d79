"""Contexts around blocks of code whose saved tensors are handled otherwise than autograd would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from recoup._core.compile import is_watched, never_compiled, uncompiled
from recoup._core.devices import accelerator, refuse_capture
from recoup._core.saved_tensors import is_transformed
from recoup.errors import RecoupError

__all__ = ["Block", "refuse_transforms"]


class _Entered(threading.local):
    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[object]] = []


_entered = _Entered()


class Block:
    """A context that may be entered any number of times, also while it is in use.

    It does nothing where no gradient is recorded.

    Args:
        make: makes the context of one `with` statement.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        (uncompiled(Block._enter) if is_watched() else Block._enter)(self)

    @never_compiled
    def __exit__(self, *error: Any) -> None:
        _entered.contexts.pop().__exit__(*error)

    @never_compiled
    def _enter(self) -> None:
        is_grad_enabled = torch.is_grad_enabled()
        if is_grad_enabled and accelerator() is not None:
            refuse_capture()
        context = self._make() if is_grad_enabled else nullcontext()
        context.__enter__()
        _entered.contexts.append(context)


def refuse_transforms(function: str) -> None:
    """Raise inside a transform of torch.func."""
    if is_transformed():
        raise RecoupError(
            f"{function}() does not work inside transforms of torch.func (grad, vmap, jacrev), "
            "which do not support saved tensor hooks. Leave it out there."
        )
