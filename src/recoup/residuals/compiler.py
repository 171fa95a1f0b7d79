"""Keeping the compiler out of what it cannot see.

torch.compile replaces frames while a compiled module runs, also those of hooks that such a module
calls. Ours look at versions and addresses of real tensors, which a trace would freeze.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["is_loaded", "never_compiled", "uncompiled"]

F = TypeVar("F", bound=Callable[..., Any])
_waiting: list[Any] = []
_uncompiled: dict[Any, Any] = {}


def is_loaded() -> bool:
    """Whether the compiler is in this process; importing it takes longer than importing torch."""
    return "torch._dynamo" in sys.modules


def never_compiled(fn: F) -> F:
    """Mark a function that the compiler shall leave alone, and all that it calls."""
    _waiting.append(fn)
    return fn


def uncompiled(fn: F) -> F:
    """Return `fn` as a function at which a graph breaks, with the marked functions out of reach."""
    if fn not in _uncompiled:
        frames: Any = importlib.import_module("torch._C._dynamo.eval_frame")
        if hasattr(frames, "set_code_exec_strategy"):  # not in every release of torch
            skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
            while _waiting:
                frames.set_code_exec_strategy(_waiting.pop().__code__, skip)
        _uncompiled[fn] = torch.compiler.disable(fn)
    return _uncompiled[fn]
