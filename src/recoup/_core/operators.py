"""Operators: what is known of them, and code of ours that they run through.

NOTE [ The schema of an operator ]

The schema and tags of an operator say what it writes to and whether it draws random numbers.
Operators of torch that change a statistic without declaring it are known by the names of their
arguments. An operator that is not torch's own is treated as one that may draw.

NOTE [ Interception ]

Rule 1. A dispatch mode calls Python at each operator, which takes as long as a small operator does.
        So a kernel of ours is registered for each operator that is intercepted, when it is first
        needed, under a dispatch key that torch has for tests; all other operators fall through it.
        Kernels are called in those threads alone that have the key in their set.
Rule 2. Interceptors nest as modes do: the one that was entered last is called, and an operator that
        it runs, or has not asked for, goes to the one before.
Rule 3. The key is above autograd and autocast. `beneath` replaces what an operator computes, and
        leaves its node in the graph.
Rule 4. Hooks of ours run within the operators of others. What they compute is hidden, by
        `hidden_keys`.
Rule 5. Interceptors see plain tensors alone. What the compiler traces, what a transform of
        torch.func or forward-mode autograd wraps, sparse and nested tensors, and those of other
        classes pass by, and so does what their operators run.
Rule 6. Kernels may run operators themselves (a fused dropout draws its mask). Interceptors do not
        see these, as a mode does not: they run beneath autograd, which shows in the keys that are
        excluded then.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from recoup._core.compile import never_compiled
from recoup._core.saved_tensors import is_transformed
from recoup._core.tensors import PLAIN
from recoup.errors import RecoupError

_dispatcher: Any = torch._C
_TORCH_NAMESPACES = frozenset(("aten", "prim", "prims"))
_ALLOCATING = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
_OVERWRITING = frozenset((
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_",
    "normal_", "random_", "uniform_", "zero_",
))  # fmt: skip
_STATISTICS = frozenset(("running_mean", "running_var"))


class OperatorTraits(NamedTuple):
    """The properties of an operator that decide how its calls are recorded and repeated."""

    writes: frozenset[int | str]  # the arguments that it writes to, by position or name
    is_view: bool  # whether it only returns views of memory that exists
    makes_or_writes: bool  # whether it returns tensors, or writes to any
    overwrites: bool  # whether it ignores the previous content of what it writes to
    allocates: bool  # whether it returns uninitialized memory
    may_draw: bool  # whether it may draw random numbers


def has_schema(func: Any) -> bool:
    """Whether `func` has a schema; a higher-order operator has none, and may do anything."""
    return hasattr(func, "_schema")


def explain_higher_order(name: str, error: BaseException) -> None:
    """Raise an error that names torch.cond and its like if one of them has failed.

    Torch compiles these, which it does not do under a dispatch mode or a key of ours.
    """
    if isinstance(error, RecoupError):
        return
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    if any("_higher_order_ops" in code.co_filename for code in codes):
        raise RecoupError(
            f"{name} failed in a higher-order operator (torch.cond, while_loop, scan). Torch "
            "compiles these, and cannot where each operator is looked at, as in a region or a "
            "plan. Use a Python `if` or torch.where there, call it outside of the regions, or use "
            "torch.utils.checkpoint for this code."
        ) from error


@functools.cache
def traits_of(func: Any) -> OperatorTraits:
    """Return the properties of an operator that has a schema."""
    schema: Any = func._schema
    name = schema.name.partition("::")[2]
    writes: set[int | str] = set()
    is_view_in_place = torch.Tag.inplace_view in func.tags and not name.startswith("resize")
    for position, argument in enumerate(schema.arguments if not is_view_in_place else ()):
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or argument.name in _STATISTICS:
            writes |= {argument.name} if argument.kwarg_only else {position, argument.name}
    # `set_` and `transpose_` write nothing: the tensor becomes another view.
    aliases = not writes and any(each.alias_info is not None for each in schema.returns)
    is_torchs = func.namespace in _TORCH_NAMESPACES
    return OperatorTraits(
        writes=frozenset(writes),
        is_view=aliases or (name == "set_" and is_torchs),
        makes_or_writes=bool(writes) or any("Tensor" in str(each.type) for each in schema.returns),
        overwrites=name in _OVERWRITING or "out" in writes,
        allocates=name in _ALLOCATING,
        may_draw=torch.Tag.nondeterministic_seeded in func.tags or not is_torchs,
    )


def map_instances(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return nested arguments with `change` applied to each instance of `kind` in them."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        items = cast("list[Any]", value)
        return type(items)(map_instances(item, kind, change) for item in items)
    if type(value) is dict:
        entries = cast("dict[str, Any]", value)
        return {key: map_instances(item, kind, change) for key, item in entries.items()}
    return value


# Flags that torch sets beside the stack of modes; the names differ between releases.
_FLAGS = tuple(
    name
    for name, value in vars(dispatch).items()
    if name.startswith("_is_in_") and isinstance(value, bool)
)
# Returns how many dispatch modes are active; not a function of ours, for speed.
num_dispatch_modes: Callable[[], int] = _dispatcher._len_torch_dispatch_stack
unseen: Any = getattr(torch._C, "_DisableTorchDispatch")  # by modes  # noqa: B009
# The flags are those of the process, and every mode restores the ones that it found. So threads
# whose modes overlap would leave them set: the last of our modes to end restores the flags that
# the first one found.
_TOLD = "is_in_mode_without_ignore_compile_internals"
_IN_ANY = "is_in_any_mode_without_ignore_compile_internals"
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


class OperatorMode(DispatchMode):
    """A mode in which operators run through a function, called in their place."""

    supports_higher_order_operators = True

    def __init__(self, run: Interceptor) -> None:
        super().__init__()
        self._run = run

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        return self._run(func, args, kwargs or {})


def run_plainly(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator as it is."""
    return func(*args, **kwargs)


