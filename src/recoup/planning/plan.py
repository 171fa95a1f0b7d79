"""Plans that fit the training step of any model into a byte budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from recoup._core.restoring import Undoing, restoring
from recoup._core.saved_tensors import check_hooks_work
from recoup.errors import BudgetError
from recoup.memory import format_bytes, parse_bytes
from recoup.planning.advice import constant_memory_of, held_by_others
from recoup.planning.blocks import Block, name_blocks
from recoup.planning.choosing import Choice, choose
from recoup.planning.following import PlanFollower
from recoup.planning.forwards import WrappedForwards, followed, suspended, wrapped_forwards_in
from recoup.planning.losses import losses_from
from recoup.planning.measuring import MeasuredCall
from recoup.planning.planned_stages import planned_stages
from recoup.planning.ranks import is_sharded, largest_among_ranks
from recoup.planning.rehearsal import uncollected
from recoup.planning.report import BlockPlan, Summary, described, rows_of
from recoup.planning.sizes import ArgumentSizes, standing_bytes
from recoup.planning.skipped_blocks import blocks_that_are_called
from recoup.planning.stages import (
    PricedBlocks,
    expect_again,
    expect_plain,
    fastest_first,
    kinds_of_blocks,
    price_blocks,
)
from recoup.planning.step import Step, peak_of, seconds_of
from recoup.planning.verification import DifferentStepError
from recoup.schedules import Action, Cost, Point, Schedule, frontier

__all__ = ["Plan", "applied_plans", "plan"]


def plan(
    model: nn.Module,
    *example_args: Any,
    budget: int | str,
    loss: Callable[[Any], Any] | None = None,
    blocks: str | Iterable[str | nn.Module] | None = None,
    budget_of: Literal["step", "total"] = "step",
    optimizer: torch.optim.Optimizer | None = None,
    holds_output: bool = True,
    **example_kwargs: Any,
) -> Plan:
    """Choose what each block of a model does with its residuals, so that a step keeps to a budget.

    Planning runs a few steps that leave no trace: parameters, buffers, gradients and the random
    stream are restored. The first step recomputes every block in backward and measures it. Then the
    fastest schedule within the budget is found, and a step that follows it is run, so that its peak
    is measured and not only predicted. If there is room for a plain step, it is run, too, and the
    results of the planned step are compared with it. The model does not change before `Plan.apply`.

    Kept: what fits in `budget`. Backward pays for the blocks that are recomputed; printing the plan
    shows the cost of each.

    Args:
        model: any module. The plan is for its current mode (training or evaluation), and for the
            autocast that is in force.
        example_args: its arguments as in training, with the largest batch that will occur.
        budget: a number of bytes, as an int or a string such as ``"2 GiB"``.
        loss: a function from the output of the model to a scalar, or several. The default is the
            attribute or entry `loss` of the output, or else the sum of the output. A loss that is
            computed outside the model takes memory too, so pass it.
        blocks: the modules that are kept or recomputed as a whole: a regular expression that
            matches (fullmatch) their names, or names or modules. By default the modules that
            repeat are found.
        budget_of: "step" bounds the memory that forward, loss and backward allocate beyond what is
            alive before them, gradients included; "total" adds parameters, buffers and the state
            of `optimizer`.
        optimizer: the optimizer, for "total"; its state is counted as after its first step.
        holds_output: whether the training loop holds the output of the model while backward runs
            (``output = model(batch)``). If not (``loss_fn(model(batch)).backward()``), less memory
            is needed.
        example_kwargs: keyword arguments of the model.

    Returns:
        The plan, printable.

    Raises:
        BudgetError: no plan keeps to the budget; the message and `least_bytes` give the smallest
            budget that suffices.
        ValueError: an argument is invalid.
        ReplayError: a block cannot be recomputed, a forward changes a parameter, or the results of
            a planned step differ from those of the plain step.

    Example:
        >>> import recoup, torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "abcd"]
        >>> model = torch.nn.Sequential(*blocks)
        >>> x = torch.ones(256, 64)
        >>> plan = recoup.plan(model, x, budget="600 KiB")
        >>> plan.predicted_peak_bytes <= plan.budget_bytes
        True
        >>> with plan.applied():
        ...     model(x).sum().backward()

    Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains: how to train deep
    neural networks with limited memory" (2019).
    """
    return plan_call(
        model, model, example_args, example_kwargs, budget=budget, loss=loss, blocks=blocks,
        budget_of=budget_of, optimizer=optimizer, holds_output=holds_output,
    )  # fmt: skip


def plan_call(
    model: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    budget: int | str,
    loss: Callable[[Any], Any] | None = None,
    blocks: str | Iterable[str | nn.Module] | None = None,
    budget_of: Literal["step", "total"] = "step",
    optimizer: torch.optim.Optimizer | None = None,
    holds_output: bool = True,
) -> Plan:
    """Return a plan, as `plan` does, for steps that call the model or a function around it."""
    budget_bytes = checked_budget(budget, budget_of)
    _check_arguments(model, loss, budget_of, optimizer)
    check_hooks_work()
    standing = standing_bytes(model, optimizer) if budget_of == "total" else 0
    standing, least_budget = map(int, largest_among_ranks(model, [standing, -budget_bytes]))
    budget_bytes = -least_budget
    device = _device_of(model)
    step = Step(model, call, args, kwargs, losses_from(loss), holds_output)
    named = name_blocks(model, blocks)
    own = [each for each in wrapped_forwards_in(model) if getattr(each.owner, "model", 0) is model]
    with suspended(own), uncollected():  # measure the model without a plan
        named = named or blocks_that_are_called(step)
        if not named:
            raise ValueError(
                f"`model` is a {type(model).__name__} in which no modules repeat. Name its "
                "`blocks`."
            )
        kinds = [named] if blocks is not None else kinds_of_blocks(step, named)
        priced = [price_blocks(step, kind, device) for kind in kinds]
        return _fastest(priced, device, budget_bytes, standing)


def _fastest(
    kinds: Sequence[PricedBlocks], device: torch.device, budget_bytes: int, standing: int
) -> Plan:
    """Return a plan that keeps to the budget, for the blocks that are predicted to be fastest."""
    errors: list[BudgetError] = []
    for kind in fastest_first(kinds, budget_bytes - standing):
        try:
            return _verified(kind, device, budget_bytes, standing)
        except BudgetError as error:
            errors.append(error)
    raise min(errors, key=lambda error: error.least_bytes)


def _verified(kind: PricedBlocks, device: torch.device, budget_bytes: int, standing: int) -> Plan:
    """Return a plan whose step gives the results of the plain one (See NOTE [ Compared steps ]).

    Raises:
        BudgetError: no plan keeps to the budget.
        DifferentStepError: the results of every plan that was tried differ.
    """

    def planned(kind: PricedBlocks) -> Plan:
        return Plan(kind.step, device, budget_bytes, standing, *kind[1:])

    expect_plain(kind, device)
    try:
        return planned(kind)
    except DifferentStepError as error:
        difference = error
    expect_again(kind, device)
    with suppress(DifferentStepError):
        return planned(kind)
    without_products = [replace(cost, variants=()) for cost in kind.costs]
    simpler = {
        "no results of products": kind._replace(
            costs=without_products, points=list(frontier(without_products))
        ),
        "all residuals": kind._replace(points=kind.points[-1:]),
    }
    for what, other in simpler.items():
        with suppress(DifferentStepError, BudgetError):
            plan = planned(other)
            warnings.warn(
                f"The plan keeps {what}. With the one first chosen: {difference}", stacklevel=5
            )
            return plan
    raise difference


def checked_budget(budget: int | str, budget_of: str) -> int:
    """Return the bytes of a budget.

    Raises:
        ValueError: `budget` is not a number of bytes, or `budget_of` is unknown.
    """
    if budget_of not in ("step", "total"):
        raise ValueError(f'`budget_of` is {budget_of!r}, but must be "step" or "total".')
    try:
        return parse_bytes(budget)
    except ValueError as error:
        raise ValueError(str(error).replace("`value`", "`budget`")) from None


def _check_arguments(model: Any, loss: Any, budget_of: str, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model` is a {type(model).__name__}, but must be a torch.nn.Module.")
    if loss is not None and not callable(loss):
        raise ValueError(
            f"`loss` is {loss!r}, but must be a function from what the model returns to a scalar "
            "tensor or a tuple of them."
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"`optimizer` is {optimizer!r}, but must be a torch.optim.Optimizer, such as "
            "torch.optim.Adam(model.parameters())."
        )
    if optimizer is not None and budget_of == "step":
        raise ValueError(
            '`optimizer` is given, but its state counts only with budget_of="total". Leave it out, '
            "or set that."
        )
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "`model` has parameters on the meta device. Allocate them first: "
            'model.to_empty(device="cpu").'
        )
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ValueError(
            "`model` is a DistributedDataParallel or DataParallel, whose steps wait for other "
            "ranks. Plan for `model.module`, on every rank."
        )


def _device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cuda":
            return tensor.device
    return torch.device("cpu")


def applied_plans(model: nn.Module) -> list[Plan]:
    """Return the plans that modules of a model follow.

    Use it to find a plan again and remove it with `Plan.remove`.

    Args:
        model: any module.

    Returns:
        The plans of the model, of its submodules, and of other models that have one of its modules
        as a block, each once.

    Example:
        >>> import recoup, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> made = recoup.plan(model, torch.ones(2, 8), budget="1 MiB").apply()
        >>> recoup.applied_plans(model) == [made]
        True
        >>> made.remove()
        >>> recoup.applied_plans(model)
        []
    """
    owners = [each.owner for each in wrapped_forwards_in(model)]
    return [owner for owner in owners if isinstance(owner, Plan)]


class Plan:
    """A plan: what each block of a model does with its residuals; made by `recoup.plan`.

    It takes the fastest point of the frontier whose rehearsal keeps to the budget.

    Args:
        step: the step that is planned.
        device: the device of the model.
        budget_bytes: the budget.
        standing_bytes: the part of it that is alive before a step; 0 for a budget of "step".
        found: the names and modules of its blocks.
        calls: the calls of blocks that were seen, in order.
        costs: the costs of these calls, and of the code after them.
        points: the plans that are best for some budget, from the least bytes to the most.

    Raises:
        BudgetError: none of these plans keeps to the budget.
    """

    def __init__(
        self,
        step: Step,
        device: torch.device,
        budget_bytes: int,
        standing_bytes: int,
        found: Sequence[Block],
        calls: Sequence[MeasuredCall],
        costs: Sequence[Cost],
        points: Sequence[Point],
    ) -> None:
        self.model = step.model
        self._root = step.model if step.call is step.model else None
        self.budget_bytes = budget_bytes
        self.standing_bytes = standing_bytes
        self.costs = tuple(costs)
        self.frontier = tuple(points)
        self._found = tuple(found)
        self._calls = tuple(calls)
        self.held_by_others = tuple(held_by_others(step.model, calls))
        self._forwards: WrappedForwards | None = None
        self._sizes = ArgumentSizes(step.args, step.kwargs)
        self._device = device
        self._choice, self._point = self._chosen(step)
        self._step_seconds = self._seconds_of(step)

    # -- properties ------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """The number of modules that are its blocks."""
        return len(self._found)

    @property
    def num_seen(self) -> int:
        """The number of blocks that were called during planning; others will be recomputed."""
        return len({id(call.module) for call in self._calls})

    @property
    def schedule(self) -> Schedule:
        """The schedule of the blocks; its last stage is the code after the blocks."""
        return self._point.schedule

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of `schedule`."""
        return self.schedule.actions

    @property
    def predicted_peak_bytes(self) -> int:
        """The peak of a step as predicted from the cost of each block."""
        return self.standing_bytes + self._point.peak_bytes

    @property
    def rehearsed_peak_bytes(self) -> int:
        """The peak of the step that was run under the plan.

        If none of the forwards that were tried called all blocks (LayerDrop), it is at least the
        predicted peak of a step that does.
        """
        return self.standing_bytes + self._choice.peak_bytes

    @property
    def least_bytes(self) -> int:
        """The smallest budget known to suffice: the peak of a rehearsal with the least bytes."""
        return self.standing_bytes + self._choice.least_bytes

    @property
    def most_bytes(self) -> int:
        """The predicted peak of a step that keeps every residual."""
        return self.standing_bytes + self.frontier[-1].peak_bytes

    @property
    def blocks(self) -> tuple[BlockPlan, ...]:
        """The planned treatment of each block, in the order of forward."""
        work = self._point.seconds + 2 * self.frontier[-1].seconds  # backward is twice a forward
        scale = self._step_seconds / work if work else 0.0
        return rows_of(self._calls, self.costs, self.schedule, scale)

    def __str__(self) -> str:
        return described(
            Summary(
                model=type(self.model).__name__,
                rows=self.blocks,
                num_blocks=self.num_blocks,
                num_seen=self.num_seen,
                budget_bytes=self.budget_bytes,
                standing_bytes=self.standing_bytes,
                predicted_bytes=self.predicted_peak_bytes,
                rehearsed_bytes=self.rehearsed_peak_bytes,
                least_bytes=self.least_bytes,
                most_bytes=self.most_bytes,
                advice=[*constant_memory_of(self.model), *self.held_by_others],
            )
        )

    # -- following -------------------------------------------------------------------------

    @property
    def is_applied(self) -> bool:
        """Whether the model follows it."""
        return self._forwards is not None and self._forwards.is_in_place

    def apply(self) -> Plan:
        """Let the model follow the plan in every forward with gradients, until `remove`.

        A plan that the model follows already is removed.

        Returns:
            The plan.

        Raises:
            ValueError: a block that another model shares follows the plan of that model.
        """
        return self._apply(is_held=True)

    def apply_while_held(self) -> Plan:
        """Let the model follow the plan as `apply` does, as long as the plan object is alive.

        Returns:
            The plan.
        """
        return self._apply(is_held=False)

    def _apply(self, *, is_held: bool) -> Plan:
        if not self.is_applied:
            replaced = [each for each in applied_plans(self.model) if each.model is self.model]
            for each in replaced:
                each.remove()
            try:
                follower = self._follower(self._point, self._sizes)
                self._forwards = WrappedForwards(follower, self, is_held=is_held)
                self._forwards.begin(self._followed_modules)
            except BaseException:
                for each in replaced:
                    each.apply()
                raise
        return self

    def remove(self) -> None:
        """Restore the forwards of the model; existing graphs still follow the plan."""
        forwards, self._forwards = self._forwards, None
        if forwards is not None:
            forwards.end()

    @restoring
    def applied(self) -> Generator[Plan]:
        """Return a context in which the model follows the plan; it restores the previous plan."""
        before = [each for each in applied_plans(self.model) if each.model is self.model]
        with Undoing() as undo:
            for each in before:
                if each is not self:
                    undo.later(each.apply)
            undo.later(self.remove)
            self.apply()
            yield self

    def figure(self, path: str | Path) -> Path:
        """Draw memory over a step before and after, and time against bytes of all plans.

        Args:
            path: the path of the picture, ending in .png, .svg or .pdf.

        Returns:
            The path.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: `path` has another ending.
        """
        from recoup.planning.figure import Plans, draw

        bounds = (self.budget_bytes, self.standing_bytes)
        return draw(Plans(self.costs, self.frontier, self._point, *bounds), Path(path))

    def _follower(self, point: Point, sizes: ArgumentSizes | None = None) -> PlanFollower:
        stages = planned_stages(point.schedule, self._calls)
        return PlanFollower(self._root, stages, self._found, sizes)

    @property
    def _followed_modules(self) -> list[nn.Module]:
        roots = [] if self._root is None else [self._root]
        return [*roots, *(module for _, module in self._found)]

    def _chosen(self, step: Step) -> tuple[Choice, Point]:
        """Return the fastest point whose rehearsal keeps to the budget."""

        is_partly_estimated = any(call.is_estimated for call in self._calls)
        step_budget = self.budget_bytes - self.standing_bytes

        def rehearse(index: int) -> int:
            point = self.frontier[index]
            with self._followed(point):
                peak_bytes = peak_of(step, self._device)
                if peak_bytes > step_budget and is_sharded(step.model):  # See Rule 3 of ranks.py
                    peak_bytes = min(peak_bytes, peak_of(step, self._device))
            # Other forwards call more blocks than the rehearsal did.
            return max(peak_bytes, point.peak_bytes) if is_partly_estimated else peak_bytes

        predicted = [point.peak_bytes for point in self.frontier]
        choice = choose(predicted, step_budget, rehearse)
        if choice.point_index is None:
            raise self._too_small(self.standing_bytes + choice.least_bytes)
        return choice, self.frontier[choice.point_index]

    def _too_small(self, least: int) -> BudgetError:
        of_which = (
            f", {format_bytes(self.standing_bytes)} of which are alive before a step"
            if self.standing_bytes
            else ""
        )
        inverting = "".join(f" {line}" for line in constant_memory_of(self.model))
        return BudgetError(
            f"`budget` is {format_bytes(self.budget_bytes)} ({self.budget_bytes} bytes), but the "
            f"least that a step of this model was seen to take is {format_bytes(least)} ({least} "
            f"bytes{of_which}). Give that much, a smaller batch, or smaller `blocks`.{inverting}",
            least,
        )

    def _seconds_of(self, step: Step) -> float:
        with self._followed(self._point):
            return seconds_of(step)

    def _followed(self, point: Point) -> AbstractContextManager[None]:
        return followed(self._followed_modules, self._follower(point))
