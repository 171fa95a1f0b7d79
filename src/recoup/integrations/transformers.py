"""A callback that keeps training in a transformers trainer within a byte budget."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from recoup._core.compile import never_compiled
from recoup._core.pytree import flatten
from recoup.integrations import PlanningCallback
from recoup.planning.forwards import enclosing_checkpoints
from recoup.planning.options import PlanOptions
from recoup.planning.plan import Plan
from recoup.planning.search import plan_of

__all__ = ["MemoryBudget"]


class MemoryBudget(PlanningCallback, TrainerCallback):
    """A callback that plans for a number of bytes with the first batch, and applies the plan.

    The plan is made in the first forward of training that builds a graph (within a backward, too),
    for its arguments, precision and device. Backward pays as the plan says. The model's own
    checkpointing (`activation_checkpointing`, formerly `gradient_checkpointing`, which TRL switches
    on unless told otherwise) is off while it trains, with a warning: the plan decides which blocks
    run again.

    Args:
        budget: bytes: an int, or a string such as ``"2 GiB"``.
        loss: as for `recoup.plan`, where the trainer computes it outside of the model.
        blocks: as for `recoup.plan`.
        budget_of: as for `recoup.plan`; "total" counts the state of the optimizer.
        show: a function to call with the plan once it is made, such as ``print``.
        compile: as for `recoup.plan`: whether blocks may run compiled.
        exact: as for `recoup.plan`: whether no block may be inverted.
        offload_to: as for `recoup.plan`: where the inputs of blocks may wait for backward.
        tiles: as for `recoup.plan`: whether the output layer may run in tiles.
        num_forwards: as for `recoup.plan`: how many times a step calls the model before a backward.
        headroom: as for `recoup.plan`: the part of the budget that is left for fragmentation.
        replan: as for `recoup.plan`: whether batches of other shapes get plans of their own.

    Attributes:
        plan: the plan, once it is made; it stays here when training has ended. One line of the
            logger "recoup.planning.plan" (INFO) says what it does.

    Raises:
        BudgetError: at the first forward, no plan keeps to the budget.
        ValueError: `budget` is not a number of bytes.

    Example:
        >>> from recoup.integrations.transformers import MemoryBudget
        >>> callback = MemoryBudget("2 GiB")  # for Trainer(callbacks=[callback])
        >>> callback.plan is None
        True
    """

    def __init__(
        self,
        budget: int | str,
        *,
        loss: Callable[[Any], Any] | None = None,
        blocks: str | Iterable[str | nn.Module] | None = None,
        budget_of: Literal["step", "total"] = "step",
        show: Callable[[Plan], object] | None = None,
        compile: bool | str = False,  # noqa: A002
        exact: bool = True,
        offload_to: str | os.PathLike[str] | None = None,
        tiles: bool | int = False,
        num_forwards: int = 1,
        headroom: float | None = None,
        replan: bool = False,
    ) -> None:
        options = PlanOptions(
            loss=loss, blocks=blocks, budget_of=budget_of, compile=compile, exact=exact,
            offload_to=offload_to, tiles=tiles, num_forwards=num_forwards, headroom=headroom,
            holds_output=False,  # the trainer holds only the loss by then
        )  # fmt: skip
        super().__init__(budget, options, show, replan=replan)
        self._first_forward_hook: Any = None
        self._checkpointing: list[nn.Module] = []  # modules whose own checkpointing is switched off

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Switch the model's own checkpointing off, and wait for the first forward."""
        model: nn.Module = kwargs["model"]
        self._switch_checkpointing_off(model)
        options = self.options
        if options.budget_of == "total":
            optimizer = kwargs.get("optimizer")
            options = replace(options, optimizer=getattr(optimizer, "optimizer", optimizer))

        @never_compiled  # the Trainer may compile the model with its hooks
        def first_forward(module: nn.Module, given: Any, named: dict[str, Any]) -> None:
            needs_gradient = (*module.parameters(), *flatten((given, named))[0])
            builds_graph = torch.is_grad_enabled() and any(t.requires_grad for t in needs_gradient)
            if not module.training or not builds_graph or enclosing_checkpoints()[0]:
                return  # a reference model's turn, or a first pass without a graph
            self._remove_hook()
            step = options.step(module, module, given, named)
            try:
                plan = plan_of(step, self.budget, options, replan=self.replan)
            except BaseException:
                self._switch_checkpointing_on()
                raise
            self._apply(plan)

        self._remove_hook()
        self._first_forward_hook = model.register_forward_pre_hook(first_forward, with_kwargs=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the plan from the model, and switch its own checkpointing on again."""
        self._remove_hook()
        self._remove()
        self._switch_checkpointing_on()

    def _switch_checkpointing_off(self, model: nn.Module) -> None:
        self._switch_checkpointing_on()  # of a training that an exception ended
        # Wrappers (peft) have it of what they wrap, and no attribute of their own.
        own = [m for m in model.modules() if vars(m).get("gradient_checkpointing") is True]
        if own:
            warnings.warn(
                f"{type(model).__name__} has its own activation checkpointing on (TRL's default), "
                "which runs every layer again. recoup's MemoryBudget switches it off while the "
                "model trains: its plan runs again only what the budget asks for.",
                stacklevel=2,
            )
        for module in own:
            vars(module)["gradient_checkpointing"] = False
        self._checkpointing = own

    def _switch_checkpointing_on(self) -> None:
        for module in self._checkpointing:
            vars(module)["gradient_checkpointing"] = True
        self._checkpointing = []

    def _remove_hook(self) -> None:
        hook, self._first_forward_hook = self._first_forward_hook, None
        if hook is not None:
            hook.remove()
