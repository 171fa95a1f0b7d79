"""The costs of blocks that may run compiled, be inverted, or have their output layer in tiles.

NOTE [ Costs of several codes ]

Rule 1. A step is measured for each code: the blocks' own, and one for each budget of the compiler's
        partitioner. Times are those of a block's second run and of its backward; alike calls share
        the median of theirs.
Rule 2. The whole tape of a call is that of its fastest code. Codes that keep less and take longer
        are its variants; all others are left out. So no plan is faster than to keep every tape.
Rule 3. Where a call is run again, all of its runs are by the code that then needs the least memory
        (`Cost.again`): a plan runs a call again only where keeping the smallest tape is too much.
Rule 4. What lies between blocks is taken from a step that recomputes every block by that code,
        since a plan that recomputes all must be predicted exactly (NOTE [ A step as a chain ]).
Rule 5. Compiled code draws other random numbers, so a block is compiled for all budgets or for
        none: in a plan over compiled blocks those stay as they are that cannot be compiled, or for
        which every compiled code takes more bytes and more time. The plan with no block compiled is
        the other kind to choose from (NOTE [ Kinds of blocks ], Rule 1).
Rule 6. Where a step draws nothing, compiled blocks must give the gradients of uncompiled ones, but
        for what rounding grows to (Rule 7 of NOTE [ Compared steps ]). Where it draws, only
        compiled steps can be compared with each other. A code that draws otherwise than the first
        (kernels of attention draw from the same generator as the seeds of the compiler, in the
        order in which it calls them) is left out: plans mix codes, and are compared. What two steps
        of one code differ by is allowed, since kernels may sum in no fixed order.

NOTE [ Inverted blocks ]

Rule 7. A block is inverted if the caller allows rounding, and if its call can be (See Rule 4 of
        NOTE [ The inputs and outputs of a call ]). The first block of a chain is not: its input is
        kept, so that what an inverse gets wrong can be computed again.
Rule 8. One more step is run, in which every such block is inverted, by the executor that plans run
        by. What an inverse and the backward after it have alive is read where the next block
        begins.
Rule 9. A block whose inverse the drift guard refuses in that step, or has refused before, is not
        inverted. If that step fails (an inverse has another shape, a block counts in a buffer), no
        block is inverted, and the caller gets a warning.
Rule 10. Plans that invert are compared with the plain step to the tolerance of the guard. If they
        differ by more, a plan that inverts nothing is made instead, with a warning.
Rule 11. Blocks of sharded models are not inverted: ranks could see different drift. Compiled blocks
        are not, either: their networks cannot share an evaluation with an inverse.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from recoup._core.compile import is_compiled
from recoup._core.devices import generator_states, same_states, with_seed
from recoup._core.drift_guard import DriftGuard
from recoup.errors import ChangedError, GradientError, ReplayError
from recoup.memory.meter import Span, timeline
from recoup.planning.called_blocks import output_layer_of
from recoup.planning.compiling import SHARES, BlockCode, CompiledCode, NudgedCode
from recoup.planning.following import PlannedModel
from recoup.planning.forwards import followed
from recoup.planning.measuring import measure_blocks, medians_of_alike
from recoup.planning.priced_blocks import PricedBlocks, codes_again, price_blocks
from recoup.planning.pricing import Measured, MeasuredCall, chains_of, price
from recoup.planning.step import (
    is_sharded,
    largest_among_ranks,
    largest_costs_among_ranks,
    on_any_rank,
)
from recoup.planning.verification import DifferentStepError, Outcome, Verification
from recoup.planning.work import WorkCounter
from recoup.schedules import Cost, SelectiveTape, Way, constant

_logger = logging.getLogger("recoup.planning.compiling")

_NUM_STEPS = 2  # that are timed
_NOISE = 0.01  # a relative difference of times that says nothing
_EPS_OF_TF32 = 2.0**-11
_WORTH = 1 / 32  # of the least bytes: smaller logits are left alone
_LESS = 0.97  # of the least bytes: a head that leaves more is left alone


class _Candidate(NamedTuple):
    """A code that a call can run by.

    Args:
        code: the code.
        cost: its cost, without those of other codes.
        again: the same if the call is run again, from an input that is held.
        run_seconds: the time of a run.
        seconds: the time of a run and of its backward.
    """

    code: BlockCode
    cost: Cost
    again: Cost
    run_seconds: float
    seconds: float

    @property
    def moment_bytes(self) -> int:
        """The most bytes while it runs again and is reversed, beyond its input."""
        cost = self.again
        tape = cost.tape_bytes - cost.state_bytes
        return max(cost.tape_run_bytes, tape + cost.reverse_bytes)


class _Codes(NamedTuple):
    """The codes of a block by their places: of the whole tape, thinner ones, and runs again."""

    tapes: list[int]
    again: int


def price_codes(own: PricedBlocks, backend: str) -> list[PricedBlocks]:
    """Compile blocks, and find the best plans with compiled blocks and without (See Rule 5)."""
    try:
        growth = _growth(own)
        candidates = _candidates(own, backend, growth)
        chosen: dict[int, _Codes] = {}  # by the id of the block
        for call, each in zip(own.measured.calls, candidates, strict=True):
            if (codes := _chosen(each)) is not None:
                chosen.setdefault(id(call.module), codes)
        return [_compiled(own, candidates, chosen, growth), own] if chosen else [own]
    except (ChangedError, ReplayError) as error:
        warnings.warn(f"No block is compiled. {error}", stacklevel=5)
        return [own]


def _compiled(
    own: PricedBlocks,
    candidates: Sequence[Sequence[_Candidate]],
    chosen: dict[int, _Codes],
    growth: Mapping[str, float],
) -> PricedBlocks:
    """Return the plans in which all blocks that have chosen codes are compiled."""
    calls, moving_seconds = list(own.measured.calls), own.place.seconds_per_byte
    for place, (call, each) in enumerate(zip(calls, candidates, strict=True)):
        if (codes := chosen.get(id(call.module))) is not None:
            of_tapes = tuple(each[index].code for index in codes.tapes)
            calls[place] = replace(call, codes=of_tapes, code_again=each[codes.again].code)
    step = replace(own.step)  # with a verification of its own
    step.verification.growth |= growth
    measured = measure_blocks(step, own.blocks, codes_again(calls))
    *reference, tail = price(measured, moving_seconds)
    *costs, _ = price(own.measured, moving_seconds)
    seconds = own.seconds
    for place, (call, each, between) in enumerate(zip(calls, candidates, reference, strict=False)):
        if (codes := chosen.get(id(call.module))) is not None:
            tapes = [each[index] for index in codes.tapes]
            costs[place] = _cost(tapes, each[codes.again], between)
            seconds += tapes[0].seconds - each[0].seconds
    made = own._replace(step=step, plain_bytes=None)
    return made.repriced(calls, [*costs, tail], max(seconds, 0.0))


def _cost(tapes: Sequence[_Candidate], again: _Candidate, between: Cost) -> Cost:
    """Return the cost of a call whose surroundings are those of `between` (See Rules 2 to 4)."""
    whole = tapes[0]

    def selective(cost: Cost, seconds: float) -> SelectiveTape:
        more = max(seconds - whole.seconds, 0.0)
        return SelectiveTape(cost.tape_bytes, more, cost.tape_run_bytes, cost.reverse_bytes)

    return replace(
        between,
        seconds=again.run_seconds,
        tape_bytes=whole.cost.tape_bytes,
        run_bytes=again.again.run_bytes,
        tape_run_bytes=whole.cost.tape_run_bytes,
        reverse_bytes=whole.cost.reverse_bytes,
        variants=tuple(selective(each.cost, each.seconds) for each in tapes[1:]),
        again=selective(again.again, again.seconds),
    )


def _growth(own: PricedBlocks) -> dict[str, float]:
    """Return what rounding errors of blocks grow to in each gradient and buffer."""
    found = Verification()
    nudged = measure_blocks(replace(own.step), own.blocks, NudgedCode()).outcome
    found.allow_growth(own.measured.outcome, nudged)
    return found.growth


def _differs(
    own: PricedBlocks, growth: Mapping[str, float], expected: Sequence[Outcome], found: Outcome
) -> str | None:
    """Return how a step of compiled blocks differs from several of what is expected, if it does."""
    both = Verification(growth)
    both.expect(expected[-1], is_plain=False)
    for each in expected[:-1]:
        both.expect_again(each)
    both.allow_other_sums(_eps_of_products(own.step.device))
    difference = both.difference(found)
    is_other = on_any_rank(own.step.model, difference is not None)
    return (difference or "On another rank, a compiled step differs.") if is_other else None


def _eps_of_products(device: torch.device) -> float:
    """Return the machine epsilon of products, where it is larger than that of their type."""
    backends = torch.backends  # of CUDA alone: other devices have no TF32
    rounds = backends.cudnn.allow_tf32 or backends.cuda.matmul.allow_tf32
    return _EPS_OF_TF32 if device.type == "cuda" and rounds else 0.0


def _candidates(
    own: PricedBlocks, backend: str, growth: Mapping[str, float]
) -> list[list[_Candidate]]:
    """Return the codes that each call can run by, its own first (See Rule 1)."""
    step, calls = own.step, own.measured.calls
    found: list[list[_Candidate]] = [[] for _ in calls]
    failed: set[object] = set()
    expected: list[Outcome] = []
    draws = False
    rate = 0.0  # of times without counting bytes to those with it
    begin = time.perf_counter()
    codes = (BlockCode(), *(CompiledCode(share, backend, failed) for share in SHARES))
    for number, code in enumerate(codes):
        if number > 1:  # own code compiles nothing
            seconds = time.perf_counter() - begin
            _logger.info(
                "%d of %d budgets of the compiler are done, in %.0f s; about %.0f s are left",
                number - 1, len(SHARES), seconds, seconds / (number - 1) * (len(codes) - number),
            )  # fmt: skip
        if isinstance(code, CompiledCode):
            measure_blocks(step, own.blocks, code)  # compiles
        steps = [measure_blocks(step, own.blocks, code) for _ in range(_NUM_STEPS)]
        if any(len(each.calls) != len(calls) for each in steps):
            continue  # it is no code for the same results
        measured = steps[-1]
        is_own = type(code) is BlockCode
        if is_own:
            unmoved = with_seed(generator_states, step.seed)
            draws = not same_states(measured.outcome.states, unmoved)
        if not expected and not (is_own and draws):  # See Rule 6
            expected = [each.outcome for each in steps]
        if expected and (difference := _differs(own, growth, expected, measured.outcome)):
            if not draws:
                raise DifferentStepError(difference)
            continue
        held = replace(measured, calls=[replace(c, unheld_bytes=0) for c in measured.calls])
        kept, again = (
            largest_costs_among_ranks(step.model, price(each, own.place.seconds_per_byte))
            for each in (measured, held)
        )
        times = _times(own, steps)
        if is_own and (counted := sum(run for run, _ in times)):
            rate = sum(call.work for call in calls) / counted
        rows = zip(found, kept, again, times, strict=False)
        for candidates, cost, cost_again, (run, both) in rows:
            candidates.append(_Candidate(code, cost, cost_again, rate * run, rate * both))
    return [
        [
            each
            for each in candidates
            if not isinstance(each.code, CompiledCode) or each.code.compiles(call.module)
        ]  # a block that fails at one share is compiled at none
        for call, candidates in zip(calls, found, strict=True)
    ]


def _times(own: PricedBlocks, steps: Sequence[Measured]) -> list[tuple[float, float]]:
    """Return the seconds of a run of each call, and those with its backward (See Rule 1)."""
    calls = steps[0].calls
    several = list(zip(*(step.calls for step in steps), strict=True))
    runs = medians_of_alike(calls, [min(c.again_seconds for c in each) for each in several])
    rests = medians_of_alike(calls, [min(c.backward_seconds for c in each) for each in several])
    found = largest_among_ranks(own.step.model, [*runs, *rests])
    return [(run, run + rest) for run, rest in zip(found, found[len(calls) :], strict=False)]


def _chosen(candidates: Sequence[_Candidate]) -> _Codes | None:
    """Return the codes of a block; None if no compiled one takes less time or fewer bytes."""
    compiled = range(1, len(candidates))
    seconds = [each.seconds for each in candidates]
    tape_bytes = [each.cost.tape_bytes for each in candidates]
    if all(seconds[i] >= seconds[0] and tape_bytes[i] >= tape_bytes[0] for i in compiled):
        return None
    quick = (1 + _NOISE) * min(seconds[1:])
    tapes = [min((i for i in compiled if seconds[i] <= quick), key=lambda i: tape_bytes[i])]
    for index in sorted(compiled, key=lambda i: (seconds[i], tape_bytes[i])):
        if tape_bytes[index] < tape_bytes[tapes[-1]]:  # See Rule 2
            tapes.append(index)
    again = min(compiled, key=lambda i: (candidates[i].moment_bytes, seconds[i]))  # See Rule 3
    return _Codes(tapes, again)


def with_inverses(kind: PricedBlocks, guard: DriftGuard) -> PricedBlocks:
    """Return the same blocks with the costs of their inverses, if any (See Rule 8)."""
    chains = list(chains_of(kind.calls))
    refused = {chains[0][0] + place for place in guard.kept} if len(chains) == 1 else set[int]()
    inverted = _invertible(kind, chains) - refused
    if not inverted or is_sharded(kind.step.model):
        return kind
    costs = [*map(_with_state, kind.calls, kind.costs), kind.costs[-1]]
    try:
        measured = _measured_inverses(kind, guard, inverted)
    except (ChangedError, ReplayError, NotImplementedError) as error:
        warnings.warn(f"No block is inverted. {type(error).__name__}: {error}", stacklevel=5)
        return kind
    for index, (work, num_bytes) in measured.items():
        costs[index] = replace(
            costs[index],
            is_invertible=True,
            invert_seconds=kind.measured.seconds_per_work * work,
            invert_bytes=num_bytes,
        )
    return kind._replace(guard=guard).with_costs(costs)


def _with_state(call: MeasuredCall, cost: Cost) -> Cost:
    """Return a cost with the bytes of the input, also of a call without residuals (a squeeze).

    No plan that only recomputes keeps that input, but the block before may be inverted from it.
    """
    if call.until_again is not None or not call.is_linked:
        return cost
    return replace(cost, state_bytes=call.state_bytes, tape_bytes=call.state_bytes)


def _invertible(kind: PricedBlocks, chains: Sequence[tuple[int, int]]) -> set[int]:
    """Return the calls that can be inverted from what the next call is given (See Rule 7)."""
    return {
        index
        for start, stop in chains
        for index in range(start + 1, stop)
        if kind.calls[index].is_invertible
        and (index + 1 < stop or stop == len(kind.calls))
        and not any(map(is_compiled, kind.calls[index].module.modules()))
    }


def _measured_inverses(
    kind: PricedBlocks, guard: DriftGuard, inverted: set[int]
) -> dict[int, tuple[float, int]]:
    """Return the work of each inverse, and its most bytes beyond the output (See Rule 8)."""
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
    with step.counted(line):
        with followed(planned.whole_modules, follower):
            step.run()
        marks.append((-1, line.mark()))
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


def with_tiles(kind: PricedBlocks, tiles: int | bool) -> list[PricedBlocks]:
    """Return blocks, and the same with their head in tiles if that can take fewer bytes."""
    head = output_layer_of(kind.step, kind.blocks, None if tiles is True else tiles)
    num_bytes = 0 if head is None else head.num_bytes
    most, is_missing = largest_among_ranks(kind.step.model, [num_bytes, head is None])
    if head is None or is_missing or most < _WORTH * kind.points[0].peak_bytes:
        return [kind]
    step = replace(kind.step, tiled=head)
    step.verification.expect(kind.measured.outcome, is_plain=False)  # of a step without tiles
    try:
        found = price_blocks(step, kind.blocks, kind.place)
    except (ChangedError, GradientError):
        return [kind]  # other code does with the output what only the whole can serve
    if found.points[0].peak_bytes > _LESS * kind.points[0].peak_bytes:
        return [kind]
    found.step.verification.allow_other_sums(head.eps)  # known now
    return [kind, found._replace(plain_seconds=kind.plain_seconds)]
