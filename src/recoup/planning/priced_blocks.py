"""Blocks with their costs, and the plans that are best for them.

NOTE [ Kinds of blocks ]

Rule 1. If a stage is divided (NOTE [ Stages ]), smaller blocks have a smaller least budget. An
        undivided stage that keeps its products does not keep the input of each block within it, and
        is faster at some budgets. So both kinds are measured. The plan uses the kind that is
        predicted to recompute less within the budget or, if no rehearsal of it keeps to the budget,
        the other one.
Rule 2. Compiled code draws other numbers than the blocks' own, so a plan over compiled blocks is
        compared with a step in which they are compiled and keep all. Codes of one block round
        otherwise. If that shows, the distance between the plain step and one that runs all blocks
        again is allowed, as far as it can be rounding.

NOTE [ Stages of a pipeline ]

Rule 3. Each microbatch of a pipeline ("1F1B") has a backward of its own, the first one first, while
        later forwards wait for theirs. All follow one plan, so a step takes what the others hold,
        and the gradients of the backwards before it, beside its own bytes.
Rule 4. What is kept in the sweep then counts several times. So the schedules of a step alone, and
        the one that holds the least (every block runs again from its input), are counted anew.

NOTE [ Policies ]

Rule 5. A policy says what each block does, so there is nothing to search: its plan has one schedule
        of the measured blocks, is rehearsed and compared as any plan, and has no budget.
Rule 6. As by hand, the last block runs again, too, though its residuals are needed at once; and all
        calls of a block are treated alike. Blocks without a gradient keep nothing in any case.
Rule 7. To save attention is to keep products (NOTE [ Kept products ]), of which a block then has no
        others to choose from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from recoup._arguments import check_whole
from recoup._core.drift_guard import DriftGuard
from recoup.memory.meter import Span
from recoup.planning.blocks import Block
from recoup.planning.called_blocks import measure_most
from recoup.planning.compiling import CodeByModule
from recoup.planning.forwards import followed
from recoup.planning.measuring import measure_blocks, times_of
from recoup.planning.options import OffloadPlace, Policy
from recoup.planning.pricing import (
    Measured,
    MeasuredCall,
    as_in_plain_step,
    each_alone,
    price,
    selections,
)
from recoup.planning.step import (
    Rehearsed,
    Step,
    largest_among_ranks,
    largest_costs_among_ranks,
    on_any_rank,
    rehearse,
    seconds_of,
)
from recoup.planning.verification import Outcome, has_room
from recoup.planning.work import is_attention
from recoup.schedules import Cost, Point, Schedule, frontier, linear, simulate, trace

_NOISE = 1.03  # of times, which says nothing


class PricedBlocks(NamedTuple):
    """Blocks with their costs and the best plans for them.

    Args:
        step: the step, with the seed under which it was measured.
        place: where the inputs of blocks may wait.
        blocks: the names and modules of the blocks.
        measured: the measurements of the step.
        calls: the calls of blocks that were seen, in order.
        costs: the costs of these calls, and of the code after them.
        points: the plans that are best for some budget, from the least bytes to the most.
        seconds: the time of the step in which all calls that were seen keep their whole tapes.
        plain_seconds: that time without compiled blocks and tiles.
        guard: the drift guard of blocks that are inverted; None if none may be.
        plain_bytes: the peak of the step that keeps everything, if it was run.
        may_tile: whether parts were allowed to run in tiles, so that errors do not advise it.
        policy: the policy that the first of the plans follows, which is taken; None to choose.
        pending: how many other forwards of a pipeline wait for their backward; None in a step that
            has one backward (See Rule 3).
    """

    step: Step
    place: OffloadPlace
    blocks: list[Block]
    measured: Measured
    calls: list[MeasuredCall]
    costs: list[Cost]
    points: list[Point]
    seconds: float = 0.0
    plain_seconds: float = 0.0
    guard: DriftGuard | None = None
    plain_bytes: int | None = None
    may_tile: bool = False
    policy: str | None = None
    pending: int | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether some of the blocks are compiled."""
        return any(call.codes for call in self.calls)

    def seconds_of(self, point: Point) -> float:
        """Return the time of a step of the blocks that follows a plan."""
        return self.seconds + point.seconds - self.points[-1].seconds

    def seconds_within(self, budget_bytes: int) -> float:
        """Return the time of the fastest plan that is predicted to fit; infinite if none is."""
        fitting = [point for point in self.points if point.peak_bytes <= budget_bytes]
        more = 1.0 if self.step.tiled is None else _NOISE  # tiles round, so they have to pay
        return more * self.seconds_of(fitting[-1]) if fitting else math.inf

    def num_forwards(self, point: Point) -> int:
        """Return the runs of blocks in a step that follows a plan, inverses included."""
        simulation = simulate(point.schedule, costs=self.costs)
        return sum(simulation.forwards_per_stage[:-1]) + simulation.num_inverses

    def repriced(
        self, calls: list[MeasuredCall], costs: list[Cost], seconds: float
    ) -> PricedBlocks:
        """Return the same blocks with other costs of the measured calls."""
        costs = largest_costs_among_ranks(self.step.model, costs)
        return self._replace(calls=calls, seconds=seconds).with_costs(costs)

    def with_costs(self, costs: list[Cost]) -> PricedBlocks:
        """Return the same calls with other costs, and the plans for them."""
        *points, whole = _points_of(costs, self.place)
        if self.plain_bytes is not None:
            whole = replace(whole, peak_bytes=self.plain_bytes)
            points = [point for point in points if point.peak_bytes < self.plain_bytes]
        points = [*points, whole]
        if self.pending is not None:  # See Rule 4
            again = each_alone([0] * (len(costs) - 1))
            schedules = [again, *(point.schedule for point in points)]
            points = _best([self._point_of(schedule, costs) for schedule in schedules])
        return self._replace(costs=costs, points=points)

    def beside(self, pending: int) -> PricedBlocks:
        """Return the same blocks in steps beside forwards that wait for their backward."""
        check_whole(0, pending=pending)
        return self._replace(pending=pending).with_costs(self.costs)

    def bytes_beside(self, peak_bytes: int, held_bytes: int) -> int:
        """Return what a step with this peak, whose forward holds so much, takes (See Rule 3)."""
        if self.pending is None:
            return peak_bytes
        gradients = sum(p.nbytes for p in self.step.model.parameters() if p.requires_grad)
        return peak_bytes + self.pending * held_bytes + gradients

    def _point_of(self, schedule: Schedule, costs: Sequence[Cost]) -> Point:
        """Return the bytes and the time of a schedule, beside other forwards if there are some."""
        found = simulate(schedule, costs=costs)
        held = [each.held_bytes for each in trace(schedule, costs) if not each.is_backward]
        peak_bytes = self.bytes_beside(found.peak_bytes, held[-1])
        return Point(peak_bytes, found.seconds, found.num_forwards, schedule, found.num_inverses)

    def under_policy(self, policy: Policy) -> PricedBlocks:
        """Return the blocks with the plan that follows a policy, and the one that keeps all."""
        whole, saves_attention = self.points[-1], policy == "save attention"
        if policy == "keep" or not self.calls:
            return self._replace(points=[whole], policy=policy)
        kind = self._with_attention_alone() if saves_attention else self
        places = list(dict.fromkeys(id(call.module) for call in kind.calls))
        again = set(places[:: 2 if policy == "every 2nd block" else 1])
        kept = [
            len(cost.results) * saves_attention
            if call.until_again is not None and id(call.module) in again
            else None
            for call, cost in zip(kind.calls, kind.costs, strict=False)
        ]
        schedule = replace(each_alone(kept), name=policy)
        return kind._replace(points=[kind._point_of(schedule, kind.costs), whole], policy=policy)

    def _with_attention_alone(self) -> PricedBlocks:
        """Return the blocks with kernels of attention as all that they may keep (See Rule 7)."""
        calls: list[MeasuredCall] = []
        for call in self.measured.calls:
            products = [
                each if is_attention(each.func) else each._replace(start=math.inf)
                for each in call.products
            ]
            calls.append(replace(call, products=products))
        if not any(each.num_products for call in calls for each in selections(call)):
            raise ValueError(
                "`policy` is 'save attention', but no block was seen to call a kernel of attention "
                "that could be kept alone. Let the model call torch.nn.functional."
                'scaled_dot_product_attention (`attn_implementation="sdpa"`), which has a kernel '
                'without dropout on every device, or give "full".'
            )
        kind = self._replace(measured=replace(self.measured, calls=calls))
        return kind.repriced(calls, price(kind.measured, None), kind.seconds)

    def with_new_step(self) -> PricedBlocks:
        """Return the same blocks with a step that nothing is expected of, for changed weights."""
        step = replace(self.step)
        step.verification.growth |= self.step.verification.growth
        return self._replace(step=step)

    def plain(self, *, is_tiled: bool = False) -> Rehearsed:
        """Run a step that keeps all residuals, in tiles where it may be and `is_tiled`."""
        step = self.step if is_tiled else replace(self.step, tiled=None)
        code = CodeByModule({id(call.module): call.codes[0] for call in self.calls if call.codes})
        with followed([module for _, module in self.blocks], code):
            return rehearse(step)

    def outcome_again(self) -> Outcome:
        """Run the step that runs all blocks again, and return its outcome."""
        return measure_blocks(self.step, self.blocks, codes_again(self.calls)).outcome

    def expect_plain(self) -> None:
        """Run the plain step, if there is room for it, and compare plans with its outcome."""
        verification = self.step.verification
        if not self.calls:
            return  # it is the plain step
        if not verification.is_plain and _has_room(self.step, self.points[-1].peak_bytes):
            verification.expect(self.plain().outcome, is_plain=True)
        if verification.expected is None:
            verification.expect(self.outcome_again(), is_plain=False)

    def expect_again(self) -> None:
        """Run the step that plans are compared with again, and allow the spread of its outcomes."""
        verification = self.step.verification
        if verification.is_plain:
            verification.expect_again(self.plain().outcome)
        if self.is_compiled or not verification.is_plain:
            verification.expect_again(self.outcome_again())


