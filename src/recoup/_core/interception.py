"""Operators that run through code of ours, without a call of Python for any other operator.

NOTE [ Interception ]

Rule 1. A dispatch mode calls Python at each operator, which takes as long as a small operator does.
        So a kernel of ours is registered for each operator that is to be intercepted, under a
        dispatch key that torch has for tests of its own; all other operators fall through it in the
        dispatcher. Kernels are registered when they are first needed, and called in those threads
        alone that have the key in their set.
Rule 2. Interceptors nest as modes do: the one that was entered last is called, and an operator that
        it runs goes to the one before.
Rule 3. The key is above autograd and autocast. `beneath` replaces what an operator computes, and
        leaves its node in the graph.
Rule 4. Hooks of ours run within the operators of others. What they compute is hidden (`unseen`).
Rule 5. Interceptors see plain tensors alone. What the compiler traces, what a transform of
        torch.func or forward-mode autograd wraps, sparse and nested tensors, and those of other
        classes pass by, and so does what their operators run.
Rule 6. Kernels may run operators themselves (a fused dropout draws its mask), as a mode does not
        see either. They run beneath autograd, which shows in the keys that are excluded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad

from recoup._core.compile import never_compiled
from recoup._core.dispatch_modes import DispatchMode, InMode
from recoup._core.fake_values import PLAIN
from recoup._core.saved_tensors import is_transformed

Interceptor = Callable[[Any, Any, dict[str, Any]], Any]
_dispatcher: Any = torch._C
_KEY_NAME = "TESTING_ONLY_GenericMode"
_key: Any = _dispatcher._dispatch_key_parse(_KEY_NAME)
_autograd_key = torch._C.DispatchKey.AutogradFunctionality
_is_excluded: Callable[[Any], bool] = _dispatcher._dispatch_tls_is_dispatch_key_excluded
_include: Callable[[Any, bool], None] = _dispatcher._dispatch_tls_set_dispatch_key_included
with _dispatcher._AutoDispatchBelowAutograd():
    hidden_keys: Any = _dispatcher._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(_key)
# Returns a context in which operators have no part in the graph, and no interceptor (See Rule 4);
# not a function of ours, for speed.
unseen: Callable[[], AbstractContextManager[None]] = functools.partial(
    _dispatcher._ExcludeDispatchKeyGuard, hidden_keys
)
_forward_mode: Any = forward_ad
# Whether the compiler traces: its tensors without values are no plain ones (See Rule 5).
_is_traced: Callable[[], object] = TracingContext.try_get
_registering = threading.Lock()
_libraries: dict[str, torch.library.Library] = {}  # by namespace; kernels live as long as these
_registered: set[Any] = set()


class _Thread(threading.local):
    """The interceptors of a thread, the last one last."""

    def __init__(self) -> None:
        self.interceptors: list[Interceptor] = []


_thread = _Thread()


@contextmanager
def intercepting(funcs: frozenset[Any], interceptor: Interceptor) -> Generator[None]:
    """A context in which operators run through a function.

    Args:
        funcs: overloads of operators. The function is given others, too, which other contexts
            intercept.
        interceptor: called with an operator, its arguments and its keyword arguments, in its place.
    """
    if not _libraries or not _registered.issuperset(funcs):
        _register(funcs)
    interceptors = _thread.interceptors
    num_around = len(interceptors)
    try:
        interceptors.append(interceptor)
        _include(_key, True)
        yield
    finally:
        del interceptors[num_around:]
        _include(_key, num_around > 0)


def _register(funcs: Iterable[Any]) -> None:
    with _registering:
        if not _libraries:
            _libraries["_"] = torch.library.Library("_", "IMPL")
            with suppress(RuntimeError):  # another copy of recoup has registered the same
                _libraries["_"].fallback(torch.library.fallthrough_kernel, _KEY_NAME)
        for func in funcs:
            if func not in _registered:
                space = func.namespace
                if space not in _libraries:
                    _libraries[space] = torch.library.Library(space, "IMPL")
                _libraries[space].impl(func, _kernel_of(func), _KEY_NAME)
                _registered.add(func)


def _kernel_of(func: Any) -> Callable[..., Any]:
    @never_compiled
    def kernel(*args: Any, **kwargs: Any) -> Any:
        interceptors = _thread.interceptors
        # A thread of autograd has the keys of the thread that called backward, and no interceptor.
        interceptor = interceptors.pop() if interceptors else None
        if not interceptors:
            _include(_key, False)
        try:
            passes_by = _is_excluded(_autograd_key)  # See Rule 6
            passes_by = passes_by or is_transformed() or _forward_mode._current_level >= 0
            if interceptor is None or passes_by or _is_traced() or not are_plain(args, kwargs):
                return func(*args, **kwargs)
            return interceptor(func, args, kwargs)
        finally:
            if interceptor is not None:
                interceptors.append(interceptor)
            _include(_key, True)

    return kernel


def are_plain(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether all tensors among these arguments are dense, and of no class but torch's own."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if type(value) not in PLAIN or value.layout is not torch.strided or value.is_nested:
                return False
        elif type(value) in (tuple, list) and not are_plain(value, {}):
            return False
    return True


def beneath(
    func: Any, args: Any, kwargs: dict[str, Any], compute: Callable[[Any, dict[str, Any]], Any]
) -> Any:
    """Run an operator with what it computes replaced; its node of the graph is as ever (Rule 3).

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        compute: called with its arguments beneath autograd and autocast; returns its output.
    """
    with InMode(_InPlaceOf(func, compute)):
        return func(*args, **kwargs)


class _InPlaceOf(DispatchMode):
    """A mode in which one operator is replaced by a function."""

    def __init__(self, func: Any, compute: Callable[[Any, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._func, self._compute = func, compute

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is self._func:
            return self._compute(args, kwargs or {})
        return func(*args, **(kwargs or {}))
