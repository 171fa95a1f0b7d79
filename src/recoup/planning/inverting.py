"""Blocks that a plan may invert: which they are, and what their inverses cost.

NOTE [ Inverted blocks ]

Rule 1. A block is inverted if the caller allows rounding, and if its call can be (See Rule 4 of
        NOTE [ The inputs and outputs of a call ]). The first block of a chain is not: its input is
        kept, so that what an inverse gets wrong can be computed again.
Rule 2. One more step is run, in which every such block is inverted, by the executor that plans
        run by. What an inverse and the backward after it have alive is read where the next block
        begins.
Rule 3. A block whose inverse the drift guard refuses in that step, or has refused before, is not
        inverted. If that step fails (an inverse has another shape, a block counts in a buffer), no
        block is inverted, and the caller gets a warning.
Rule 4. Plans that invert are compared with the plain step to the tolerance of the guard. If they
        differ by more, a plan that inverts nothing is made instead, with a warning.
Rule 5. Blocks of sharded models are not inverted: ranks could see different drift. Compiled blocks
        are not, either: their networks cannot share an evaluation with an inverse.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from recoup._core.call import Call
from recoup._core.compile import is_compiled
from recoup._core.drift_guard import DriftGuard
from recoup._core.slots import State
from recoup.errors import ChangedError, ReplayError
from recoup.memory.timeline import Span, timeline
from recoup.planning.following import PlanFollower, PlannedModel
from recoup.planning.forwards import followed
from recoup.planning.planned_stages import chains_of, planned_stages
from recoup.planning.priced_blocks import PricedBlocks, points_of
from recoup.planning.pricing import MeasuredCall
from recoup.planning.ranks import is_sharded
from recoup.planning.work import WorkCounter
from recoup.schedules import Cost, Way, constant

__all__ = ["with_inverses"]


def with_inverses(kind: PricedBlocks, device: torch.device, guard: DriftGuard) -> PricedBlocks:
    """Return the same blocks with the costs of their inverses (See Rule 2).

    Args:
        kind: the blocks, with the costs of keeping and recomputing.
        device: the device whose bytes are counted.
        guard: the drift guard of the plans.

    Returns:
        The blocks with the costs of inverses, or `kind` itself if no block can be inverted.
    """
    chains = list(chains_of(kind.calls))
    refused = {chains[0][0] + place for place in guard.kept} if len(chains) == 1 else set[int]()
    inverted = _invertible(kind, chains) - refused
    if not inverted or is_sharded(kind.step.model):
        return kind
    costs = [*map(_with_state, kind.calls, kind.costs), kind.costs[-1]]
    try:
        measured = _MeasuredInverses(kind, device, guard, inverted).costs()
    except (ChangedError, ReplayError) as error:
        warnings.warn(f"No block is inverted. {error}", stacklevel=5)
        return kind
    for index, (work, num_bytes) in measured.items():
        costs[index] = replace(
            costs[index],
            is_invertible=True,
            invert_seconds=kind.measured.seconds_per_work * work,
            invert_bytes=num_bytes,
        )
    whole = kind.points[-1]  # which keeps no input of calls without residuals
    points = [
        point for point in points_of(costs, kind.step.place) if point.peak_bytes < whole.peak_bytes
    ]
    return kind._replace(costs=costs, points=[*points, whole], guard=guard)


def _with_state(call: MeasuredCall, cost: Cost) -> Cost:
    """Return a cost with the bytes of the input, also of a call without residuals (a squeeze).

    No plan that only recomputes keeps that input, but the block before may be inverted from it.
    """
    if call.until_again is not None or not call.is_linked:
        return cost
    return replace(cost, state_bytes=call.state_bytes, tape_bytes=call.state_bytes)


def _invertible(kind: PricedBlocks, chains: Sequence[tuple[int, int]]) -> set[int]:
    """Return the calls that can be inverted from what the next call is given (See Rule 1)."""
    return {
        index
        for start, stop in chains
        for index in range(start + 1, stop)
        if kind.calls[index].is_invertible
        and (index + 1 < stop or stop == len(kind.calls))
        and not any(map(is_compiled, kind.calls[index].module.modules()))
        and not any(call.is_estimated for call in kind.calls[start:stop])
    }


class _MeasuredInverses:
    """A step in which blocks are inverted, and what that took.

    Args:
        kind: the blocks.
        device: the device whose bytes are counted.
        guard: a guard with the settings of that of the step.
        inverted: the calls that are inverted; all others are recomputed.
    """

    def __init__(
        self, kind: PricedBlocks, device: torch.device, guard: DriftGuard, inverted: set[int]
    ) -> None:
        self._inverted = inverted
        self._marks: list[tuple[int, Span]] = []  # the calls that backward came to
        self._works = dict.fromkeys(inverted, 0.0)
        ways: list[Way] = ["recompute"] * len(kind.calls)
        for index in inverted:
            ways[index] = "invert"
        stages = planned_stages(constant([*ways, "keep"]), kind.calls, guard.anew())
        step = kind.step
        planned = PlannedModel.of(step, kind.blocks, kind.calls)
        new_call = partial(_MeasuredCall, self)
        follower = PlanFollower(
            step.root, stages, kind.blocks, num_forwards=step.num_forwards, new_call=new_call
        )
        with step.rehearsed(), timeline(device) as line:
            self._line = line
            with followed(planned.whole_modules, follower):
                gradients = step.run()
            self._marks.append((-1, line.mark()))
            del gradients
            step.forget()
        self.refused: set[int] = set()
        for start, _ in chains_of(kind.calls):
            executor = stages[start].chain.executor
            if executor is not None and executor.guard is not None:
                self.refused |= {start + place for place in executor.guard.kept}

    def costs(self) -> dict[int, tuple[float, int]]:
        """Return the work of each inverse, and its most bytes beyond the output of its call."""
        found: dict[int, tuple[float, int]] = {}
        for (index, before), (_, span) in pairwise(self._marks):
            if index in self._works and index not in self.refused:
                num_bytes = max(span.peak_bytes - before.end_bytes, 0)
                found[index] = (self._works[index], num_bytes)
        return found

    def begins(self, index: int, *, is_inverse: bool) -> None:
        """Note that backward has come to a call, by its inverse or by a second run."""
        if is_inverse or index not in self._inverted:
            self._marks.append((index, self._line.mark()))

    def ran(self, index: int, work: float) -> None:
        """Add the work of an inverse, or of the second run that makes the rest of its tape."""
        if self._marks and self._marks[-1][0] == index and index in self._inverted:
            self._works[index] += work


class _MeasuredCall(Call):
    """A call that reports its runs in backward."""

    __slots__ = ("_index", "_measured")

    def __init__(self, measured: _MeasuredInverses, index: int, *args: Any) -> None:
        super().__init__(*args)
        self._measured = measured
        self._index = index

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        """Run the call; also the first run is counted, since modes change what operators do."""
        if self.has_run:
            self._measured.begins(self._index, is_inverse=False)
        counter = WorkCounter()
        with counter.counting():
            result = super().forward(state)
        self._measured.ran(self._index, counter.work)
        return result

    def inverse(self, state: State) -> State:
        """Invert the call."""
        self._measured.begins(self._index, is_inverse=True)
        counter = WorkCounter()
        with counter.counting():
            before = super().inverse(state)
        self._measured.ran(self._index, counter.work)
        return before
