"""Calls that run again in backward: `recoup.checkpoint`, and those whose output is not kept either.

The latter are `recoup.recompute`, `Recompute` and `recompute_`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.utils.checkpoint
from torch import nn

from recoup._arguments import check_callable, check_flag
from recoup._core.call import Call, run_again
from recoup._core.compile import ComputedAgain, is_followed, is_traced, is_watched, uncompiled
from recoup._core.modules import check_has_own_forward, new_stand_in, with_stand_in

# A graph of the compiler computes again what torch's own checkpoint marks in it.
checkpoint_in_graph = cast("Callable[..., Any]", torch.utils.checkpoint.checkpoint)
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def checkpoint(
    fn: Callable[..., T],
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    context_fn: ContextFn | None = None,
    debug: bool = False,
    early_stop: bool = True,
    compare: bool = True,
    **kwargs: Any,
) -> T:
    """Call `fn`, and run it again in backward instead of keeping its residuals.

    Kept: the tensors in the arguments, wherever they are nested, 5 KB of random state if `fn` draws
    from a default generator, what it decides by numbers (the indices of a `topk`, a byte each; the
    bits of a comparison), a copy of the buffers that it changes, and a few sums by which the second
    run is compared with the first. Backward pays one more run of `fn`, and some 100 microseconds.
    In a graph of torch.compile it is torch's own checkpoint, and nothing is compared. A drop-in
    replacement for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` that raises an
    error where torch's function is silently wrong. It takes the same keywords; as in torch, a
    keyword of `fn` with one of these names is not passed on: bind it with `functools.partial`.

    Args:
        fn: a function or module, which must compute the same when it runs again. The second run
            repeats draws from torch's default generators and counts buffers once; other side
            effects happen twice. What changes a residual by more than rounding is an error.
        args: its arguments; tensors may be nested in tuples, lists and dicts.
        use_reentrant: must not be True.
        preserve_rng_state: accepted, but has no effect. Draws are repeated either way, and the
            random state is kept only where `fn` draws.
        determinism_check: "default" or "none", but has no effect. See `compare`.
        context_fn: returns two context managers, for the first run and for the runs after it, as
            ``create_selective_checkpoint_contexts`` of torch does. The tensors that these contexts
            keep come on top.
        debug: must not be True.
        early_stop: whether the second run may end with the last residual. Within
            ``torch.utils.checkpoint.set_checkpoint_early_stop`` that setting decides.
        compare: whether the values that the second run makes are compared with the first. If
            False, they are taken as they are, which is meant for kernels that are not
            deterministic. Shapes and types are compared either way.
        kwargs: keyword arguments of `fn`; tensors may be nested in them, too.

    Returns:
        What `fn` returns.

    Raises:
        ValueError: when `fn` cannot be called or is a class, or a keyword has a value that is not
            supported.
        ChangedError: in backward, when the second run differs from the first, and something that
            `fn` used has changed since.
        ReplayError: in backward, when the second run differs from the first for another reason.

    Example:
        >>> import recoup, torch
        >>> x = torch.ones(3, requires_grad=True)
        >>> recoup.checkpoint(lambda x: x.sin().exp().sum(), x).backward()
        >>> x.grad.shape
        torch.Size([3])

    Source: Chen et al., "Training deep nets with sublinear memory cost",
    https://arxiv.org/abs/1604.06174.
    """
    if not callable(fn) or isinstance(fn, type):
        check_callable(fn=fn)
    if type(compare) is not bool or type(early_stop) is not bool:
        check_flag(compare=compare, early_stop=early_stop)
    if use_reentrant or debug or preserve_rng_state is not True or determinism_check != "default":
        _check_keywords(use_reentrant, preserve_rng_state, determinism_check, debug)
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    if is_followed():
        more = {} if context_fn is None else {"context_fn": context_fn}
        return checkpoint_in_graph(fn, *args, use_reentrant=False, **more, **kwargs)
    name = getattr(fn, "__qualname__", None) or type(fn).__name__
    name = f"the checkpointed call of {name}"
    if context_fn is not None:
        check_callable(context_fn=context_fn)
    if context_fn is None or context_fn is torch.utils.checkpoint.noop_context_fn:
        call = Call(name, fn, args, kwargs, compares=compare)
    else:
        call = _CallWithin(name, fn, args, kwargs, compares=compare)
        contexts: Any = context_fn()
        if not isinstance(contexts, tuple) or len(cast("tuple[Any, ...]", contexts)) != 2:
            raise ValueError(
                f"`context_fn` returned {contexts!r}, but must return a tuple of two context "
                "managers: one around the first run, and one around the runs in backward."
            )
        call.context, call.later = cast("tuple[Any, Any]", contexts)
    forced = getattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", None)
    return run_again(call, stops=early_stop if forced is None else forced)


class _CallWithin(Call):
    """A call with two contexts of the caller's: one for the first run, one for later runs."""

    kept_nodes = range(2**63)  # all: the second context may give the outputs of any operators
    context: AbstractContextManager[Any]
    later: AbstractContextManager[Any]

    def _called(self, given: Any) -> Any:
        context, self.context = self.context, self.later
        with context:
            return super()._called(given)


_NO_REENTRANT = "but recoup.checkpoint has no reentrant variant. Leave it out."
_NO_TRACE = (
    "but recoup.checkpoint records no trace of operators: its errors name what has changed. Leave "
    "it out, or compare the operators of two calls of `fn`."
)
_KEYWORDS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("use_reentrant", (None, False), _NO_REENTRANT),
    ("preserve_rng_state", (True, False), "but must be a bool."),
    ("determinism_check", ("default", "none"), 'but must be "default" or "none".'),
    ("debug", (False,), _NO_TRACE),
)


def _check_keywords(*given: object) -> None:
    for (name, allowed, why), value in zip(_KEYWORDS, given, strict=True):
        if value not in allowed:
            raise ValueError(f"`{name}` is {value!r}, {why}")


def name_of(fn: object) -> str:
    """Return the name of `fn` in errors."""
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def recompute(fn_or_module: Callable[P, T], *, compare: bool = True) -> Callable[P, T]:
    """Return a callable whose output is not kept, even if the next operator would save it.

    Kept: the tensors in the arguments, unless these are such outputs themselves, and 5 KB of random
    state if it draws. Backward pays one more run, however many operators saved the output.
    In contrast, `checkpoint` frees the tensors between arguments and output, and the operator after
    it keeps the output. In a graph of torch.compile the compiler computes again, in backward, what
    the callable made; there its output is an ordinary tensor.

    Args:
        fn_or_module: a function or module, which must compute the same when it runs again, as
            for `checkpoint`.
        compare: whether what the second run makes is compared with the first, as for `checkpoint`.

    Returns:
        A callable that takes the same arguments and returns the same. The tensors that it returns
        are of a subclass of `Tensor`, which lets recoup see the operators that take them. An
        `autograd.Function` that saves one keeps it.

    Raises:
        ValueError: when `fn_or_module` cannot be called.
        ChangedError: as for `checkpoint`; also when a value that it returned has changed.
        ReplayError: as for `checkpoint`.

    Example:
        >>> import recoup, torch
        >>> x, w = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3)
        >>> y = recoup.recompute(torch.nn.functional.gelu)(x) @ w  # keeps x and w
        >>> y.sum().backward()
        >>> x.grad.shape
        torch.Size([3, 3])

    Source: "saved_tensors_hooks API extension",
    https://github.com/pytorch/pytorch/issues/129867.
    """

    check_flag(compare=compare)
    check_callable(fn_or_module=fn_or_module)

    @functools.wraps(fn_or_module, updated=())
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_plain():
            return fn_or_module(*args, **kwargs)
        if is_followed():
            with ComputedAgain():
                return fn_or_module(*args, **kwargs)
        # Around code that breaks a graph, the compiler leaves this call out of the graph, too.
        run = uncompiled(call_recomputed) if is_watched() else call_recomputed
        return run(fn_or_module, args, kwargs, compares=compare)

    return call


def is_plain() -> bool:
    """Whether nothing is kept anyway, or the code that runs is written down as a graph."""
    return not torch.is_grad_enabled() or is_traced()


def call_recomputed(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    module: nn.Module | None = None,
    *,
    compares: bool = True,
) -> Any:
    """Call `fn`, which may be the forward of a module, and keep nothing of its output."""
    name = f"the recomputed call of {name_of(fn if module is None else module)}"
    return run_again(Call(name, fn, args, kwargs, module, compares=compares), keeps_output=False)


class Recompute(nn.Module):
    """A module whose output is not kept, even if the next operator would save it.

    The form of `recoup.recompute` for ``nn.Sequential`` and other containers. Kept: the tensors in
    the arguments, unless these are such outputs themselves, and 5 KB of random state if it draws.
    Backward pays one more run. Without gradients it only calls `fn`, and so it does in a graph of
    torch.compile or torch.export: a compiler chooses itself what it keeps.

    Its state is that of `fn`, under names that begin with "fn."; `recompute_` leaves the names of a
    model as they are.

    Args:
        fn: a function or a module, for which the rules of `recoup.recompute` hold. To pickle a
            `Recompute`, its function must be one that can be pickled.

    Raises:
        ValueError: when `fn` cannot be called, or is a class.

    Example:
        >>> import recoup, torch
        >>> from torch import nn
        >>> gelu = recoup.Recompute(nn.GELU())
        >>> model = nn.Sequential(nn.Linear(8, 32), gelu, nn.Linear(32, 8))
        >>> model(torch.ones(2, 8)).sum().backward()  # the output of `gelu` was not kept
        >>> recoup.Recompute(torch.tanh)
        Recompute(tanh)
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        check_callable(fn=fn)
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `fn` without keeping its output."""
        if _is_left_alone():
            return self.fn(*args, **kwargs)
        return call_recomputed(self.fn, args, kwargs)

    def extra_repr(self) -> str:
        """Return the name of a function; a module is shown as a part."""
        if isinstance(self.fn, nn.Module):
            return ""
        return getattr(self.fn, "__name__", type(self.fn).__name__)


def recompute_(model: M, *types: type[nn.Module]) -> M:
    """Let modules of these types, wherever in `model`, not keep their outputs, as `Recompute` does.

    It changes `model` in place, and nothing but the classes of these modules: each gets a subclass
    of its own class with the same name, so names in the `state_dict`, ``isinstance``, hooks, copies
    and pickles are as before. Kept and paid: as for `recoup.recompute`. It is worth it for what is
    cheap to run and large: activations, dropout, norms.

    Args:
        model: the model, a tree of modules, which may itself be of one of the types.
        types: types of modules, such as ``nn.GELU, nn.Dropout, nn.LayerNorm``; modules of a type
            that is derived from one of them are meant, too. Those that are recomputed already stay
            as they are.

    Returns:
        `model` itself.

    Raises:
        ValueError: when a type is not one of modules or `model` contains none of it, or when a
            module has no forward of its class. Then nothing is changed.

    Example:
        >>> import recoup, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(), nn.Linear(32, 8))
        >>> recoup.recompute_(model, nn.GELU, nn.Dropout)[1]
        GELU(approximate='none', recomputed)
        >>> model(torch.ones(2, 8)).sum().backward()  # keeps the outputs of the linear layers
    """
    if not isinstance(cast("object", model), nn.Module):
        raise ValueError(f"`model` is {model!r}, but must be an nn.Module (an instance).")
    if not types:
        raise ValueError("`types` is empty. Give types of modules, such as nn.GELU, nn.Dropout.")
    modules = [*cast("Iterable[nn.Module]", model.modules())]
    given: tuple[Any, ...] = types
    for kind in given:
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise ValueError(f"`types` contains {kind!r}, but must be types of modules.")
        if not any(isinstance(module, kind) for module in modules):
            there = sorted({type(module).__name__ for module in modules})
            raise ValueError(
                f"`types` contains {kind.__name__}, but {type(model).__name__} has no module of "
                f"that type. There are: {', '.join(there)}."
            )
    chosen = [module for module in modules if isinstance(module, types)]
    for module in chosen:
        check_has_own_forward(module)
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"`types` choose a {type(module).__name__}, which has no forward: the modules in "
                "it are called one by one. Choose their types."
            )
    for module in chosen:
        kind = with_stand_in(type(module), _recomputed_class)
        object.__setattr__(module, "__class__", kind)  # a wrapper's would set it on what it wraps
    return model


def _is_left_alone() -> bool:
    """Whether a module runs as if it were not recomputed; a compiler chooses what to keep."""
    return torch.compiler.is_compiling() or is_plain()


def _recomputed_class(base: type[nn.Module]) -> type[nn.Module]:
    return new_stand_in(base, _recomputed_class, (), lambda: _members(base))


def _members(base: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_left_alone():
            return base.forward(self, *args, **kwargs)
        return call_recomputed(MethodType(base.forward, self), args, kwargs, self)

    def extra_repr(self: nn.Module) -> str:
        return ", ".join(part for part in (base.extra_repr(self), "recomputed") if part)

    return {"forward": forward, "extra_repr": extra_repr}
