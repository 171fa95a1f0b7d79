"""One region by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from recoup.residuals.calls import Call
from recoup.residuals.executor import Plan, Result
from recoup.residuals.stage import Stage, State
from recoup.schedules import constant

__all__ = ["call_to_values", "checkpoint", "run_again"]

P = ParamSpec("P")
T = TypeVar("T")


def checkpoint(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `fn`, and run it again in backward instead of keeping its residuals.

    Kept: the tensors in the arguments, wherever they are nested, and 5 KB of random state if `fn`
    draws from a default generator. Backward pays one more run of `fn`, and less than 100
    microseconds. A drop-in for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``
    that raises where that goes wrong in silence.

    Args:
        fn: a function or module. What it reads beside its arguments must not change before
            backward: parameters, buffers and modes of the modules it is, belongs to, or closes
            over are compared, and so are tensors it closes over.
        args: its arguments; tensors may be nested in tuples, lists and dicts.
        kwargs: its keyword arguments, likewise.

    Returns:
        What `fn` returns.

    Raises:
        ChangedError: in backward, when something that `fn` used has changed since.
        ReplayError: in backward, when the second run does not save what the first one saved; in
            forward, when `fn` does what cannot be repeated.

    Example:
        >>> import recoup, torch
        >>> x = torch.ones(3, requires_grad=True)
        >>> recoup.checkpoint(lambda x: x.sin().exp().sum(), x).backward()
        >>> x.grad.shape
        torch.Size([3])

    Source: Chen et al., "Training deep nets with sublinear memory cost",
    https://arxiv.org/abs/1604.06174.
    """
    reentrant = kwargs.pop("use_reentrant", False)
    if reentrant:
        raise ValueError(
            "`use_reentrant` is True, but recoup.checkpoint has no reentrant variant. Leave it out."
        )
    return _run(fn, args, kwargs, _plan(True).execute)


def call_to_values(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """Call `fn` as `checkpoint` does, with the tensors that it returns not kept either."""
    return _run(fn, args, kwargs, _plan(True).execute_to_values)


def _run(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    execute: Callable[[Sequence[Stage], State], Result],
) -> T:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    called = getattr(fn, "__qualname__", None) or type(fn).__name__
    call = Call(f"the checkpointed call of {called}", fn, args, kwargs)
    state, _ = execute((call,), call.state)
    return call.take_output(state)


def run_again(call: Call, *, stops: bool = True) -> Any:
    """Run a call that is run again in backward; to its end, if it does not `stop` before."""
    state, _ = _plan(stops).execute((call,), call.state)
    return call.take_output(state)


@functools.cache
def _plan(stops: bool) -> Plan:
    return Plan(constant(["recompute"]), stops=stops)
