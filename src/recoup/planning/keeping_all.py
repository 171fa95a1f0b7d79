"""Models that are planned although nothing in them repeats, or can be run again.

NOTE [ What cannot be planned ]

Rule 1. If nothing repeats in a model, the outermost modules that its forward calls are its blocks.
        If there are none, the model keeps everything.
Rule 2. If the measured step fails, since a block does something else when it runs again or torch
        has no way to run it so, and the plain step does not fail, the model keeps everything. One
        warning says why if that fits the budget, and the error says it if not.
Rule 3. There is nothing to compare the plain step with: its results are right by definition.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from recoup.errors import BudgetError
from recoup.memory.timeline import timeline
from recoup.planning.blocks import Block
from recoup.planning.frontier import Frontier
from recoup.planning.plan import Plan
from recoup.planning.priced_blocks import PricedBlocks, points_of
from recoup.planning.pricing import Measured
from recoup.planning.ranks import largest_among_ranks
from recoup.planning.step import Step, seconds_of
from recoup.planning.verification import outcome_of
from recoup.schedules import Cost

__all__ = ["ExplainedFrontier", "price_whole", "remedy_for"]


def price_whole(step: Step, device: torch.device) -> PricedBlocks:
    """Run the plain step, and return the costs of a model without blocks."""
    with step.rehearsed(), timeline(device) as line:
        gradients = step.run()
        ran = line.mark()
        step.verification.expect(outcome_of(step.model, gradients), is_plain=True)
        del gradients
        step.forget()
    step.verification.compares = False  # See Rule 3
    (peak,) = largest_among_ranks(step.model, [ran.peak_bytes])
    (seconds,) = largest_among_ranks(step.model, [seconds_of(step)])
    costs = [Cost(0.0, 0, 0, tape_run_bytes=int(peak), is_fixed=True)]
    points = points_of(costs, step.place)
    return PricedBlocks(step, [], Measured(), [], [], costs, points, seconds)


def remedy_for(blocks: Sequence[Block]) -> str:
    """Return what to do if plans for blocks of which none repeats take too many bytes."""
    names = ", ".join(f"`{name}`" for name, _ in blocks[:4]) or "none"
    if any(isinstance(part, nn.RNNBase) for _, block in blocks for part in block.modules()):
        return (
            f"No modules repeat, so its blocks are what its forward calls ({names}), and a "
            "recurrent layer keeps what it makes in all time steps. Train on segments of the "
            "sequence (recoup.segments_backward)."
        )
    return (
        f"No modules repeat, so its blocks are what its forward calls ({names}). Write its layers "
        "as modules in an nn.Sequential, or name finer `blocks`."
    )


class ExplainedFrontier(Frontier):
    """The plans of a model of which little can be saved, which say why.

    Args:
        kinds: the blocks with their costs, of each kind that was measured.
        device: the device whose bytes are counted.
        standing_bytes: the bytes that are alive before a step; 0 for budgets of "step".
        remedy: what a `BudgetError` says in addition.
        reason: why everything is kept, for a warning with a plan; None for no warning.
    """

    def __init__(
        self,
        kinds: Sequence[PricedBlocks],
        device: torch.device,
        standing_bytes: int,
        remedy: str,
        reason: str | None = None,
    ) -> None:
        super().__init__(kinds, device, standing_bytes)
        self._remedy = remedy
        self._reason = reason

    def plan_now(self, budget_bytes: int) -> Plan:
        """Return the plan for a budget, as any frontier does."""
        try:
            plan = super().plan_now(budget_bytes)
        except BudgetError as error:
            error.args = (f"{error} {self._remedy}",)
            raise
        if self._reason is not None:
            warnings.warn(self._reason, stacklevel=4)
        return plan
