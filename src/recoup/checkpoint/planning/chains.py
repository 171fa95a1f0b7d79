"""Plans of chains that take bytes as their `memory`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from recoup.checkpoint.planning.plan import Plan, plan_call

__all__ = ["plan_chain"]


def plan_chain(
    chain: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    budget: str,
    blocks: Iterable[nn.Module],
) -> Plan:
    """Plan a chain, and let it follow the plan as long as somebody holds it."""
    return plan_call(chain, call, args, {}, budget=budget, blocks=blocks).apply_while_held()
