"""One region by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from recoup.errors import ReplayError
from recoup.residuals.executor import Plan, Result
from recoup.residuals.held import Held, code_of
from recoup.residuals.stage import Stage, State
from recoup.residuals.tree import Tree, flatten
from recoup.schedules import constant

__all__ = ["call_to_values", "checkpoint"]

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
    return _run(fn, args, kwargs, _plan().execute)


def call_to_values(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """Call `fn` as `checkpoint` does, with the tensors that it returns not kept either."""
    return _run(fn, args, kwargs, _plan().execute_to_values)


def _run(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    execute: Callable[[Sequence[Stage], State], Result],
) -> T:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    # A call of plain tensors, the common one, is spared the walk through nested values.
    state, tree = flatten((args, kwargs) if kwargs else args)
    call = _Call(fn, tree, bool(kwargs))
    state, _ = execute((call,), state)
    return call.take_result().unflatten(state)


@functools.cache
def _plan() -> Plan:
    return Plan(constant(["recompute"]))


class _Call:
    """A call as the one stage of a chain."""

    __slots__ = (
        "_fn",
        "_has_kwargs",
        "_has_run",
        "_result",
        "_tree",
        "code",
        "held",
        "modules",
        "name",
    )

    def __init__(self, fn: Callable[..., Any], tree: Tree, has_kwargs: bool) -> None:
        self._fn = fn
        self._tree = tree
        self._has_kwargs = has_kwargs
        self._has_run = False
        self._result = tree
        called = getattr(fn, "__qualname__", None) or type(fn).__name__
        self.name = f"the checkpointed call of {called}"
        self.held = Held(fn)
        self.modules = (*self.held.modules, *tree.modules())
        self.code: object = fn if isinstance(fn, nn.Module) else code_of(fn)

    def take_result(self) -> Tree:
        """Return the form of the result and forget it: it may hold what holds this call."""
        result, self._result = self._result, self._tree
        return result

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        given: Any = self._tree.unflatten(state)
        output = self._fn(*given[0], **given[1]) if self._has_kwargs else self._fn(*given)
        is_first = not self._has_run
        if is_first:
            self._has_run = True
            self._check_arguments(given, state)
        state, result = flatten(output)
        if is_first:
            self._result = result
        return state, None

    def inverse(self, state: State) -> State:
        raise NotImplementedError

    def _check_arguments(self, given: Any, state: State) -> None:
        if self._tree.is_flat:
            return
        tensors, tree = flatten(given)
        same = len(tensors) == len(state) and all(
            a is b for a, b in zip(tensors, state, strict=True)
        )
        if not same or not self._tree.matches(tree):
            raise ReplayError(
                f"{self.name} changes a list or dict among its arguments, which a second run would "
                "do again. Return what it adds, and add it outside."
            )