def codes_again(calls: Sequence[MeasuredCall]) -> CodeByModule | None:
    """Return the codes by which compiled blocks run again; None if none are compiled."""
    codes = {id(call.module): call.code_again for call in calls if call.code_again}
    return CodeByModule(codes) if codes else None


def _points_of(costs: list[Cost], place: OffloadPlace) -> list[Point]:
    """Return the plans that are best for some budget; those that offload have bytes in flight."""
    staying = [replace(cost, offload_seconds=None) for cost in costs]
    points = list(frontier(staying))
    if place.seconds_per_byte is None:
        return points
    in_flight_bytes = 2 * max(cost.state_bytes for cost in costs)
    for point in frontier(costs):
        schedule = place.of(point.schedule)
        found = simulate(schedule, costs=costs, in_flight_bytes=in_flight_bytes)
        points.append(replace(point, peak_bytes=found.peak_bytes, schedule=schedule))
    return _best(points)


def _best(points: Sequence[Point]) -> list[Point]:
    """Return the points that are best for some budget, from the least bytes to the most."""
    best: list[Point] = []
    for point in sorted(points, key=lambda each: (each.peak_bytes, each.seconds)):
        if not best or point.seconds < best[-1].seconds:
            best.append(point)
    return best


def price_blocks(
    step: Step, blocks: list[Block], place: OffloadPlace, before: PricedBlocks | None = None
) -> PricedBlocks:
    """Measure blocks, and find the best plans for them; times are in seconds.

    `before` are other blocks of the same step, whose plain step was run. A ValueError says that no
    forward calls the blocks.
    """
    step, measured = measure_most(step, blocks)
    if not measured.calls:
        names = ", ".join(f"`{name}`" for name, _ in blocks[:3])
        raise ValueError(
            f"The blocks are {names}, but forward calls none of them, or calls them within a "
            "checkpoint of the model's own. Name other `blocks`, or turn that checkpointing off."
        )
    step.verification.expect(measured.outcome, is_plain=False)
    kind = PricedBlocks(step, place, blocks, measured, [], [], [])
    plain_bytes = None if before is None else before.plain_bytes
    plain_seconds = None if before is None else before.seconds
    costs = price(measured, None)
    has_room = _has_room(step, simulate(linear(len(costs)), costs=costs).peak_bytes)
    if has_room and plain_bytes is None:
        plain_bytes, _, outcome, _ = kind.plain(is_tiled=True)
        if step.tiled is None:
            step.verification.expect(outcome, is_plain=True)
    times = times_of(step, blocks, measured.calls, has_room=has_room, plain_seconds=plain_seconds)
    work = sum(call.work for call in measured.calls)
    timed = zip(measured.calls, times.again, strict=True)
    measured = replace(
        measured,
        calls=[replace(call, work=seconds, shares=times.shares) for call, seconds in timed],
        seconds_per_work=sum(times.again) / work if work else 0.0,
    )
    costs = price(measured, place.seconds_per_byte)
    if plain_bytes is not None:
        costs = as_in_plain_step(costs, plain_bytes)
    kind = kind._replace(measured=measured, plain_bytes=plain_bytes, plain_seconds=times.plain)
    return kind.repriced(measured.calls, costs, times.plain)


def price_whole(step: Step) -> PricedBlocks:
    """Run the plain step, and return the costs of a model without blocks."""
    found = rehearse(step)
    (seconds,) = largest_among_ranks(step.model, [seconds_of(step)])
    costs = [Cost(0.0, 0, 0, tape_run_bytes=found.peak_bytes, is_fixed=True)]
    measured = Measured([], Span(), Span(), found.outcome)
    kind = PricedBlocks(step, OffloadPlace(), [], measured, [], [], [], seconds, seconds)
    return kind.with_costs(costs)


def _has_room(step: Step, num_bytes: int) -> bool:
    """Whether the system has room for a step that takes so many bytes, on all ranks."""
    return not on_any_rank(step.model, not has_room(step.device, num_bytes))
