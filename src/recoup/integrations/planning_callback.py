"""The part of a memory budget that callbacks for all trainers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from torch import nn

from recoup.planning.compiling import backend_of
from recoup.planning.plan import Plan
from recoup.planning.sizes import check_budget_of, checked_budget
from recoup.planning.tiling import checked_tiles

__all__ = ["PlanningCallback"]


class PlanningCallback:
    """A callback that plans for a number of bytes with the first batch, and applies the plan.

    Each trainer's `MemoryBudget` explains the arguments.

    Attributes:
        plan: the plan; None until it is made. It stays here when training has ended.
    """

    def __init__(
        self,
        budget: int | str,
        blocks: str | Iterable[str | nn.Module] | None,
        budget_of: Literal["step", "total"],
        show: Callable[[Plan], object] | None,
        compile: bool | str,  # noqa: A002
        tiles: bool | int,
        replan: bool,
    ) -> None:
        checked_budget(budget)
        check_budget_of(budget_of)
        backend_of(compile)
        self.budget = budget
        if blocks is not None and not isinstance(blocks, str):
            blocks = list(blocks)  # an iterator would serve one plan
        self.blocks = blocks
        self.budget_of: Literal["step", "total"] = budget_of
        self.show = show
        if replan and compile:
            raise ValueError(
                "`replan` is True with `compile`, but compiled blocks are measured and timed for "
                "one shape. Leave one of them out, or pad batches to one shape."
            )
        self.compile = compile
        self.tiles = checked_tiles(tiles)
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
