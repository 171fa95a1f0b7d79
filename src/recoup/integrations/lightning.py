"""Callbacks for a Lightning trainer: a byte budget, and one draw of noisy weights a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import signature_utils
from torch import nn

from recoup import weights
from recoup.integrations import PlanningCallback
from recoup.planning.options import NoOutputError, PlanOptions
from recoup.planning.plan import Plan
from recoup.planning.search import plan_of

__all__ = ["MemoryBudget", "WeightStep"]


class MemoryBudget(PlanningCallback, Callback):
    """A callback that plans for a number of bytes with the first batch, and applies the plan.

    The planned step is the module's `training_step`, under the trainer's precision. Its logging
    is off while the plan is made. A batch for which it returns None is left out. Backward pays as
    the plan says.

    Args:
        budget: bytes: an int, or a string such as ``"2 GiB"``.
        blocks: as for `recoup.plan`; names are relative to the module.
        budget_of: as for `recoup.plan`; "total" counts the state of the first optimizer.
        show: a function to call with the plan once it is made, such as ``print``.
        compile: as for `recoup.plan`: whether blocks may run compiled.
        exact: as for `recoup.plan`: whether no block may be inverted.
        offload_to: as for `recoup.plan`: where the inputs of blocks may wait for backward.
        tiles: as for `recoup.plan`: whether the output layer may run in tiles.
        headroom: as for `recoup.plan`: the part of the budget that is left for fragmentation.
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
        exact: bool = True,
        offload_to: str | os.PathLike[str] | None = None,
        tiles: bool | int = False,
        headroom: float | None = None,
        replan: bool = False,
    ) -> None:
        options = PlanOptions(
            blocks=blocks, budget_of=budget_of, compile=compile, exact=exact,
            offload_to=offload_to, tiles=tiles, headroom=headroom,
        )  # fmt: skip
        super().__init__(budget, options, show, replan=replan)

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
        takes = cast("Any", signature_utils).is_param_in_hook_signature
        is_numbered = takes(pl_module.training_step, "batch_idx", min_args=2)
        args, options = (batch, batch_idx) if is_numbered else (batch,), self.options
        if options.budget_of == "total":
            options = replace(options, optimizer=_first(trainer.optimizers))
        with trainer.precision_plugin.train_step_context(), _without_logs(pl_module):
            if planned is not None and planned.replanner is not None:
                planned.replanner.serve(args, {})
                return
            step = options.step(pl_module, pl_module.training_step, args, {})
            try:
                plan = plan_of(step, self.budget, options, replan=self.replan)
            except NoOutputError:
                return  # the trainer leaves this batch out, too
        self._apply(plan)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the plan from the module."""
        self._remove()


class WeightStep(Callback):
    """A callback by which each `training_step` is one step for weight dropout and weight noise.

    It enters `recoup.weights.step` around `training_step`, so that each weight has one draw in it,
    wherever it is read, and a schedule counts it once.

    Kept: 8 bytes a weight, as in a forward. Backward pays nothing for it.

    Example:
        >>> from recoup.integrations.lightning import WeightStep
        >>> callback = WeightStep()  # for Trainer(callbacks=[callback])
    """

    _put: Any = None  # in the place of `training_step`, and what the module itself had there
    _own: Any = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the step around the module's `training_step`."""
        self._own = vars(pl_module).get("training_step")
        self._put = weights.step(pl_module)(pl_module.training_step)
        vars(pl_module)["training_step"] = self._put

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the module its own `training_step` back."""
        own = vars(pl_module)
        if self._put is not None and own.get("training_step") is self._put:
            del own["training_step"]
            own |= {} if self._own is None else {"training_step": self._own}
        self._put = self._own = None

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Give it back after an exception, too."""
        self.teardown(trainer, pl_module, "fit")


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
