"""Policies: plans that treat the blocks of a model as people do by hand, by name.

NOTE [ Policies ]

Rule 1. A policy says what each block does, so there is nothing to search: its plan has one schedule
        of the blocks that were measured, is rehearsed and compared as any plan, and has no budget.
Rule 2. As by hand, the last block runs again, too, though its residuals are needed at once; and of
        blocks that a step calls several times, all calls are treated alike. Blocks through which no
        gradient goes keep nothing in any case.
Rule 3. To save attention is to keep products (NOTE [ Kept products ]), of which a block then has no
        others to choose from.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from typing import Literal, get_args

from recoup.planning.options import PlanOptions
from recoup.planning.planned_stages import each_alone
from recoup.planning.priced_blocks import PricedBlocks
from recoup.planning.pricing import MeasuredCall, price, selections
from recoup.planning.work import is_attention
from recoup.schedules import Point, simulate

__all__ = ["NO_BUDGET", "Policy", "check_policy", "under_policy"]

Policy = Literal["full", "every 2nd block", "save attention", "keep"]
NO_BUDGET = sys.maxsize
# They say what a plan may choose.
_CHOICES = ("compile", "exact", "offload_to", "tiles", "headroom")


def check_policy(policy: str, budget: int | str | None, options: PlanOptions) -> None:
    """Raise ValueError if a policy is unknown, or something is given that it leaves no choice of.

    Args:
        policy: the policy.
        budget: the budget; None for none.
        options: the options of the plan.
    """
    names = get_args(Policy)
    if policy not in names:
        shown = ", ".join(f'"{name}"' for name in names)
        raise ValueError(f"`policy` is {policy!r}, but must be one of {shown}, or None.")
    if budget is not None:
        raise ValueError(
            f"`budget` is {budget!r}, and `policy` {policy!r}, but a plan follows one of them: "
            "the fastest that keeps to the bytes, or what the policy says, whatever it takes. "
            "Choose one."
        )
    plain = PlanOptions()
    given = [name for name in _CHOICES if getattr(options, name) != getattr(plain, name)]
    if given:
        raise ValueError(
            f"`{given[0]}` is {getattr(options, given[0])!r}, but `policy` {policy!r} says what "
            f"each block does. Leave `{given[0]}` out, or give a `budget` in place of the policy."
        )


def under_policy(kind: PricedBlocks, policy: Policy) -> PricedBlocks:
    """Return the blocks with the one plan that follows a policy, and that which keeps everything.

    Args:
        kind: the blocks with their costs.
        policy: the policy.

    Raises:
        ValueError: attention is to be saved, and none of the blocks has a kernel for it.
    """
    saves_attention = policy == "save attention"
    if saves_attention and kind.calls:
        calls = [_choosing_attention(call) for call in kind.measured.calls]
        kind = kind._replace(measured=replace(kind.measured, calls=calls))
        kind = kind.repriced(calls, price(kind.measured, None), kind.seconds)
        if not any(each.products for call in calls for each in selections(call)):
            raise ValueError(
                f"`policy` is {policy!r}, but no block was seen to call a kernel of attention that "
                "could be kept alone. Let the model call torch.nn.functional."
                'scaled_dot_product_attention (`attn_implementation="sdpa"`), which has a kernel '
                'without dropout on every device, or give "full".'
            )
    whole = kind.points[-1]
    if policy == "keep" or not kind.calls:
        return kind._replace(points=[whole], policy=policy)
    places = {id(call.module): None for call in kind.calls}
    again = set(list(places)[:: 2 if policy == "every 2nd block" else 1])
    kept: list[int | None] = []
    for call, cost in zip(kind.calls, kind.costs, strict=False):
        runs_again = call.until_again is not None and id(call.module) in again
        most = len(cost.results) if saves_attention else 0
        kept.append(most if runs_again else None)
    schedule = replace(each_alone(kept), name=policy)
    found = simulate(schedule, costs=kind.costs)
    point = Point(found.peak_bytes, found.seconds, found.num_forwards, schedule)
    return kind._replace(points=[point, whole], policy=policy)


def _choosing_attention(call: MeasuredCall) -> MeasuredCall:
    products = [p if is_attention(p.func) else p._replace(start=inf) for p in call.products]
    return replace(call, products=products)
