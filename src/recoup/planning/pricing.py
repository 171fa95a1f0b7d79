"""The measurements of a step, and the costs of a chain that are computed from them.

NOTE [ A step as a chain ]

Rule 1. The calls of blocks are the stages. The code after the last call, with the loss, is one more
        stage, which can only be taped. Memory of the code between two blocks is beside the chain.
Rule 2. The costs are chosen so that `simulate` reproduces the bytes measured at every border of the
        step that recomputes each block. So errors in what the costs leave out cancel.
Rule 3. If a block saves its own output, its tape holds that output until after the block behind it
        is reversed. In the measured step, it was freed during that backward. So the bytes are added
        to what comes after that in the backward, if the block before keeps its residuals.
Rule 4. A block that draws random numbers keeps the random state if it is recomputed, and one that
        changes buffers, as a batch norm does, copies of them. Those bytes are beside the chain, and
        subtracted from the whole tape, which needs neither (at most to zero residuals, so
        recomputing a block with less seems cheaper than it is).
Rule 5. A block whose residuals do not hold its input has so much less of a tape (at least that of
        the input, though), unless the block before holds it as its own output. What a second run
        fills holds the input that it was given.
Rule 6. Autograd frees what a first run has saved at a node when the gradients of that node are
        summed up, and what a second run has filled in before that (a sum over a batch takes memory
        of its own on a GPU). So what the plain step takes beyond its prediction is added to the
        backward of each block that keeps its residuals.
Rule 7. A block may keep the outputs of costly operators, those with the most work per byte first.
        Operators after the last residual are left out, because a recomputation stops before them if
        its output is not needed.
Rule 8. It stops earlier if the last residuals are held: outputs that are kept in any case, what the
        block returns, which the block after it keeps as its input, and small ones, such as the mean
        and the deviation of a batch norm. So that norm, and the sum and activation after it, do not
        run again. It does not make the output of the block then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn

from recoup._core.kept_products import Products
from recoup.memory.meter import Span
from recoup.planning.compiling import BlockCode
from recoup.planning.verification import Outcome
from recoup.planning.work import Product, Residual
from recoup.schedules import (
    Action,
    Advance,
    Cost,
    Drop,
    Keep,
    Load,
    Results,
    Reverse,
    Schedule,
    SelectiveTape,
    Tape,
    linear,
    simulate,
)

_MOST_SELECTIONS = 5
_SMALL = 64  # of this size, so many residuals are no more than all of them


class Selection(NamedTuple):
    """What a call keeps for its second run, beside its input (See Rules 7 and 8).

    Args:
        products: the operators whose outputs it keeps, and the residuals that it holds.
        num_products: the number of these operators.
        results: the bytes of both, without those of what the call returns; without a time.
        saved_work: the counted work that the second run is spared.
    """

    products: Products
    num_products: int
    results: Results
    saved_work: float


@dataclass
class MeasuredCall:
    """The measured costs of one call of a block; spans are those of the timeline of the step.

    Args:
        name: the qualified name of the block.
        module: the block.
        is_linked: whether one of its arguments is an output of the call before it.
        state_bytes: bytes of its arguments (of the linked ones, if there are some), except those
            that an earlier call was given.
        is_frozen: whether none of its outputs requires a gradient.
        output_bytes: bytes of its output.
        unheld_bytes: the part of `state_bytes` that its residuals do not hold (Rule 3 of
            NOTE [ Measured steps ]).
        counted_work: the counted work of one forward.
        work: the same; once it is timed, the seconds of a second run.
        shares: the parts of its counted work that are saved where values are kept, as `Times` has
            them; below 0 where keeping them takes longer, which pays for the least bytes alone.
        before: the span that ends when the call begins.
        forward: the span of its forward.
        cleared: the span in which autocast frees the weights that it has cast, which it does before
            backward.
        until_again: the span that ends when its second run begins in backward; None if there is no
            second run.
        stopped: the span of its second run until its last residual; None if that is all of it.
        again: the span of the rest, at the end of which its output is alive.
        residuals: the span that ends when that output has been freed.
        after: the span from there to the next second run, or to the end.
        again_bytes: bytes of the output of its second run.
        alive_bytes: bytes of its residuals that other code holds (a cache).
        replay_bytes: bytes of the random states that its recomputation needs, and of copies of the
            buffers that it changes.
        holders: names of attributes within the block that are tensors with a graph.
        products: the costly operators in its forward.
        listed: its residuals, in the order in which they are saved.
        is_invertible: whether its input can be made from its output, by `inverse` of the block.
        again_seconds: the time of its second run.
        backward_seconds: the time from there to the next second run, or to the end.
        codes: the code of each tape of the cost of the call; none if all are the block's own.
        code_again: the code of the call if it is run again.
    """

    name: str
    module: nn.Module
    is_linked: bool
    state_bytes: int
    is_frozen: bool = False
    output_bytes: int = 0
    unheld_bytes: int = 0
    counted_work: float = 0.0
    work: float = 0.0
    shares: Sequence[float] = (1.0,)
    before: Span = field(default_factory=Span)
    forward: Span = field(default_factory=Span)
    cleared: Span = field(default_factory=Span)
    until_again: Span | None = None
    stopped: Span | None = None
    again: Span = field(default_factory=Span)
    residuals: Span = field(default_factory=Span)
    after: Span = field(default_factory=Span)
    again_bytes: int = 0
    alive_bytes: int = 0
    replay_bytes: int = 0
    holders: tuple[str, ...] = ()
    products: list[Product] = field(default_factory=list[Product])
    listed: list[Residual] = field(default_factory=list[Residual])
    is_invertible: bool = False
    again_seconds: float = 0.0
    backward_seconds: float = 0.0
    codes: tuple[BlockCode, ...] = ()
    code_again: BlockCode | None = None

    @property
    def needed_work(self) -> float:
        """The counted work until the last residual is saved, where a second run ends."""
        return max((each.work for each in self.listed), default=0.0)

    @property
    def own_bytes(self) -> int:
        """Bytes of its residuals, without the shared ones and those that other code holds."""
        if self.until_again is None:
            return 0
        begin, residuals = self.until_again.end_bytes, self.residuals.end_bytes
        return max(residuals - begin - self.shared_bytes - self.alive_bytes, 0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of its output that its own residuals hold."""
        return max(self.again_bytes - (self.again.end_bytes - self.residuals.end_bytes), 0)


