"""What keeps torch.compile out of code that it must not trace, and what it is told about the rest.

torch.compile replaces frames while a compiled module runs, including those of hooks that such a
module calls. Our hooks read versions and addresses of real tensors, which a trace would freeze.

NOTE [ Three passes ]

Rule 1. The compiler first follows the code and writes down the operators that it calls. Then it
        runs these once to record the graph of forward and backward. Then the partitioner decides
        what forward saves, and what backward computes again.
Rule 2. The partitioner reads policies of torch's checkpoint off the nodes of the graph. Nodes that
        exist are given one, since a checkpoint around them gives its own to those it sees made.
Rule 3. With a budget of 0 the partitioner saves nothing but the inputs, whatever the policies are.
        So nodes to save bring a budget along that is a little more than 0.
Rule 4. A checkpoint in the code is a graph of its own within the first pass. Code in there may
        change nothing from before, and no tensor made in there may be used outside of it.
Rule 5. What code between two places makes is computed again if each of them calls an operator of
        ours: the second one gives a policy to the nodes that were recorded since the first. Unlike
        a checkpoint, that saves nothing between one such piece of code and the next.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

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


def is_symbolic() -> bool:
    """Whether torch.fx is tracing this code."""
    fx: Any = torch.fx
    is_fx = getattr(fx._symbolic_trace, "_is_fx_tracing_flag", False)
    return is_fx and not torch.compiler.is_compiling()


def is_traced() -> bool:
    """Whether torch.export, torch.jit.trace or torch.fx is tracing this code."""
    jit: Any = torch.jit
    # torch 2.11 answers `is_exporting()` with True wherever it compiles.
    if getattr(torch.compiler, "_is_exporting_flag", False) or jit.is_tracing():
        return True
    return is_symbolic()


def with_own_code(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that does what `fn`, without cells, does, with a code object of its own.

    The compiler keeps what it compiled with the code of a function, of which it compiles eight
    versions, and what it learned of sizes with the name, which begins with `name`.
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
    """Return `fn` as one at which the graph breaks; `recursive` skips what it calls, too."""
    if (fn, recursive) not in _uncompiled:
        _uncompiled[fn, recursive] = torch.compiler.disable(fn, recursive=recursive)
    return _uncompiled[fn, recursive]


def break_graph(reason: str) -> None:
    """Break the graph where the compiler follows this code; its error, if any, is the reason."""
    dynamo: Any = torch._dynamo
    dynamo.graph_break(msg=reason)


T = TypeVar("T")
_LEAST_BUDGET = 1e-6


def is_followed() -> bool:
    """Whether the compiler follows this code (See Rule 1), and torch.export does not."""
    return torch.compiler.is_dynamo_compiling() and not torch.compiler._is_exporting_flag


def saved(run: Callable[[], T]) -> T:
    """Call `run`; if a graph is recorded, forward saves what it makes for backward."""
    graph = _recorded()
    if graph is None:
        return run()
    last = _last(graph)
    result = run()
    for node in _since(last, graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # See Rule 2
        if _budget() == 0:
            node.meta["memory_budget"] = _LEAST_BUDGET  # See Rule 3
    return result


def num_recorded() -> int:
    """Return the number of nodes in the graph that is recorded; 0 if there is none."""
    graph = _recorded()
    return 0 if graph is None else len(graph.nodes)


def _last(graph: Any) -> Any:
    return next(iter(reversed(graph.nodes)), None)


def _since(last: Any, graph: Any) -> Iterator[Any]:
    return itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))


def _recorded() -> Any:
    from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode  # it takes long

    mode: Any = get_innermost_proxy_mode()
    return None if mode is None else mode.tracer.graph


def _budget() -> float:
    from torch._functorch import config

    return config.activation_memory_budget


def is_in_checkpoint() -> bool:
    """Whether the compiler follows code within a checkpoint (See Rule 4)."""
    from torch._dynamo.current_scope_id import current_scope_id

    return current_scope_id() > 1


# What `torch.compiler.assume_constant_result` does, without importing the compiler.
is_in_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unchecked(run: Callable[..., T], *args: Any) -> T:
    """Call `run`, which the compiler lets change objects from before a checkpoint (See Rule 4)."""
    dynamo: Any = torch._dynamo
    return dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(run, *args)


class ComputedAgain:
    """A context in code that the compiler follows: backward computes its values again (Rule 5)."""

    def __enter__(self) -> None:
        _register()
        torch.ops.recoup.again_from_here(_anchor)

    def __exit__(self, *error: object) -> None:
        torch.ops.recoup.again_until_here(_anchor)


_anchor = torch.tensor(0, device="cpu")  # an operator without tensors is not taken to pieces
_begun: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


# The cache holds the library: torch takes back what it registers when it is freed.
@functools.cache
def _register_once() -> torch.library.Library:
    library, fx = torch.library.Library("recoup", "FRAGMENT"), cast("Any", torch.fx)
    for name, run in (("again_from_here", _from_here), ("again_until_here", _until_here)):
        library.define(f"{name}(Tensor anchor) -> ()")
        library.impl(name, run, "CompositeImplicitAutograd")
        fx.node.has_side_effect(getattr(torch.ops.recoup, name).default)
    return library


def _register() -> None:
    _register_once()


_register._dynamo_marked_constant = True  # type: ignore[attr-defined]


@never_compiled
def _from_here(anchor: Tensor) -> None:
    graph = _recorded()
    if graph is not None:
        _begun.setdefault(graph, []).append(_last(graph))


@never_compiled
def _until_here(anchor: Tensor) -> None:
    graph = _recorded()
    if graph is not None:
        begun = _begun.get(graph)
        for node in _since(begun.pop() if begun else None, graph):
            if node.op == "call_function":
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
