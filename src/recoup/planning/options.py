"""The options of a plan: what a step is, and which ways its blocks may take."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from recoup.planning.compiling import backend_of
from recoup.planning.losses import losses_from, losses_of_several
from recoup.planning.offload_place import NOWHERE, OffloadPlace
from recoup.planning.sizes import check_budget_of
from recoup.planning.step import Forwards, Step
from recoup.planning.tiling import checked_tiles

__all__ = ["PlanOptions"]


@dataclass(frozen=True)
class PlanOptions:
    """The options that all makers of plans share, checked; `recoup.plan` explains each.

    Args:
        loss: the loss of the step.
        blocks: the modules that are kept or recomputed as a whole.
        budget_of: what a budget bounds.
        optimizer: the optimizer, for "total".
        holds_output: whether the output is held while backward runs.
        compile: whether blocks may run compiled.
        exact: whether no block may be inverted.
        offload_to: where inputs of blocks may wait.
        tiles: whether parts may run in tiles.
        num_forwards: the number of forwards before one backward.

    Raises:
        ValueError: one of them is invalid.
    """

    loss: Callable[[Any], Any] | None = None
    blocks: str | Iterable[str | nn.Module] | None = None
    budget_of: Literal["step", "total"] = "step"
    optimizer: torch.optim.Optimizer | None = None
    holds_output: bool = True
    compile: bool | str = False
    exact: bool = True
    offload_to: str | os.PathLike[str] | None = None
    tiles: bool | int = False
    num_forwards: int = 1

    def __post_init__(self) -> None:
        check_budget_of(self.budget_of)
        backend_of(self.compile)
        checked_tiles(self.tiles)
        for name in ("exact", "holds_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, but must be True or False.")
        if type(self.num_forwards) is not int or not 1 <= self.num_forwards <= 1000:
            raise ValueError(
                f"`num_forwards` is {self.num_forwards!r}, but must be the number of times that a "
                "step calls the model before one backward, 1 to 1000."
            )
        if isinstance(self.blocks, Iterator):  # it would serve one plan
            object.__setattr__(self, "blocks", list(self.blocks))
        if self.loss is not None and (not callable(self.loss) or isinstance(self.loss, type)):
            raise ValueError(
                f"`loss` is {self.loss!r}, but must be a function from what the model returns to a "
                "scalar tensor or a tuple of them."
            )
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise ValueError(
                f"`optimizer` is {self.optimizer!r}, but must be a torch.optim.Optimizer, such as "
                "torch.optim.Adam(model.parameters())."
            )
        if self.optimizer is not None and self.budget_of == "step":
            raise ValueError(
                '`optimizer` is given, but its state counts only with budget_of="total". Leave it '
                "out, or set that."
            )

    def step(
        self,
        model: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: OffloadPlace = NOWHERE,
    ) -> Step:
        """Return a step with these options that calls the model, or a function around it."""
        losses = losses_from(self.loss)
        if call is model and self.num_forwards > 1:
            call, losses = Forwards(model, self.num_forwards), losses_of_several(self.loss)
        return Step(model, call, args, kwargs, losses, self.holds_output, place=place)

    def check_replan(self) -> None:
        """Raise a ValueError if plans with these options cannot be made for other shapes."""
        if self.compile:
            raise ValueError(
                "`replan` is True with `compile`, but compiled blocks are measured and timed for "
                "one shape. Leave one of them out, or pad batches to the shape of the example."
            )
