"""`recoup.recompute`: functions whose outputs are recomputed in backward instead of kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from recoup._core.call import Call, run_again
from recoup._core.compile import is_traced, is_watched, uncompiled
from recoup._core.compiled_graphs import ComputedAgain, is_followed
from recoup.regions.checkpoint import name_of

__all__ = ["call_recomputed", "is_plain", "recompute"]

P = ParamSpec("P")
T = TypeVar("T")


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

    if not callable(fn_or_module):
        raise ValueError(f"`fn_or_module` is {fn_or_module!r}, but must be a function or module.")

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
    """Call `fn`, and keep nothing of its output.

    Args:
        fn: the function or module.
        args: its arguments.
        kwargs: its keyword arguments.
        module: the module whose forward `fn` is, if it is one and `fn` is not the module itself.
        compares: whether what later runs make is compared with the first.
    """
    name = f"the checkpointed call of {name_of(fn if module is None else module)}"
    return run_again(Call(name, fn, args, kwargs, module, compares=compares), keeps_output=False)
