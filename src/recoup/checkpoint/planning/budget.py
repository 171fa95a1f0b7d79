"""A chain that plans itself, in its first forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from recoup.checkpoint.planning.plan import Plan, plan_call
from recoup.memory import parse_bytes
from recoup.residuals.tree import flatten

__all__ = ["Budget"]


class Budget:
    """The bytes for a step of a chain, and the plan that keeps to them.

    A copy of it, made with a copy of the chain, has the bytes and no plan yet.

    Args:
        chain: whose children are the blocks.
    """

    def __init__(self, chain: nn.Module, bytes_: str | None = None) -> None:
        self._chain = chain
        self._bytes = bytes_
        self._plan: Plan | None = None
        self._num_values = 0

    @property
    def is_bound(self) -> bool:
        """Whether there are bytes to keep to."""
        return self._bytes is not None

    def bound(self, bytes_: str | None) -> None:
        """Take other bytes; None for no bound."""
        if bytes_ is not None:
            try:
                parse_bytes(bytes_)
            except ValueError as error:
                raise ValueError(str(error).replace("`value`", "`memory`")) from None
        self._bytes = bytes_
        self._forget()

    def plan_for(self, call: Callable[[Any], Any], value: Any) -> None:
        """See to it that the chain follows a plan for an input as large as this one."""
        given = flatten(value)[0]
        if self._bytes is None:
            return
        if not any(tensor.requires_grad for tensor in (*given, *self._chain.parameters())):
            return  # there is no backward
        num_values = sum(tensor.numel() for tensor in given)
        if num_values <= self._num_values and self._plan is not None and self._plan.is_applied:
            return
        self._forget()
        blocks = list({id(module): module for module in self._chain.children()}.values())
        made = plan_call(self._chain, call, (value,), {}, budget=self._bytes, blocks=blocks)
        self._plan, self._num_values = made.apply_while_held(), num_values

    def _forget(self) -> None:
        if self._plan is not None:
            self._plan.remove()
        self._plan, self._num_values = None, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Budget:
        import copy

        return Budget(copy.deepcopy(self._chain, memo), self._bytes)

    def __reduce__(self) -> Any:
        return Budget, (self._chain, self._bytes)