@dataclass
class Measured:
    """The measurements of a step.

    Args:
        calls: the calls of blocks, in the order of forward.
        loss: the span from the end of the last call to the end of the loss.
        between: the span from there to the first second run.
        outcome: the outcome of the step.
        seconds_per_work: the seconds of a unit of counted work; 1 until the step is timed.
    """

    calls: list[MeasuredCall]
    loss: Span
    between: Span
    outcome: Outcome
    seconds_per_work: float = 1.0


def price(measured: Measured, moving_seconds: float | None) -> list[Cost]:
    """Return the costs of the calls and the code after them, given the seconds of moving a byte."""
    beside = _beside(measured)
    beside = [*(b + _replay(c) for b, c in zip(beside, measured.calls, strict=False)), beside[-1]]
    shared = [0, *(call.shared_bytes for call in measured.calls)]
    costs = [
        _cost(
            *(call, between, min(before, call.state_bytes) if call.is_linked else 0),
            *(cached, moving_seconds),
        )
        for call, between, before, cached in zip(
            measured.calls, beside, shared, _cached(measured.calls), strict=False
        )
    ]
    calls = measured.calls
    last = calls[-1]
    end = last.cleared.end_bytes
    state, between = last.output_bytes, measured.between
    tail = Cost(
        seconds=0.0,
        state_bytes=state,
        tape_bytes=state,
        tape_run_bytes=max(measured.loss.peak_bytes - end, 0),
        reverse_bytes=max(between.peak_bytes - end, 0),
        left_bytes=between.end_bytes - end + state + beside[-1],
        between_bytes=beside[-1],
        is_fixed=True,
    )
    return [*costs, tail]


def _cached(calls: Sequence[MeasuredCall]) -> Iterator[int]:
    """Yield the bytes that autocast casts in each call, of weights that no call before it has."""
    seen: set[int] = set()
    for call in calls:
        own = {id(p): p.nbytes for p in call.module.parameters()}
        new = sum(num_bytes for key, num_bytes in own.items() if key not in seen)
        seen.update(own)
        cast_bytes = max(call.forward.end_bytes - call.cleared.end_bytes, 0)
        yield cast_bytes * new // sum(own.values()) if new else 0


def as_in_plain_step(costs: Sequence[Cost], plain_bytes: int) -> list[Cost]:
    """Return costs by which the plain step takes its measured peak (See Rule 6)."""
    more = max(plain_bytes - simulate(linear(len(costs)), costs=costs).peak_bytes, 0)
    return [
        replace(cost, reverse_bytes=cost.reverse_bytes + more, again=cost.tape_again)
        if cost.tape_bytes and not cost.is_fixed
        else cost
        for cost in costs
    ]


