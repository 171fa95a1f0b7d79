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
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

from recoup._core.compile import is_compiled
from recoup._core.drift_guard import DriftGuard
from recoup.errors import ChangedError, ReplayError
from recoup.memory.timeline import Span, timeline
from recoup.planning.following import PlannedModel
from recoup.planning.forwards import followed
from recoup.planning.operators import WorkCounter
from recoup.planning.planned_stages import chains_of
from recoup.planning.priced_blocks import PricedBlocks, points_of
from recoup.planning.pricing import MeasuredCall
from recoup.planning.ranks import is_sharded
from recoup.schedules import Cost, Way, constant

__all__ = ["with_inverses"]


def with_inverses(kind: PricedBlocks, guard: DriftGuard) -> PricedBlocks:
    """Return the same blocks with the costs of their inverses (See Rule 2).

    Args:
        kind: the blocks, with the costs of keeping and recomputing.
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
        measured = _measured_inverses(kind, guard, inverted)
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
        point for point in points_of(costs, kind.place) if point.peak_bytes < whole.peak_bytes
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


def _measured_inverses(
    kind: PricedBlocks, guard: DriftGuard, inverted: set[int]
) -> dict[int, tuple[float, int]]:
    """Return the work of each inverse, and its most bytes beyond the output of its call (Rule 2).

    Args:
        kind: the blocks.
        guard: a guard with the settings of that of the step.
        inverted: the calls that are inverted; all others are recomputed.
    """
    step, works = kind.step, dict.fromkeys(inverted, 0.0)
    marks: list[tuple[int, Span]] = []  # the calls that backward came to
    ways: list[Way] = ["invert" if i in inverted else "recompute" for i in range(len(kind.calls))]
    planned = PlannedModel.of(step, kind.blocks, kind.calls, guard)
    line = timeline(step.device)

    @contextmanager
    def measured(index: int, run: str) -> Generator[None]:
        if run == "inverse" or (run == "again" and index not in inverted):
            marks.append((index, line.mark()))
        if run == "call":
            yield
            return
        counter = WorkCounter()  # also in the first run, since modes change what operators do
        with counter.counting():
            yield
        if marks and marks[-1][0] == index and index in inverted:
            works[index] += counter.work  # the second run makes the rest of its tape

    follower = planned.rehearsing(constant([*ways, "keep"]), measured)
    with step.rehearsed(), line:
        with followed(planned.whole_modules, follower):
            gradients = step.run()
        marks.append((-1, line.mark()))
        del gradients
        step.forget()
    refused = {
        start + place
        for (start, _), own in zip(chains_of(kind.calls), follower.guards, strict=True)
        for place in (() if own is None else own.kept)
    }
    return {
        index: (works[index], max(span.peak_bytes - before.end_bytes, 0))
        for (index, before), (_, span) in pairwise(marks)
        if index in inverted and index not in refused
    }
