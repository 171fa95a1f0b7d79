"""Plans for other shapes of the arguments than the example, and trials of plans on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recoup._core.compile import is_compiled
from recoup.planning.family import PlanOfShapes
from recoup.planning.forwards import suspended
from recoup.planning.frontier import Frontier
from recoup.planning.losses import losses_from
from recoup.planning.options import PlanOptions
from recoup.planning.plan import Plan, own_forwards
from recoup.planning.step import Step, device_of, peak_of

__all__ = ["OtherShapes"]

_ROOM = 0.02  # of the time of a step, for bytes that are left free


class OtherShapes:
    """The maker of the plans of a family.

    Args:
        model: the model.
        call: the model itself, or a function that calls it.
        budget_bytes: the budget.
        options: the options of the plans.
        frontier: a function from a model, a call, its arguments and options to their plans.

    Raises:
        ValueError: plans cannot be made for other shapes.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[..., Any],
        budget_bytes: int,
        options: PlanOptions,
        frontier: Callable[..., Frontier],
    ) -> None:
        options.check_replan()
        if call is model and is_compiled(model):
            raise ValueError(
                f"`replan` is True, but `model` is a compiled {type(model).__name__}, which does "
                "not show its arguments before its forward. Plan before compiling it, or leave "
                "`replan` out."
            )
        loss = None if options.loss is None else _served(options.loss)
        self._model, self._call, self._budget_bytes = model, call, budget_bytes
        self._options = replace(options, loss=loss)
        self._frontier = frontier

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_room: bool) -> Plan:
        """Return a plan for other arguments.

        Args:
            args: the arguments.
            kwargs: the keyword arguments.
            has_room: whether it leaves bytes of the budget free where that costs little time.

        Raises:
            BudgetError: no plan keeps to the budget.
        """
        found = self._frontier(self._model, self._call, args, kwargs, self._options)
        if has_room:
            return found.plan_with_room(self._budget_bytes, _ROOM)
        return found.plan(self._budget_bytes)

    def peak_under(
        self, plan: PlanOfShapes, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float:
        """Return the peak of a step with other arguments that follows a plan, in one step.

        It is infinite if there is no memory for it, or if other steps may take more.
        """
        if any(call.is_estimated for call in plan.planned.calls):
            return float("inf")
        losses, holds_output = losses_from(self._options.loss), self._options.holds_output
        step = Step(
            self._model, self._call, args, kwargs, losses, holds_output, tiled=plan.planned.tiled
        )
        device = device_of(self._model)
        with suspended(own_forwards(self._model)), plan.planned.followed(plan.schedule):
            try:
                return plan.standing_bytes + peak_of(step, device)
            except torch.OutOfMemoryError:
                return float("inf")


def _served(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a loss whose errors say that it has to serve other shapes."""

    def served(output: Any) -> Any:
        try:
            return loss(output)
        except Exception as error:
            raise ValueError(
                f"`loss` failed for a batch of another shape than the example ({error}). With "
                "replan=True it must serve every shape: let the model return its loss, read sizes "
                "and targets from the output, or let `loss` read the targets of the current batch "
                "from an object that the training loop updates before it calls the model."
            ) from error

    return served
