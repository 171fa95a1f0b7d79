"""`recoup.largest`: the largest batch, or longest sequence, that a plan can train in a budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from recoup._arguments import is_whole
from recoup._core.pytree import flatten
from recoup.errors import BudgetError
from recoup.planning.arguments import built_arguments, shapes_of
from recoup.planning.forwards import Args, Kwargs
from recoup.planning.frontier import frontier_of
from recoup.planning.options import PlanOptions, checked_budget
from recoup.planning.plan import Plan

__all__ = ["Largest", "largest", "largest_of"]

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
        loss: as for `recoup.plan`, as are the arguments that follow. A loss that needs targets of
            the size reads its size from what the model returns.
        blocks: the modules that are kept or recomputed as a whole.
        budget_of: "step", or "total" to count what is alive before a step.
        optimizer: the optimizer, for "total".
        holds_output: whether the training loop holds the output of the model while backward runs.
        compile: whether blocks may run compiled.
        exact: whether no block may be inverted.
        offload_to: where the inputs of blocks may wait for backward.
        tiles: whether the output layer and MLPs may run in tiles.
        num_forwards: how many times a step calls the model before one backward.
        headroom: the part of the budget that is left for fragmentation.

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
    budget_bytes = checked_budget(budget)
    options = PlanOptions(
        loss, blocks, budget_of, optimizer, holds_output, compile, exact, offload_to, tiles,
        num_forwards, headroom,
    )  # fmt: skip
    return largest_of(build_batch, model, budget_bytes, options, least, most)


def largest_of(
    build_batch: Callable[[int], Any],
    model: nn.Module,
    budget_bytes: int,
    options: PlanOptions,
    least: int = 1,
    most: int | None = None,
) -> Largest:
    """Return the largest size, as `largest` does, for a model with options."""
    if not callable(build_batch):
        raise ValueError(
            f"`build_batch` is {build_batch!r}, but must be a function from a size to the "
            "arguments of the model."
        )
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
            frontier = frontier_of(options.step(model, model, args, kwargs), options)
        except Exception as error:
            if smaller is not None:
                error.add_note(
                    f"Size {smaller.size} ran, and size {size} did not: if {type(model).__name__} "
                    "takes no more (positions, targets), give that bound as `most`."
                )
            shapes = shapes_of(model, args, kwargs)
            error.add_note(f"`build_batch` returned these arguments for size {size}: {shapes}.")
            raise
        try:
            plan = frontier.plan(budget_bytes)
        except BudgetError as error:
            return _Probe(size, num_bytes, error.least_bytes, None)
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