def _beside(measured: Measured) -> list[int]:
    """Return the bytes that code outside blocks keeps from each border on."""
    calls = measured.calls
    kept = [0, *accumulate(call.state_bytes if call.until_again else 0 for call in calls)]
    replay = [0, *accumulate(call.replay_bytes if call.until_again else 0 for call in calls)]
    alive = [call.before.end_bytes - call.state_bytes for call in calls]
    alive.append(calls[-1].cleared.end_bytes - calls[-1].output_bytes)
    alive = [a - r for a, r in zip(alive, replay, strict=True)]  # See Rule 4
    # Memory that is freed before backward is assumed to stay.
    until = accumulate((a - k for a, k in zip(alive, kept, strict=True)), max)
    levels = [0, *(max(level, 0) for level in until)]
    return [b - a for a, b in pairwise(levels)]


def _cost(
    call: MeasuredCall,
    between_bytes: int,
    lent_bytes: int,
    cached_bytes: int,
    moving_seconds: float | None,
) -> Cost:
    """Return the cost of a call; the tape before it may hold part of its input (See Rule 3)."""
    run_bytes = call.forward.peak_bytes - call.before.end_bytes - _replay(call)
    run_bytes = max(run_bytes, call.output_bytes)
    between_run_bytes = call.before.peak_bytes - call.before.end_bytes
    if call.until_again is None:  # no gradient goes through it
        return Cost(
            seconds=call.work,
            state_bytes=0,
            tape_bytes=0,
            run_bytes=call.state_bytes + run_bytes,  # its input is counted nowhere else
            tape_run_bytes=call.state_bytes + run_bytes,
            between_bytes=between_bytes,
            is_linked=call.is_linked,
            is_fixed=call.is_frozen,  # a second run gains nothing, and needs its input
            between_run_bytes=call.state_bytes + between_run_bytes,
            cached_bytes=cached_bytes,
        )
    begin, own = call.until_again.end_bytes, call.own_bytes
    unheld = max(call.unheld_bytes - lent_bytes, 0)
    beyond_input = max(own - _replay(call), 0)
    stopped = call.stopped or call.again
    stopped_run_bytes = max(stopped.peak_bytes - begin, 0)
    tape_run_bytes = max(call.again.peak_bytes - begin, stopped_run_bytes)
    reverse_bytes = max(call.after.peak_bytes - begin - own, 0) + _replay(call)
    again = SelectiveTape(
        *(call.state_bytes + beyond_input, 0.0, tape_run_bytes, reverse_bytes, stopped_run_bytes)
    )
    return Cost(
        seconds=call.work,
        state_bytes=call.state_bytes,
        tape_bytes=call.state_bytes + max(beyond_input - unheld, 0),
        run_bytes=run_bytes,
        tape_run_bytes=tape_run_bytes,
        reverse_bytes=reverse_bytes,
        again=again if unheld or stopped_run_bytes < tape_run_bytes else None,
        lent_bytes=_held_longer(call.after.levels, lent_bytes),
        offload_seconds=None if moving_seconds is None else moving_seconds * call.state_bytes,
        left_bytes=call.after.end_bytes - begin + call.state_bytes + between_bytes,
        between_bytes=between_bytes,
        is_linked=call.is_linked,
        between_run_bytes=between_run_bytes,
        results=_results(call),
        cached_bytes=cached_bytes,
    )


def _held_longer(levels: Sequence[int], num_bytes: int) -> int:
    """Return how much higher a peak is if a tensor of these bytes is not freed (See Rule 3).

    `levels` are the bytes after each event of the span in which it is freed, if known.
    """
    frees = [place for place, (a, b) in enumerate(pairwise(levels), 1) if a - b == num_bytes]
    if not num_bytes or not frees:
        return num_bytes
    peak, after = max(levels), max(levels[frees[-1] :])
    return max(after + num_bytes - peak, 0)


def _replay(call: MeasuredCall) -> int:
    """Return the bytes that recomputing a block keeps beside its input (See Rule 4)."""
    return min(call.replay_bytes, call.own_bytes)