class InMode:
    """A context in which a dispatch mode is active."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode, self._num_around = mode, 0

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
                _dispatcher._pop_torch_dispatch_stack(None)
            if num_dispatch_modes() > self._num_around:
                self._mode.__exit__(*error)
            _active.discard(id(self))
            if not _active:
                for name, flag in zip(_FLAGS, _found, strict=True):
                    setattr(dispatch, name, flag)
                tell: Any = getattr(dispatch, f"set_{_TOLD}", None)
                if tell is not None:
                    tell(getattr(dispatch, f"_{_IN_ANY}", False))


Interceptor = Callable[[Any, Any, dict[str, Any]], Any]
_KEY_NAME = "TESTING_ONLY_GenericMode"
_key: Any = _dispatcher._dispatch_key_parse(_KEY_NAME)
_autograd_key = torch._C.DispatchKey.AutogradFunctionality
_is_excluded: Callable[[Any], bool] = _dispatcher._dispatch_tls_is_dispatch_key_excluded
_include: Callable[[Any, bool], None] = _dispatcher._dispatch_tls_set_dispatch_key_included
with _dispatcher._AutoDispatchBelowAutograd():
    # Without these, operators have no part in the graph, and no interceptor (See Rule 4).
    hidden_keys: Any = _dispatcher._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(_key)
_forward_mode: Any = forward_ad
# Whether the compiler traces: its tensors without values are no plain ones (See Rule 5).
_is_traced: Callable[[], object] = TracingContext.try_get
_registering = threading.Lock()
_libraries: dict[str, torch.library.Library] = {}  # by namespace; kernels live as long as these
_registered: set[Any] = set()


class _Thread(threading.local):
    def __init__(self) -> None:
        # The last one last, with what they ask for.
        self.interceptors: list[tuple[frozenset[Any], Interceptor]] = []


_thread = _Thread()


@contextmanager
def intercepting(funcs: frozenset[Any], interceptor: Interceptor) -> Generator[None]:
    """A context in which these overloads of operators run through a function."""
    if not _libraries or not _registered.issuperset(funcs):
        _register(funcs)
    interceptors = _thread.interceptors
    num_around = len(interceptors)
    try:
        interceptors.append((funcs, interceptor))
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
        last = interceptors.pop() if interceptors else None
        if not interceptors:
            _include(_key, False)
        try:
            passes_by = last is None or func not in last[0]
            passes_by = passes_by or _is_excluded(_autograd_key)  # See Rule 6
            passes_by = passes_by or is_transformed() or _forward_mode._current_level >= 0
            if last is None or passes_by or _is_traced() or not are_plain(args, kwargs):
                return func(*args, **kwargs)
            return last[1](func, args, kwargs)
        finally:
            if last is not None:
                interceptors.append(last)
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
    """Run an operator whose output `compute` returns, beneath autograd and autocast (Rule 3)."""

    def run(each: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return compute(args, kwargs) if each is func else each(*args, **kwargs)

    with InMode(OperatorMode(run)):
        return func(*args, **kwargs)
