"""`recoup.plan`: a plan that fits the training step of a model into bytes, and `recoup.largest`.

The blocks are found, measured and priced, which gives a frontier of plans. For a budget, its points
are rehearsed, the fastest first, and each rehearsal is compared with the plain step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack, cast, overload

import torch
from torch import nn

from recoup._arguments import check_callable, check_flag, is_whole
from recoup._core.pytree import flatten
from recoup.errors import BudgetError
from recoup.planning.arguments import built_arguments, check_module, example_arguments, shapes_of
from recoup.planning.forwards import Args, Kwargs
from recoup.planning.frontier import Frontier, frontier_of
from recoup.planning.options import (
    PlanKeywords,
    PlanOptions,
    Policy,
    check_keywords,
    checked_budget,
)
from recoup.planning.plan import Plan
from recoup.planning.replanning import PlansByShape
from recoup.planning.step import Step


@overload
def plan(  # pyright: ignore[reportOverlappingOverload] - with neither, it is this one
    model: nn.Module,
    *example_args: Any,
    budget: None = ...,
    policy: None = ...,
    **options_and_example_kwargs: Any,
) -> Frontier: ...


@overload
def plan(
    model: nn.Module,
    *example_args: Any,
    budget: int | str | None = ...,
    policy: Policy | None = ...,
    loss: Callable[[Any], Any] | None = ...,
    blocks: str | Iterable[str | nn.Module] | None = ...,
    budget_of: Literal["step", "total"] = ...,
    optimizer: torch.optim.Optimizer | None = ...,
    holds_output: bool = ...,
    compile: bool | str = ...,
    exact: bool = ...,
    offload_to: str | os.PathLike[str] | None = ...,
    tiles: bool | int = ...,
    num_forwards: int = ...,
    headroom: float | None = ...,
    replan: bool = ...,
    **example_kwargs: Any,
) -> Plan: ...


def plan(
    model: nn.Module,
    *example_args: Any,
    budget: int | str | None = None,
    policy: Policy | None = None,
    loss: Callable[[Any], Any] | None = None,
    blocks: str | Iterable[str | nn.Module] | None = None,
    budget_of: Literal["step", "total"] = "step",
    optimizer: torch.optim.Optimizer | None = None,
    holds_output: bool = True,
    compile: bool | str = False,  # noqa: A002
    exact: bool = True,
    offload_to: str | os.PathLike[str] | None = None,
    tiles: bool | int = False,
    num_forwards: int = 1,
    headroom: float | None = None,
    replan: bool = False,
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
        example_args: its arguments as in training, with the largest batch that will occur. One dict
            alone has the keyword arguments, if the forward takes its entries by name.
        budget: a number of bytes, as an int or a string such as ``"2 GiB"``. Without one, the plans
            for all budgets are returned, to choose from.
        policy: in place of a budget, what people choose by hand for all blocks, whatever it takes:
            "full" (every block runs again: activation checkpointing), "every 2nd block", "save
            attention" (what its kernels return is kept, and the rest runs again) or "keep". A plan
            with the bytes of a policy as its budget is at least as fast.
        loss: a function from the output of the model to a scalar, or several. The default is the
            attribute or entry `loss` of the output, or else the sum of the output's absolute
            values. A loss that is computed outside the model takes memory too, so pass it.
        blocks: the modules that are kept or recomputed as a whole: a regular expression that
            matches (fullmatch) their names, or names or modules. By default the modules that
            repeat are found.
        budget_of: "step" bounds the memory that forward, loss and backward allocate beyond what is
            alive before them, gradients included; "total" adds parameters, buffers, gradients of
            backwards before, if there are any now, and the state of `optimizer`.
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
        exact: whether gradients must be those of the plain step, bit for bit on the same kernels.
            If not, blocks that have an `inverse` may be inverted: only their output is kept, and
            backward computes their inputs from it, which rounds. A `DriftGuard` compares what
            inverses return with what forward was given, and gradients of the rehearsal may differ
            from those of the plain step by its tolerance, a thousandth of their norm. A plan
            inverts blocks only where that is faster within the budget.
        offload_to: where the inputs of blocks may wait for backward: "host", or a folder on a disk,
            whose speed is measured. None for host memory on an accelerator, and for no place on
            the CPU.
        tiles: whether the output layer may run in tiles with its loss, a cross entropy, so that the
            logits are never there as a whole (an int says in how many). The loss and the gradients
            are then those of the model to rounding, not to the bit; they cannot be differentiated
            again, and logits that the model returns are computed when they are read.
        num_forwards: how many times a step calls the model before one backward (2 for SimCSE and
            R-Drop). Each call is planned with the example arguments, and `loss` is given all
            outputs: ``lambda a, b: ...``. A step that calls the model more often raises a
            BudgetError before a call that may exceed the budget.
        headroom: the part of the budget that is left for fragmentation: the peak of allocated bytes
            is at most ``budget * (1 - headroom)``, so that what the allocator reserves can keep to
            the budget. None for 0.05 on an accelerator whose segments can grow, 0.25 on another,
            and nothing on the CPU.
        replan: whether a training step with other shapes of arguments follows a plan that was made
            for others, if one keeps it within the budget and none of its own could be more than 4 %
            faster, or else makes one when it is called. A plan that was not made for larger shapes
            is tried first, in one step. So larger batches keep to the budget, too, or raise a
            BudgetError before anything has run. More forwards before one backward than
            `num_forwards` get a plan, too. `loss` must then serve other shapes. Logger
            ``recoup.planning.replanning`` tells which shapes are planned.
        example_kwargs: keyword arguments of the model.

    Returns:
        The plan, printable. Without a budget, a `Frontier`, which prints as the peaks and times
        that plans are predicted to have; its method `plan` makes one for a budget.

    Raises:
        BudgetError: no plan keeps to the budget; the message and `least_bytes` give the smallest
            budget that suffices, and `frontier` has the plans that are possible.
        ValueError: an argument is invalid.
        ReplayError: a block cannot be recomputed, a forward changes a parameter past operators of
            torch, or the results of a planned step differ from those of the plain step.

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
    options = PlanOptions(
        loss, blocks, budget_of, optimizer, holds_output, compile, exact, offload_to, tiles,
        num_forwards, headroom,
    )  # fmt: skip
    if policy is not None:
        options.check_policy(policy, budget)
    example_args, example_kwargs = example_arguments(model, example_args, example_kwargs)
    check_flag(replan=replan)
    step = options.step(model, model, example_args, example_kwargs)
    if budget is not None:
        return plan_of(step, budget, options, replan=replan)
    if replan:
        raise ValueError("`replan` is True without a `budget`. Give the bytes that plans keep to.")
    found = frontier_of(step, options)
    return found if policy is None else found.plan_under(policy)


def plan_of(step: Step, budget: int | str, options: PlanOptions, *, replan: bool = False) -> Plan:
    """Return the plan for a step that was made with the options; it raises what `plan` does."""
    budget_bytes = checked_budget(budget)
    if replan:
        options.check_replan(step.root)
    made = frontier_of(step, options).plan_now(budget_bytes)
    if replan:
        made.replanner = PlansByShape(made, step, budget_bytes, options)
    return made


_NEAR = 0.01  # of the size: the search ends where so little more is left to try
_MOST_GROWTH = 8  # from one size to the next larger one
_MARGIN = 0.98  # of the bytes that are left, since bytes may grow faster than a line


class Largest(NamedTuple):
    """The largest size that fits in a budget.

    Args:
        size: the size.
        plan: the plan for it, whose steps have been run; not applied yet.
        args: the arguments of that size.
        kwargs: the keyword arguments of that size.
    """

    size: int
    plan: Plan
    args: Args
    kwargs: Kwargs


class _Probe(NamedTuple):
    size: int
    argument_bytes: int
    least_bytes: int
    plan: Plan | None


def largest(
    build_batch: Callable[[int], Any],
    model: nn.Module,
    *,
    budget: int | str,
    least: int = 1,
    most: int | None = None,
    **options: Unpack[PlanKeywords],
) -> Largest:
    """Return the largest batch, or the longest sequence, that a plan can train in a budget.

    The sizes that are tried grow from `least` as far as the bytes of the last two predict that they
    fit; what is then between the largest that fits and the smallest that does not is halved. For
    each size the steps of `recoup.plan` are run, which leave no trace. It is assumed that a larger
    size takes more bytes.

    Args:
        build_batch: a function from a size, a number of samples or tokens, to the arguments of the
            model: a tensor, a tuple of arguments, or a dict of keyword arguments. A dict that ends
            a tuple has keyword arguments, too.
        model: any module, as for `recoup.plan`.
        budget: a number of bytes, as an int or a string such as ``"2 GiB"``.
        least: the smallest size to try.
        most: the largest size to try; None for no bound.
        options: those of `recoup.plan`: `loss`, `blocks`, `budget_of`, `optimizer`, `holds_output`,
            `compile`, `exact`, `offload_to`, `tiles`, `num_forwards` and `headroom`. A loss that
            needs targets of the size reads its size from what the model returns.

    Returns:
        The size, the plan for it, and the arguments. Up to a hundredth more may fit.

    Raises:
        BudgetError: not even the smallest size fits.
        ValueError: an argument is invalid, or `build_batch` returns no more bytes for a larger
            size.

    Example:
        >>> import recoup, torch
        >>> model = torch.nn.Sequential(
        ...     *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "abcd")
        ... )
        >>> found = recoup.largest(lambda size: torch.ones(size, 64), model, budget="1 MiB")
        >>> found.plan.rehearsed_peak_bytes <= 2**20
        True
        >>> found.plan.apply().is_applied
        True
    """
    check_keywords("largest", options, PlanKeywords.__optional_keys__)
    budget_bytes, chosen = checked_budget(budget), PlanOptions(**options)
    check_callable(build_batch=build_batch)
    check_module(model)
    if not is_whole(least) or (most is not None and not is_whole(most, least)):
        raise ValueError(
            f"`least` is {least!r} and `most` is {most!r}, but sizes are whole numbers from 1, and "
            "`most` is at least `least`, or None."
        )

    def probe(size: int, smaller: _Probe | None = None) -> _Probe:
        args, kwargs = built_arguments(model, _parts(build_batch, size))
        num_bytes = sum(tensor.nbytes for tensor in flatten((args, kwargs))[0])
        if smaller is not None and num_bytes <= smaller.argument_bytes:
            raise ValueError(
                f"`build_batch` returns {smaller.argument_bytes} bytes of tensors for size "
                f"{smaller.size} and {num_bytes} for size {size}. It must return larger arguments "
                "for a larger size; give `most` if there are no more."
            )
        try:
            plan = plan_of(chosen.step(model, model, args, kwargs), budget_bytes, chosen)
        except BudgetError as error:
            return _Probe(size, num_bytes, error.least_bytes, None)
        except Exception as error:
            shapes = shapes_of(model, args, kwargs)
            error.add_note(
                f"`build_batch` returned these arguments for size {size}: {shapes}. If a "
                f"{type(model).__name__} needs more (as a batch norm does), give `least`; if it "
                "takes no more (positions, targets), give that bound as `most`."
            )
            raise
        return _Probe(size, num_bytes, plan.least_bytes, plan)

    best = probe(least)
    if best.plan is None:
        raise BudgetError(
            f"`budget` is {budget_bytes} bytes, but a step of size {least} takes at least "
            f"{best.least_bytes}. Give that much, or a smaller `least`.",
            best.least_bytes,
        )
    before: _Probe | None = None
    too_large = most + 1 if most is not None else None
    has_failed = False
    while too_large is None or too_large - best.size > max(1, _NEAR * best.size):
        size = _next(before, best, budget_bytes)
        if too_large is not None and size >= too_large:
            # If the line was right, little is left; else the rest is halved.
            size = (best.size + too_large) // 2 if has_failed else too_large - 1
        found = probe(size, best)
        if found.plan is None:
            too_large, has_failed = size, True
        else:
            before, best = best, found
    args, kwargs = built_arguments(model, _parts(build_batch, best.size))
    return Largest(best.size, cast("Plan", best.plan), args, kwargs)


def _next(before: _Probe | None, best: _Probe, budget_bytes: int) -> int:
    """Return the size to try next, by a line through the bytes of the last two that fit."""
    if before is None or best.least_bytes <= before.least_bytes:
        return 2 * best.size
    slope = (best.least_bytes - before.least_bytes) / (best.size - before.size)
    more = int(_MARGIN * (budget_bytes - best.least_bytes) / slope)
    step = max(1, int(_NEAR * best.size))
    return min(best.size + max(more, step), _MOST_GROWTH * best.size)


def _parts(build_batch: Callable[[int], Any], size: int) -> Sequence[Any]:
    made = build_batch(size)
    if made is None:
        raise ValueError(
            f"`build_batch` returned None for size {size}, but must return the arguments of the "
            "model: a tensor, a tuple, or a dict."
        )
    if isinstance(made, Mapping):
        return [dict(cast("Mapping[str, Any]", made))]
    is_several = isinstance(made, Sequence) and not isinstance(made, str)
    return cast("Sequence[Any]", made) if is_several else [made]
