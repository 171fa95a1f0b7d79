"""A callback that keeps training in a Lightning trainer within a byte budget."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from recoup.integrations.planning_callback import PlanningCallback
from recoup.planning.plan import Plan
from recoup.planning.search import frontier_of_call, replanned

__all__ = ["MemoryBudget"]


class MemoryBudget(PlanningCallback, Callback):
    """A callback that plans for a number of bytes with the first batch, and applies the plan.

    The planned step is the module's `training_step`, under the trainer's precision. Its logging
    is off while the plan is made. Backward pays as the plan says.

    Args:
        budget: bytes: an int, or a string such as ``"2 GiB"``.
        blocks: as for `recoup.plan`; names are relative to the module.
        budget_of: as for `recoup.plan`; "total" counts the state of the first optimizer.
        show: a function to call with the plan once it is made, such as ``print``.
        compile: as for `recoup.plan`: whether blocks may run compiled.
        tiles: as for `recoup.plan`: whether the output layer and MLPs may run in tiles.
        replan: as for `recoup.plan`: whether batches of other shapes get plans of their own.

    Attributes:
        plan: the plan, once it is made; it stays here when training has ended. One line of the
            logger "recoup.planning.plan" (INFO) says what it does.

    Raises:
        BudgetError: at the beginning of training, no plan keeps to the budget.
        ValueError: `budget` is not a number of bytes; or the module steps its optimizers itself.

    Example:
        >>> from recoup.integrations.lightning import MemoryBudget
        >>> callback = MemoryBudget("2 GiB")  # for Trainer(callbacks=[callback])
        >>> callback.plan is None
        True
    """

    def __init__(
        self,
        budget: int | str,
        *,
        blocks: str | Iterable[str | nn.Module] | None = None,
        budget_of: Literal["step", "total"] = "step",
        show: Callable[[Plan], object] | None = None,
        compile: bool | str = False,  # noqa: A002
        tiles: bool | int = False,
        replan: bool = False,
    ) -> None:
        super().__init__(budget, blocks, budget_of, show, compile, tiles, replan)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Plan, if no plan is made yet, or none that serves the shapes of the batch."""
        planned = self.plan if self._has_planned else None
        if planned is not None and planned.replanner is None:
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(pl_module).__name__} has `automatic_optimization` off, so its training "
                "step runs backward and the optimizer, which planning must not do. Call "
                "recoup.plan on its network instead."
            )
        args = (batch, batch_idx)

        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
            frontier = frontier_of_call(
                pl_module,
                pl_module.training_step,
                args,
                kwargs,
                blocks=self.blocks,
                budget_of=self.budget_of,
                compile=self.compile,
                tiles=self.tiles,
                optimizer=_first(trainer.optimizers) if self.budget_of == "total" else None,
            )
            return frontier.plan(self.budget)

        with trainer.precision_plugin.train_step_context(), _without_logs(pl_module):
            if planned is not None and planned.replanner is not None:
                planned.replanner.serve(args, {})
                return
            plan = make(args, {})
            if self.replan:
                plan = replanned(plan, args, {}, make)
        self._apply(plan)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the plan from the module."""
        self._remove()


def _first(optimizers: list[Any]) -> torch.optim.Optimizer | None:
    return getattr(optimizers[0], "optimizer", optimizers[0]) if optimizers else None


@contextmanager
def _without_logs(module: Any) -> Generator[None]:
    def nothing(*args: Any, **kwargs: Any) -> None:
        del args, kwargs

    own = cast("dict[str, Any]", vars(module))
    found = {key: own[key] for key in ("log", "log_dict") if key in own}
    own.update(log=nothing, log_dict=nothing)
    try:
        yield
    finally:
        del own["log"], own["log_dict"]
        own.update(found)
