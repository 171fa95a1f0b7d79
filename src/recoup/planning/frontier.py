"""The frontier of a model: the plans that are best for some budget, to choose from.

NOTE [ Kinds of blocks in a frontier ]

Rule 1. The kind of blocks that is predicted to be faster for a budget is planned first. If no plan
        of it keeps to the budget, the next kind is.
Rule 2. Times of compiled and of uncompiled blocks are measured block by block, in steps that take
        few bytes. They leave out what it costs to allocate many (memory that is new to the process
        takes a quarter of a second a GiB on a CPU), so the prediction favours kinds that keep more.
        Where times are close, both kinds are planned, and whole steps are timed in turn.

NOTE [ What cannot be planned ]

Rule 3. If nothing repeats in a model, the outermost modules that its forward calls are its blocks.
        If there are none, the model keeps everything.
Rule 4. If the measured step fails, since a block does something else when it runs again or torch
        has no way to run it so, and the plain step does not fail, the model keeps everything. So
        does one whose forward writes to parameters of every block, which it may do once a step;
        blocks that have such keep their residuals. One warning says why everything is kept if that
        fits the budget, and the error says it if not.
Rule 5. There is nothing to compare the plain step with: its results are right by definition.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from recoup._core.drift_guard import DriftGuard
from recoup._core.saved_tensors import check_hooks_work
from recoup._core.settings import settings_now
from recoup.errors import BudgetError
from recoup.memory import format_bytes
from recoup.memory.figures import path_of
from recoup.memory.size import aligned
from recoup.planning.arguments import check_plannable
from recoup.planning.blocks import Block, name_blocks, with_links
from recoup.planning.called_blocks import (
    blocks_that_are_called,
    kinds_of_blocks,
    with_called_parts,
    with_modules_between,
)
from recoup.planning.compiling import backend_of
from recoup.planning.forwards import suspended
from recoup.planning.options import PlanOptions, Policy, Room, checked_budget, place_of
from recoup.planning.plan import Plan, faster_of, own_forwards, verified
from recoup.planning.priced_blocks import PricedBlocks, price_blocks, price_whole
from recoup.planning.priced_ways import price_codes, with_inverses, with_tiles
from recoup.planning.rehearsal import ChangedParameterError, uncollected
from recoup.planning.report import draw_frontier
from recoup.planning.step import Step, is_sharded, largest_among_ranks
from recoup.planning.verification import DifferentStepError

_NUM_ROWS = 12  # that are printed
_SHARE_BETWEEN = 1 / 16  # of the peak that what runs between blocks must hold
_CLOSE = 1.5  # kinds are timed whose predicted costs differ by less


class FrontierPoint(NamedTuple):
    """A plan that is predicted to be the fastest of those that take no more bytes.

    Args:
        peak_bytes: the predicted peak of a step, with the headroom of a budget for it.
        relative_time: the predicted time, where 1 is a step that keeps every residual and compiles
            no block.
        num_forwards: the runs of blocks in a step, inverses included.
        is_compiled: whether blocks are compiled.
        is_tiled: whether the output layer runs in tiles with its loss.
    """

    peak_bytes: int
    relative_time: float
    num_forwards: int
    is_compiled: bool
    is_tiled: bool = False


class Frontier:
    """The plans of a model that are best for some budget; made by `recoup.plan` without a budget.

    The steps that measure the blocks have been run, so that a plan for one more budget takes a few
    steps only. The peaks of the frontier are predicted. The plan for a budget is rehearsed: if the
    rehearsal takes more bytes, a slower plan is returned, or, below the least, a `BudgetError` is
    raised. The frontier holds the model and the example arguments, and counts what was alive beside
    a step when the blocks were measured.

    Args:
        kinds: the blocks with their costs, of each kind that was measured.
        room: the room that a budget leaves for a step.
        remedy: what a `BudgetError` says in addition, where little can be saved.
        reason: why everything is kept, for a warning with a plan; None for no warning.

    Example:
        >>> import recoup, torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "abcd"]
        >>> frontier = recoup.plan(torch.nn.Sequential(*blocks), torch.ones(256, 64))
        >>> print(frontier)  # doctest: +ELLIPSIS
        Plans for Sequential: 4 blocks, from 352.5 KiB to 640 KiB (step), as predicted
        <BLANKLINE>
             peak  time  forwards  blocks
          640 KiB  1.00         4  as they are
        ...
        >>> plan = frontier.plan("600 KiB")
        >>> plan.rehearsed_peak_bytes <= 600 * 2**10
        True
    """

    def __init__(
        self, kinds: Sequence[PricedBlocks], room: Room, remedy: str = "", reason: str | None = None
    ) -> None:
        self.model = kinds[0].step.model
        self.baseline_bytes, self._room = room.baseline_bytes, room
        self._kinds = list(kinds)
        self._remedy, self._reason = remedy, reason
        self._is_compiling = any(kind.is_compiled for kind in kinds)
        self._state = _state_of(self.model)

    @property
    def points(self) -> tuple[FrontierPoint, ...]:
        """The plans, from the least bytes to the most; those that are slower are left out."""
        found = [point for kind in self._kinds for point in self._points_of(kind)]
        best: list[FrontierPoint] = []
        for point in sorted(found, key=itemgetter(0, 1)):
            if not best or point.relative_time < best[-1].relative_time:
                best.append(point)
        return tuple(best)

    def _points_of(self, kind: PricedBlocks) -> list[FrontierPoint]:
        """Return the plans for a kind of blocks."""
        whole = kind.plain_seconds
        return [
            FrontierPoint(
                self._room.budget_for(point.peak_bytes),
                kind.seconds_of(point) / whole if whole else 1.0,
                kind.num_forwards(point),
                kind.is_compiled,
                kind.step.tiled is not None,
            )
            for point in kind.points
        ]

    @functools.cached_property
    def least_bytes(self) -> int:
        """The smallest budget that is known to suffice; asking for it first runs a few steps."""
        try:
            return self.plan(self.points[0].peak_bytes).least_bytes
        except BudgetError as error:
            return error.least_bytes

    def plan(self, budget: int | str, *, pending: int | None = None) -> Plan:
        """Return the plan for a budget, rehearsed and compared as by `recoup.plan`.

        Args:
            budget: a number of bytes, as an int or a string such as ``"2 GiB"``.
            pending: in a stage of a pipeline, how many other forwards wait for their backward: what
                they hold, and the gradients of those before, are then part of the budget.

        Raises:
            BudgetError: no plan keeps to the budget.
            ValueError: an argument is invalid, or the model is another than was measured.
            ReplayError: the results of a planned step differ from those of the plain step.
        """
        budget_bytes = checked_budget(budget)
        if _state_of(self.model) != self._state:
            raise ValueError(
                f"The frontier was measured for another state of the {type(self.model).__name__}: "
                "its modules, their training modes, the shapes, types or devices of its "
                "parameters, or autocast have changed. Call recoup.plan again, or this within the "
                "autocast that it was called in."
            )
        # The parameters may have changed, and with them the gradients; or the random streams.
        self._kinds = [kind.with_new_step() for kind in self._kinds]
        if pending is None:
            return self.plan_now(budget_bytes)
        kinds = [kind.beside(pending) for kind in self._kinds]
        return Frontier(kinds, self._room, self._remedy, self._reason).plan_now(budget_bytes)

    def plan_now(self, budget_bytes: int) -> Plan:
        """Return the plan for a budget; nothing has changed since the blocks were measured."""
        (least,) = largest_among_ranks(self.model, [-budget_bytes])
        own = own_forwards(self.model)
        try:
            with suspended(own), uncollected():
                plan = self._fastest(-int(least))
        except BudgetError as error:
            error.args = (f"{error} {self._remedy}".rstrip(),)
            raise
        if self._reason is not None:
            warnings.warn(self._reason, stacklevel=4)
        return plan

    def plan_under(self, policy: Policy) -> Plan:
        """Return the plan that follows a policy, whatever it takes; likewise."""
        self._kinds = [self._kinds[0].under_policy(policy)]
        return self.plan_now(sys.maxsize)

    def plan_with_room(self, budget_bytes: int, more: float) -> Plan:
        """Return a plan that leaves bytes of the budget free, for steps that take more.

        It may take `more` of the time of the fastest plan longer.
        """
        fitting = [point for point in self.points if point.peak_bytes <= budget_bytes]
        most = (1 + more) * min((point.relative_time for point in fitting), default=0.0)
        quick = [point for point in fitting if point.relative_time <= most]
        if len(quick) > 1:
            with suppress(BudgetError):
                plan = self.plan(quick[1].peak_bytes - 1)
                plan.budget_bytes = budget_bytes
                return plan
        return self.plan(budget_bytes)

    def _fastest(self, budget_bytes: int) -> Plan:
        """Return the plan for the kind of blocks whose step is fastest (See Rules 1 and 2)."""
        room, usable_bytes = self._room, self._room.of(budget_bytes)
        kinds = [(k.seconds_within(usable_bytes), k.points[0].peak_bytes, k) for k in self._kinds]
        errors: list[BudgetError] = []
        differences: list[DifferentStepError] = []
        found: list[tuple[Plan, PricedBlocks]] = []
        most = math.inf  # seconds of kinds that are planned, too, once there is a plan
        for seconds, _, kind in sorted(kinds, key=itemgetter(0, 1)):
            if found and (not self._is_compiling or seconds > most):
                break
            try:
                found.append((verified(kind, budget_bytes, room), kind))
                most = min(most, _CLOSE * seconds)
            except BudgetError as error:
                errors.append(error)
            except DifferentStepError as error:
                differences.append(error)  # other blocks, or no tiles, may make none
        if found:
            return faster_of(found)
        if not errors:
            raise differences[0]
        error = min(errors, key=lambda error: error.least_bytes)
        for difference in differences[:1]:
            error.add_note(f"Other blocks, or parts in tiles, were left alone. {difference}")
        error.frontier = self
        raise error

    def figure(self, path: str | Path) -> Path:
        """Draw the time of a step against its bytes, with compiled blocks and without.

        Args:
            path: the path of the picture, ending in .png, .svg or .pdf.

        Returns:
            The path.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: `path` is none, or has another ending.
        """
        lines = [
            (_code(points[0].is_compiled, points[0].is_tiled), [each[:2] for each in points])
            for points in map(self._points_of, self._kinds)
        ]
        return draw_frontier(lines, path_of(path))

    def __str__(self) -> str:
        points = self.points
        kind = "total" if self.baseline_bytes else "step"
        sizes = [format_bytes(points[place].peak_bytes) for place in (0, -1)]
        title = (
            f"Plans for {type(self.model).__name__}: {len(self._kinds[0].calls)} blocks, from "
            f"{sizes[0]} to {sizes[1]} ({kind}), as predicted"
        )
        if self._room.headroom:
            title += f"; {self._room.headroom:.3g} of a budget is left for fragmentation"
        rows = [("peak", "time", "forwards", "blocks")]
        for point in reversed(_spread(points, _NUM_ROWS)):
            time, code = f"{point.relative_time:.2f}", _code(point.is_compiled, point.is_tiled)
            rows.append((format_bytes(point.peak_bytes), time, str(point.num_forwards), code))
        return "\n".join([title, "", *aligned(rows, left=[3])])


def frontier_of(step: Step, options: PlanOptions, guard: DriftGuard | None = None) -> Frontier:
    """Return the plans for a step; without a guard, those that invert have one of their own."""
    model = step.model
    check_plannable(model)
    check_hooks_work()
    if guard is None and not options.exact:
        guard = DriftGuard()
    backend, blocks = backend_of(options.compile), options.blocks
    room = options.room(step)
    place = place_of(options.offload_to, step.device)
    named = name_blocks(model, blocks)
    with suspended(own_forwards(model)), uncollected():  # measure the model without a plan
        step = step.knowing_writes()
        others: list[Block] = []
        if not named:
            named, others = blocks_that_are_called(step)
        if blocks is None:
            named = with_called_parts(step, named)
        is_told, kinds = blocks is not None or not named, [named or others]
        try:
            if not is_told:
                kinds = kinds_of_blocks(step, named)
            kinds = [each for kind in kinds if (each := step.unwritten(kind))]
            priced = [price_blocks(step, kind, place) for kind in kinds[:1]]
            priced += [price_blocks(step, kind, place, priced[0]) for kind in kinds[1:]]
            if priced and not is_told:
                priced += _with_modules_between(priced[0])
        except (torch.OutOfMemoryError, ChangedParameterError):
            raise
        except RuntimeError as error:
            return _keeping_all(step, room, error)
        if not priced:
            return _keeping_all(step, room)
        if guard is not None:
            links = step.unwritten(with_links(model, named)) if blocks is None else []
            if links and all(kind.blocks != links for kind in priced):
                priced.append(price_blocks(step, links, place, priced[0]))
        if options.tiles:
            priced = [
                tiled._replace(may_tile=True)
                for kind in priced
                for tiled in with_tiles(kind, options.tiles)
            ]
        if guard is not None:
            priced = [with_inverses(kind, guard) for kind in priced]
        if backend is not None:
            priced = [code for kind in priced for code in price_codes(kind, backend)]
    return Frontier(priced, room, _remedy_for(others) if others else "")


def _with_modules_between(own: PricedBlocks) -> list[PricedBlocks]:
    """Return the blocks with what runs between them, where that holds much and can run again."""
    held_bytes = sum(cost.between_bytes for cost in own.costs[:-1])
    if held_bytes < _SHARE_BETWEEN * own.points[-1].peak_bytes or is_sharded(own.step.model):
        return []
    blocks = with_modules_between(own.step, own.blocks, own.measured.calls)
    blocks = own.step.unwritten(blocks)
    if len(blocks) <= len(own.blocks):
        return []
    try:
        found = price_blocks(own.step, blocks, own.place, own)
    except (torch.OutOfMemoryError, ChangedParameterError):
        raise
    except Exception:  # noqa: BLE001 - what the code of these modules raises when it runs again
        return []
    # All blocks ran again in both steps.
    return [found] if found.measured.outcome.has_streams_of(own.measured.outcome) else []


def _keeping_all(step: Step, room: Room, error: RuntimeError | None = None) -> Frontier:
    """Return the one plan of a model of which nothing can be run again, or raise what it raises."""
    try:
        whole = price_whole(step)
    except Exception:
        if error is None:
            raise
        raise error from None
    cause, why = error or step.explain_writes(), _remedy_for([])
    if cause is not None:
        why = f"Its blocks cannot be run again. {cause} To run others again, name them as `blocks`."
    reason = f"The plan for a {type(step.model).__name__} keeps everything. {why}"
    return Frontier([whole], room, why, reason)


def _remedy_for(blocks: Sequence[Block]) -> str:
    """Return what to do if plans for blocks of which none repeats take too many bytes."""
    names = ", ".join(f"`{name}`" for name, _ in blocks[:4]) or "none"
    return (
        f"No modules repeat, so its blocks are what its forward calls ({names}). Write its layers "
        "as modules in an nn.Sequential, or name finer `blocks`. A recurrent layer keeps what it "
        "makes in all time steps: train on segments of the sequence (recoup.segments_backward)."
    )


def _state_of(model: nn.Module) -> tuple[object, ...]:
    """Return what the costs of a model depend on, apart from its arguments."""
    parameters = (
        (name, p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()
    )
    modules = ((id(each), each.training) for each in model.modules())
    return (*parameters, *modules, *settings_now()[:2])


def _code(is_compiled: bool, is_tiled: bool) -> str:
    return ("compiled" if is_compiled else "as they are") + (", in tiles" if is_tiled else "")


def _spread(points: Sequence[FrontierPoint], num: int) -> list[FrontierPoint]:
    """Return at most `num` points at even steps, the first and the last among them."""
    most = len(points) - 1
    places = {round(most * place / (num - 1)) for place in range(num)}
    return [points[place] for place in sorted(places)]
