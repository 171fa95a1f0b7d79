"""`recoup.checkpoint`: a checkpointed call of a function or module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
import torch.utils.checkpoint

from recoup._arguments import check_callable, check_flag
from recoup._core.call import Call, run_again
from recoup._core.compile import is_followed

__all__ = ["checkpoint", "checkpoint_in_graph", "name_of"]

# A graph of the compiler computes again what torch's own checkpoint marks in it.
checkpoint_in_graph = cast("Callable[..., Any]", torch.utils.checkpoint.checkpoint)
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
T = TypeVar("T")


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
        ValueError: when a keyword has a value that is not supported.
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
    if not callable(fn):
        raise ValueError(f"`fn` is {fn!r}, but must be a function or module.")
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
        call.context, call.later = _contexts_of(context_fn)
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


def _contexts_of(context_fn: ContextFn) -> tuple[Any, Any]:
    contexts: Any = context_fn()
    if not isinstance(contexts, tuple) or len(cast("tuple[Any, ...]", contexts)) != 2:
        raise ValueError(
            f"`context_fn` returned {contexts!r}, but must return a tuple of two context "
            "managers: one around the first run, and one around the runs in backward."
        )
    return cast("tuple[Any, Any]", contexts)


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
