"""Regions by hand, values that are not kept, and chains with a memory mode."""

from __future__ import annotations

from recoup.checkpoint.planning.chains import plan_chain
from recoup.checkpoint.planning.plan import Plan, applied_plans, plan
from recoup.checkpoint.recompute import recompute
from recoup.checkpoint.recomputing import recomputing
from recoup.checkpoint.region import checkpoint
from recoup.checkpoint.sequential import Sequential
from recoup.memory.budget import plan_chains_by

__all__ = [
    "Plan",
    "Sequential",
    "applied_plans",
    "checkpoint",
    "plan",
    "recompute",
    "recomputing",
]

plan_chains_by(plan_chain)  # See NOTE [ Chains that plan themselves ]