def _results(call: MeasuredCall) -> tuple[Results, ...]:
    """Return what may be kept for the second run, and the time of that run."""
    num = len(call.shares)
    knots = {0.0: 0.0}  # from the fraction that is saved by counted work to that by the clock
    for part, share in enumerate(call.shares, 1):
        fraction = saved_fraction(call, selection_of_part(call, part, num)[1])
        knots[fraction] = share * fraction
    return tuple(
        replace(
            each.results,
            seconds=max(call.work * (1.0 - _between(knots, saved_fraction(call, each))), 0.0),
        )
        for each in selections(call)
    )


def _between(knots: Mapping[float, float], x: float) -> float:
    """Return the value at `x` of what is linear between knots, and constant after the last one."""
    found = sorted(knots.items())
    for (before, low), (after, high) in pairwise(found):
        if x <= after:
            return low + (high - low) * (x - before) / (after - before)
    return found[-1][1]


def saved_fraction(call: MeasuredCall, selection: Selection | None) -> float:
    """Return the part of a second run that is spared by what is kept, by its counted work."""
    if selection is None or not call.counted_work:
        return 0.0
    return min(selection.saved_work / call.counted_work, 1.0)


def selection_of_part(
    call: MeasuredCall, part: int, num_parts: int
) -> tuple[int, Selection | None]:
    """Return the last selection of one of the equal parts of all, and its number; 0 for none."""
    found = selections(call)
    place = math.ceil(len(found) * part / num_parts)
    return place, found[place - 1] if found else None


def selections(call: MeasuredCall) -> list[Selection]:
    """Return what may be kept together for the second run, the fewest bytes first."""
    products, end = call.products, call.needed_work
    needed = [i for i, product in enumerate(products) if product.start < end]
    ranked = sorted(needed, key=lambda i: -products[i].work / max(products[i].num_bytes, 1))
    whole = call.residuals.end_bytes - (call.until_again.end_bytes if call.until_again else 0)
    lengths = [
        length
        for length in range(1, len(ranked) + 1)
        if sum(products[i].num_bytes for i in ranked[:length]) < whole
    ]
    step = max(len(lengths) / _MOST_SELECTIONS, 1.0)
    places = sorted({len(lengths) - 1 - int(step * i) for i in range(_MOST_SELECTIONS)})
    found: list[Selection] = []
    for length in (0, *(lengths[place] for place in places if place >= 0)):
        chosen = tuple(sorted(ranked[:length]))
        if chosen:
            found.append(_selection(call, chosen, frozenset(), end))
        held = frozenset(
            place
            for place, each in enumerate(call.listed)
            if each.is_output or each.product in chosen or each.num_bytes * _SMALL <= whole
        )
        last = max((e.work for i, e in enumerate(call.listed) if i not in held), default=0.0)
        if last < end:
            found.append(_selection(call, chosen, held, last))
    return found


def _selection(
    call: MeasuredCall, chosen: tuple[int, ...], held: frozenset[int], last: float
) -> Selection:
    """Return a selection of products and residuals, where the second run ends after some work."""
    end, products = call.needed_work, [call.products[number] for number in chosen]
    funcs = frozenset(product.func for product in call.products if chosen)
    unchanged = {number for number in chosen if call.products[number].is_residual}
    small = sum(
        each.num_bytes
        for place in held
        if not (each := call.listed[place]).is_output and each.product not in chosen
    )
    results = Results(
        num_bytes=small + sum(each.num_bytes for each in products),
        seconds=0.0,
        taped_bytes=small + sum(each.num_bytes for each in products if each.is_saved),
        holds_output=last < end,
    )
    saved_work = end - last + sum(each.work for each in products if each.start < last)
    kept = Products(funcs, frozenset(chosen), unchanged, held)
    return Selection(kept, len(chosen), results, saved_work)


def each_alone(results: Sequence[int | None]) -> Schedule:
    """Return a schedule in which each call is treated alone, and the code after them is taped.

    `results` has the number of what each call keeps with its input, 0 for nothing; None for a call
    that keeps its residuals.
    """
    actions: list[Action] = [Tape(len(results)), Reverse(len(results))]
    for index, kept in reversed(list(enumerate(results))):
        if kept is None:
            actions = [Tape(index), *actions, Reverse(index)]
        else:
            first = (Keep(index), Advance(index, index + 1, kept))
            actions = [*first, *actions, Load(index), Drop(index), Tape(index), Reverse(index)]
    return Schedule(len(results) + 1, tuple(actions))


def chains_of(calls: Sequence[MeasuredCall]) -> Iterator[tuple[int, int]]:
    """Yield the start and the stop of each chain."""
    starts = [index for index, call in enumerate(calls) if index == 0 or not call.is_linked]
    yield from pairwise([*starts, len(calls)])
