"""Helpers that keep torch.compile out of code that it must not trace.

torch.compile replaces frames while a compiled module runs, including those of hooks that such a
module calls. Our hooks read versions and addresses of real tensors, which a trace would freeze.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
_uncompiled: dict[Any, Any] = {}
_numbers = itertools.count()
# The C part of the compiler, which is available before the rest is imported.
_frames: Any = importlib.import_module("torch._C._dynamo.eval_frame")


def is_loaded() -> bool:
    """Whether the compiler was imported, which takes longer than importing torch."""
    return "torch._dynamo" in sys.modules


def is_watched() -> bool:
    """Whether the compiler looks at the frames of the functions that are called from here."""
    if torch.compiler.is_compiling():
        return True
    callback = _frames.get_eval_frame_callback()
    return callback is not None and callback is not False


def is_traced() -> bool:
    """Whether torch.export, torch.jit.trace or torch.fx is tracing this code."""
    jit: Any = torch.jit
    fx: Any = torch.fx
    # torch 2.11 answers `is_exporting()` with True wherever it compiles.
    if getattr(torch.compiler, "_is_exporting_flag", False) or jit.is_tracing():
        return True
    is_fx = getattr(fx._symbolic_trace, "_is_fx_tracing_flag", False)
    return is_fx and not torch.compiler.is_compiling()


def with_own_code(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that does what `fn` does, with a code object of its own.

    The compiler keeps what it compiled with the code of a function, of which it compiles eight
    versions, and what it learned of sizes with the name.

    Args:
        fn: a function without cells.
        name: the beginning of its name.
    """
    code = fn.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    return types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a call of `module` runs compiled code."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def never_compiled(fn: F) -> F:
    """Mark `fn` so that the compiler skips it and all functions that it calls; return it."""
    _mark(fn, "SKIP")
    return fn


def not_compiled_itself(fn: F) -> F:
    """Mark `fn` so that the compiler skips it, but not the functions it calls; return it."""
    _mark(fn, "DEFAULT")
    return fn


def _mark(fn: Any, what_it_calls: str) -> None:
    if hasattr(_frames, "set_code_exec_strategy"):  # not in every release of torch
        actions = _frames._FrameAction
        strategy = _frames._FrameExecStrategy(actions.SKIP, getattr(actions, what_it_calls))
        _frames.set_code_exec_strategy(fn.__code__, strategy)


def uncompiled(fn: F, *, recursive: bool = True) -> F:
    """Return `fn` as a function at which the graph breaks.

    Args:
        fn: the function.
        recursive: whether the compiler also skips the functions that it calls.
    """
    if (fn, recursive) not in _uncompiled:
        _uncompiled[fn, recursive] = torch.compiler.disable(fn, recursive=recursive)
    return _uncompiled[fn, recursive]


def break_graph(reason: str) -> None:
    """Break the graph where the compiler follows this code.

    Args:
        reason: what its error says where the graph must not break: why, and the way out.
    """
    dynamo: Any = torch._dynamo
    dynamo.graph_break(msg=reason)
