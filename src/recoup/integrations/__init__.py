"""Trainers of other libraries, and the part of a memory budget that their callbacks share."""

from __future__ import annotations

from collections.abc import Callable

from recoup.planning.options import PlanOptions, checked_budget
from recoup.planning.plan import Plan


class PlanningCallback:
    """A callback that plans for a number of bytes with the first batch, and applies the plan.

    Each trainer's `MemoryBudget` explains the arguments.

    Attributes:
        plan: the plan; None until it is made. It stays here when training has ended.
    """

    def __init__(
        self,
        budget: int | str,
        options: PlanOptions,
        show: Callable[[Plan], object] | None,
        *,
        replan: bool,
    ) -> None:
        checked_budget(budget)
        if replan:
            options.check_replan()
        self.budget = budget
        self.options = options
        self.show = show
        self.replan = replan
        self.plan: Plan | None = None
        self._has_planned = False  # in the training that is going on

    def _apply(self, plan: Plan) -> None:
        self._has_planned = True
        self.plan = plan.apply()
        if self.show is not None:
            self.show(plan)

    def _remove(self) -> None:
        self._has_planned = False
        if self.plan is not None:
            self.plan.remove()
