"""The search for a plan that fits the training step of a model into a byte budget.

The blocks are found, measured and priced; the points of their frontier are rehearsed, the fastest
first, and each rehearsal is compared with the plain step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from recoup._core.saved_tensors import check_hooks_work
from recoup.errors import BudgetError
from recoup.memory import format_bytes, parse_bytes
from recoup.planning.advice import constant_memory_of
from recoup.planning.blocks import name_blocks
from recoup.planning.choosing import choose
from recoup.planning.compiled_costs import price_codes
from recoup.planning.compiling import backend_of, recompiling
from recoup.planning.following import PlannedModel
from recoup.planning.forwards import suspended, wrapped_forwards_in
from recoup.planning.losses import losses_from
from recoup.planning.plan import Plan
from recoup.planning.ranks import is_sharded, largest_among_ranks
from recoup.planning.rehearsal import uncollected
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
from recoup.schedules import frontier

__all__ = ["checked_budget", "plan", "plan_call"]

_MORE_REHEARSALS = 3  # of a plan whose ranks hold parts of the model


def plan(
    model: nn.Module,
    *example_args: Any,
    budget: int | str,
    loss: Callable[[Any], Any] | None = None,
    blocks: str | Iterable[str | nn.Module] | None = None,
    budget_of: Literal["step", "total"] = "step",
    optimizer: torch.optim.Optimizer | None = None,
    holds_output: bool = True,
    compile: bool | str = False,  # noqa: A002
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
        compile: whether blocks may run compiled. Each block is then compiled at several budgets of
            the compiler's partitioner (alike blocks once for each), all are timed, and the plan
            chooses among them, the block's own code, and running blocks again. Compiled code draws
            other random numbers, and rounds otherwise; its gradients are those of the blocks
            compiled and run plainly. Logger ``recoup.planning.compiling`` tells what is compiled.
            ``"aot_eager"`` partitions the graphs, but does not compile them.
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
        budget_of=budget_of, optimizer=optimizer, holds_output=holds_output, compile=compile,
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
    compile: bool | str = False,  # noqa: A002
) -> Plan:
    """Return a plan, as `plan` does, for steps that call the model or a function around it."""
    budget_bytes = checked_budget(budget, budget_of)
    _check_arguments(model, loss, budget_of, optimizer)
    backend = backend_of(compile)
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
        with recompiling() if backend is not None else nullcontext():
            if backend is not None:
                priced = [code for kind in priced for code in price_codes(kind, device, backend)]
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
        return _rehearsed(kind, device, budget_bytes, standing)

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


def _rehearsed(kind: PricedBlocks, device: torch.device, budget_bytes: int, standing: int) -> Plan:
    """Return the plan for the fastest point whose rehearsal keeps to the budget.

    Raises:
        BudgetError: no rehearsal keeps to the budget.
        DifferentStepError: the results of a rehearsal differ from those of the plain step.
    """
    step, budget = kind.step, budget_bytes - standing
    root = step.model if step.call is step.model else None
    planned = PlannedModel(step.model, root, kind.blocks, kind.calls)
    is_partly_estimated = any(call.is_estimated for call in kind.calls)

    def rehearse(index: int) -> int:
        point = kind.points[index]
        with planned.followed(point.schedule):
            peak_bytes = peak_of(step, device)
            for _ in range(_MORE_REHEARSALS if is_sharded(step.model) else 0):
                if peak_bytes > budget:  # See Rule 3 of ranks.py
                    peak_bytes = min(peak_bytes, peak_of(step, device))
        # Other forwards call more blocks than the rehearsal did.
        return max(peak_bytes, point.peak_bytes) if is_partly_estimated else peak_bytes

    choice = choose([point.peak_bytes for point in kind.points], budget, rehearse)
    if choice.point_index is None:
        raise _too_small(step.model, budget_bytes, standing, standing + choice.least_bytes)
    point = kind.points[choice.point_index]
    with planned.followed(point.schedule):
        step_seconds = seconds_of(step)
    return Plan(
        planned, kind.costs, kind.points, point,
        rehearsed_bytes=choice.peak_bytes, least_bytes=choice.least_bytes,
        budget_bytes=budget_bytes, standing_bytes=standing,
        step_seconds=step_seconds, sizes=ArgumentSizes(step.args, step.kwargs),
    )  # fmt: skip


def _too_small(model: nn.Module, budget_bytes: int, standing: int, least: int) -> BudgetError:
    alive = f", {format_bytes(standing)} of which are alive before a step" if standing else ""
    inverting = "".join(f" {line}" for line in constant_memory_of(model))
    return BudgetError(
        f"`budget` is {format_bytes(budget_bytes)} ({budget_bytes} bytes), but the least that a "
        f"step of this model was seen to take is {format_bytes(least)} ({least} bytes{alive}). "
        f"Give that much, a smaller batch, or smaller `blocks`.{inverting}",
        least,
    )


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
