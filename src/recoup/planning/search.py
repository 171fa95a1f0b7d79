"""The search for a plan that fits the training step of a model into a byte budget.

The blocks are found, measured and priced, which gives a frontier of plans. For a budget, its points
are rehearsed, the fastest first, and each rehearsal is compared with the plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Literal, overload

import torch
from torch import nn

from recoup._core.saved_tensors import check_hooks_work
from recoup.planning.blocks import name_blocks
from recoup.planning.compiled_costs import price_codes
from recoup.planning.compiling import backend_of, recompiling
from recoup.planning.forwards import suspended
from recoup.planning.frontier import Frontier
from recoup.planning.losses import losses_from
from recoup.planning.plan import Plan, own_forwards
from recoup.planning.ranks import largest_among_ranks
from recoup.planning.rehearsal import uncollected
from recoup.planning.sizes import check_budget_of, checked_budget, standing_bytes
from recoup.planning.skipped_blocks import blocks_that_are_called
from recoup.planning.stages import kinds_of_blocks, price_blocks
from recoup.planning.step import Step

__all__ = ["frontier_of_call", "plan"]


@overload
def plan(
    model: nn.Module,
    *example_args: Any,
    budget: int | str,
    loss: Callable[[Any], Any] | None = ...,
    blocks: str | Iterable[str | nn.Module] | None = ...,
    budget_of: Literal["step", "total"] = ...,
    optimizer: torch.optim.Optimizer | None = ...,
    holds_output: bool = ...,
    compile: bool | str = ...,
    **example_kwargs: Any,
) -> Plan: ...


@overload
def plan(
    model: nn.Module,
    *example_args: Any,
    budget: None = ...,
    loss: Callable[[Any], Any] | None = ...,
    blocks: str | Iterable[str | nn.Module] | None = ...,
    budget_of: Literal["step", "total"] = ...,
    optimizer: torch.optim.Optimizer | None = ...,
    holds_output: bool = ...,
    compile: bool | str = ...,
    **example_kwargs: Any,
) -> Frontier: ...


def plan(
    model: nn.Module,
    *example_args: Any,
    budget: int | str | None = None,
    loss: Callable[[Any], Any] | None = None,
    blocks: str | Iterable[str | nn.Module] | None = None,
    budget_of: Literal["step", "total"] = "step",
    optimizer: torch.optim.Optimizer | None = None,
    holds_output: bool = True,
    compile: bool | str = False,  # noqa: A002
    **example_kwargs: Any,
) -> Plan | Frontier:
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
        budget: a number of bytes, as an int or a string such as ``"2 GiB"``. Without one, the plans
            for all budgets are returned, to choose from.
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
        The plan, printable. Without a budget, a `Frontier`, which prints as the peaks and times
        that plans are predicted to have; its method `plan` makes one for a budget.

    Raises:
        BudgetError: no plan keeps to the budget; the message and `least_bytes` give the smallest
            budget that suffices, and `frontier` has the plans that are possible.
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
    budget_bytes = None if budget is None else checked_budget(budget)
    found = frontier_of_call(
        model, model, example_args, example_kwargs, loss=loss, blocks=blocks,
        budget_of=budget_of, optimizer=optimizer, holds_output=holds_output, compile=compile,
    )  # fmt: skip
    return found if budget_bytes is None else found.plan(budget_bytes)


def frontier_of_call(
    model: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[[Any], Any] | None = None,
    blocks: str | Iterable[str | nn.Module] | None = None,
    budget_of: Literal["step", "total"] = "step",
    optimizer: torch.optim.Optimizer | None = None,
    holds_output: bool = True,
    compile: bool | str = False,  # noqa: A002
) -> Frontier:
    """Return the plans for steps that call the model, or a function around it, as `plan` does."""
    check_budget_of(budget_of)
    _check_arguments(model, loss, budget_of, optimizer)
    backend = backend_of(compile)
    check_hooks_work()
    standing = standing_bytes(model, optimizer) if budget_of == "total" else 0
    (standing,) = map(int, largest_among_ranks(model, [standing]))
    device = _device_of(model)
    step = Step(model, call, args, kwargs, losses_from(loss), holds_output)
    named = name_blocks(model, blocks)
    with suspended(own_forwards(model)), uncollected():  # measure the model without a plan
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
    return Frontier(priced, device, standing)


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
