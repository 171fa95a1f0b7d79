"""What makes plans for other shapes and numbers of forwards than the example, and tries plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from recoup._core.compile import is_compiled
from recoup.planning.forwards import Args, Kwargs, suspended
from recoup.planning.frontier import frontier_of
from recoup.planning.options import PlanOptions
from recoup.planning.plan import Plan, own_forwards
from recoup.planning.step import rehearse_planned

__all__ = ["PlanMaker"]

_ROOM = 0.02  # of the time of a step, for bytes that are left free


class PlanMaker(NamedTuple):
    """The maker of the plans for other shapes, and of those for more forwards.

    Args:
        model: the model.
        call: the model itself, or a function that calls it.
        budget_bytes: the budget.
        options: the options of the plans.
    """

    model: nn.Module
    call: Callable[..., Any]
    budget_bytes: int
    options: PlanOptions

    def check(self) -> None:
        """Raise a ValueError if plans cannot be made for other shapes."""
        self.options.check_replan()
        if self.call is self.model and is_compiled(self.model):
            raise ValueError(
                f"`replan` is True, but `model` is a compiled {type(self.model).__name__}, which "
                "does not show its arguments before its forward. Plan before compiling it, or "
                "leave `replan` out."
            )

    def plan(
        self,
        args: Args,
        kwargs: Kwargs,
        num_forwards: int,
        *,
        has_room: bool = False,
        taken_bytes: int = 0,
    ) -> Plan:
        """Return a plan for other arguments.

        Args:
            args: the arguments.
            kwargs: the keyword arguments.
            num_forwards: the number of forwards of a step.
            has_room: whether it leaves bytes of the budget free where that costs little time.
            taken_bytes: the bytes of the budget that forwards before it hold.

        Raises:
            BudgetError: no plan keeps to the budget.
        """
        options = self._options_for(num_forwards)
        found = frontier_of(options.step(self.model, self.call, args, kwargs), options)
        if has_room:
            return found.plan_with_room(self.budget_bytes, _ROOM)
        plan = found.plan(self.budget_bytes - taken_bytes)
        plan.budget_bytes = self.budget_bytes
        return plan

    def peak_under(self, plan: Plan, args: Args, kwargs: Kwargs) -> float:
        """Return the peak of a step with other arguments that follows a plan, in one step.

        It is infinite if there is no memory for it, or if other steps may take more.
        """
        planned = plan.planned
        if any(call.is_estimated for call in planned.calls):
            return math.inf
        options = self._options_for(planned.num_forwards)
        step = options.step(self.model, self.call, args, kwargs)
        step = replace(step, tiled=planned.tiled)
        with suspended(own_forwards(self.model)), planned.followed(plan.schedule):
            try:
                return plan.standing_bytes + rehearse_planned(step).peak_bytes
            except torch.OutOfMemoryError:
                return math.inf

    def _options_for(self, num_forwards: int) -> PlanOptions:
        own, loss = self.options, self.options.loss
        if loss is None:
            return replace(own, num_forwards=num_forwards)
        if own.num_forwards not in (1, num_forwards):
            raise ValueError(f"`loss` takes {own.num_forwards} outputs, and not {num_forwards}.")

        def served(*outputs: Any) -> Any:
            try:
                each = [outputs] if own.num_forwards > 1 else [(output,) for output in outputs]
                losses = [loss(*given) for given in each]
            except Exception as error:
                raise ValueError(
                    f"`loss` failed for a batch of another shape than the example ({error}). With "
                    "replan=True it must serve every shape: let the model return its loss, read "
                    "sizes and targets from the output, or let `loss` read the targets of the "
                    "current batch from an object that the training loop updates before it calls "
                    "the model."
                ) from error
            return losses[0] if len(losses) == 1 else losses

        return replace(own, num_forwards=num_forwards, loss=served)
