"""Bytes and times of the blocks of a model, measured in training steps that leave no trace.

NOTE [ Measured steps ]

Rule 1. The measured step recomputes every block in backward from its arguments. So it takes about
        as little memory as any plan, and shows each phase of a block by itself: the run without
        residuals, the recomputation with residuals, and the backward.
Rule 2. Bytes are counted as `measure` counts them, and read where blocks begin and end. Memory that
        is alive where a block begins, and no argument of a block, belongs to the code between
        blocks.
Rule 3. A block may keep a copy of an argument (in another layout, or cast) in its place, or nothing
        of it. So it is noted which arguments are among its residuals. Those that other calls were
        given, too, count as held, since these may hold them.
Rule 4. The work of operators is counted in the same step, to divide the time of a block among them.
        Compiled code does not run while work is counted, so plans over compiled blocks time all
        codes of a block instead.

NOTE [ Times of a step ]

Rule 5. Whole steps are timed, without counting bytes or work. What a step takes beyond the plain
        one is what its blocks pay: second runs, the hooks around them, the comparison, and the
        copies of products. So the predictions for these three steps are the times that were
        measured.
Rule 6. That is divided among blocks by the times of their second runs, one by one; calls that are
        alike share the median of theirs. A clock that is read there waits for an accelerator, so
        steps in which it is read say nothing else. Within a block, products and other operators
        share its time by their counted work. What keeping them saves of that is shown by steps that
        keep a third of them, two thirds and all, and interpolated between: a mask that is drawn
        again costs less than its counted work says, and its bits have to be packed, so the first
        third may save little where all save much.
Rule 7. The steps are run in turn, several times if they are short, and the shortest time of each
        counts, since other programs only make it longer. Counted times (without values) are always
        the same: once is enough.
Rule 8. The plain step, and those that keep products, are run only if the system has room for them.
        Else the plain step takes what is left of the other one without its second runs, and what is
        kept saves its counted work.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from recoup._core.call import Call, run_again
from recoup._core.compile import is_compiled
from recoup._core.devices import fingerprint, is_accelerator
from recoup._core.pytree import flatten
from recoup._core.saved_tensors import (
    backward_id,
    pair_in_force,
    requires_grad_of,
    saving,
    version_of,
    versions_of,
)
from recoup._core.sketch import make_tables
from recoup._core.slots import State
from recoup._core.storage_tracking import bytes_of, storages_of
from recoup._core.tensors import is_without_values
from recoup.errors import ChangedError, ReplayError
from recoup.memory.meter import Span, Timeline, timeline
from recoup.planning.blocks import Block, named_modules
from recoup.planning.compiling import BlockCode
from recoup.planning.following import PlannedModel
from recoup.planning.forwards import (
    Args,
    CallOutputs,
    Forward,
    Kwargs,
    enclosing_checkpoints,
    followed,
)
from recoup.planning.pricing import (
    Measured,
    MeasuredCall,
    each_alone,
    saved_fraction,
    selection_of_part,
)
from recoup.planning.step import Step, largest_among_ranks, now, seconds_of
from recoup.planning.verification import outcome_of
from recoup.planning.work import WorkCounter
from recoup.schedules import Way, constant


def measure_blocks(step: Step, blocks: Iterable[Block], code: BlockCode | None = None) -> Measured:
    """Measure a step in which each block is recomputed (See Rule 1).

    Where `code` is given, the blocks run by it, and are timed; else their own work is counted (See
    Rule 4).
    """
    blocks = list(blocks)
    make_tables(step.device)
    with step.counted(timeline(step.device, records_levels=True)) as line:
        meter = _Meter(step, blocks, line, code)
        with followed([module for _, module in blocks], meter):
            gradients = step.run(between=meter.loss_ended)
        meter.ended(line.mark())
        meter.chain.clear()  # or they would hold each other
        outcome = outcome_of(step.model, gradients, step.written)
    return Measured(meter.calls, meter.loss, meter.between, outcome)


class _Meter:
    """The follower that measures all blocks."""

    def __init__(
        self, step: Step, blocks: Iterable[Block], line: Timeline, code: BlockCode | None
    ) -> None:
        self.calls: list[MeasuredCall] = []
        self.loss = self.between = Span()
        self._code = code
        self._clock = 0.0  # at the end of the latest second run
        # Random states are in host memory.
        on_host = not is_accelerator(step.device)
        self._state_bytes = torch.get_rng_state().nbytes if on_host else 0
        self._names = {id(module): name for name, module in blocks}
        self._around = enclosing_checkpoints(), backward_id()  # within which it is planned, if any
        self._line = line
        self._returned = CallOutputs(())
        # Storages that are alive before the step, or that a call was given.
        self._known = WeakSet(storages_of(flatten((step.args, step.kwargs))[0]))
        self._given: WeakSet[torch.UntypedStorage] = WeakSet()  # that calls were given
        self._given_again: WeakSet[torch.UntypedStorage] = WeakSet()  # that several were given
        self._weights = WeakSet(storages_of((*step.model.parameters(), *step.model.buffers())))
        self._latest: MeasuredCall | None = None  # the call whose second run was the last
        # The calls of the chain that runs again: a plan holds them, with copies of what they were
        # given and may change (a cache), until the chain is reversed.
        self.chain: list[_MeasuredCall] = []

    def called(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run a block, and measure it."""
        if (enclosing_checkpoints(), backward_id()) != self._around:
            return forward(*args, **kwargs)  # a checkpoint of another library recomputes it
        name = self._names[id(module)]
        if self._code is not None:
            forward = self._code.of_call(module, forward)
        call = _MeasuredCall(self, f"block `{name}`", forward, args, kwargs, module)
        given = call.tensors
        taken = WeakSet(storages_of(given))
        at, _ = self._returned.indices_in(given, module)
        linked = tuple(given[place] for place in at)
        call.linked_at = at
        found = MeasuredCall(name, module, bool(at), _bytes_of(linked or given, self._known))
        call.found = found
        call.known = self._known & taken
        self._known.update(storages_of(linked or given))
        self._given_again |= self._given & taken
        self._given |= taken
        found.is_invertible = call.is_invertible_from(at)
        self.calls.append(found)
        found.before = self._line.mark()
        drawn_before, versions = self._drawn(), versions_of(tuple(module.buffers()))
        counter = self.counter(call)
        with counter.counting():
            output = run_again(call, stops=False)
        found.forward = self._line.mark()
        torch.clear_autocast_cache()  # which is held until backward begins, whatever blocks keep
        found.cleared = self._line.mark()
        found.replay_bytes = self._state_bytes if self._drawn() != drawn_before else 0
        found.replay_bytes += _bytes_of_changed(module, versions)
        found.work = found.counted_work = counter.work
        if self._code is None and not is_compiled(module):  # else nothing can be intercepted
            found.products = counter.products
        outputs, call.outputs = call.outputs, ()  # released here
        found.is_frozen = not any(map(requires_grad_of, outputs))
        found.output_bytes = _bytes_of(outputs, taken)
        found.listed = counter.residuals(set(storages_of(outputs)) - set(taken))
        call.saved = counter.saved_storages
        taken.update(storages_of(outputs))
        found.alive_bytes = counter.alive_bytes(taken | self._weights)
        found.holders = _attributes_with_a_graph(name, module)
        self._returned = CallOutputs(outputs)
        return output

    def counter(self, call: object = None) -> WorkCounter:
        """Return a counter of a run; of the first, which lists what the call saves."""
        return WorkCounter(call, counts_operators=self._code is None)

    def loss_ended(self) -> None:
        """Record the span of the loss."""
        self.loss = self._line.mark()

    def run_again(self, call: _MeasuredCall, run: Callable[[], State], given: State) -> None:
        """Measure the second run of a call, given these tensors."""
        found = call.found
        if self._latest is not None and not self._latest.is_linked:
            self.chain.clear()
        self.chain.append(call)
        found.until_again = self._line.mark()
        self.ended(found.until_again)
        counter = self.counter()
        if self._code is None:
            counter.when(found.needed_work, partial(self._stopped, found))
        linked = [given[place] for place in call.linked_at] or given
        saved = WeakSet(storages_of(linked)) if self._code is not None else call.saved
        begin = now()
        with counter.counting(), self._noting(saved):
            outputs = list(run())
        found.again_seconds = now() - begin
        held = saved | call.known | self._given_again
        found.unheld_bytes = _bytes_of(linked, held)
        found.again = self._line.mark()
        found.again_bytes = _bytes_of(outputs, set(storages_of(given)))
        outputs.clear()
        found.residuals = self._line.mark()
        if len(counter.products) != len(found.products):
            found.products = []  # the second run differed from the first one
        self._latest = found
        self._clock = now()

    def _stopped(self, found: MeasuredCall) -> None:
        """Record the span until the last residual, where an operator after it begins."""
        found.stopped = self._line.mark()

    def ended(self, span: Span) -> None:
        """Record the span after the latest second run, or after forward."""
        if self._latest is None:
            self.between = span
        else:
            self._latest.after = span
            self._latest.backward_seconds = now() - self._clock
        self._latest = None

    def _noting(self, saved: WeakSet[torch.UntypedStorage]) -> AbstractContextManager[None]:
        """Return a context that puts what is saved for backward into `saved` (See Rule 3)."""
        pair = pair_in_force()
        if pair is None or self._code is None or type(self._code) is BlockCode:
            return nullcontext()
        saved.clear()

        def pack(tensor: Tensor) -> Any:
            saved.update(storages_of((tensor,)))
            return pair[0](tensor)

        return saving(pack, pair[1])

    def _drawn(self) -> int:
        """Return a fingerprint of the random stream; a mark keeps its memory out of the spans."""
        found = fingerprint()
        self._line.mark()
        return found


class _MeasuredCall(Call):
    """A call that reports its second run to the meter."""

    __slots__ = ("_meter", "found", "known", "linked_at", "outputs", "saved")

    found: MeasuredCall

    def __init__(self, meter: _Meter, *args: Any) -> None:
        super().__init__(*args)
        self._meter = meter
        self.linked_at: tuple[int, ...] = ()  # which arguments the call before it returned
        self.known: WeakSet[torch.UntypedStorage] = WeakSet()  # given, and alive before
        self.outputs: State = ()  # of the first run
        self.saved: WeakSet[torch.UntypedStorage] = WeakSet()  # in the first run, by its own code

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        """Run the block; measure a second run."""
        if not self.has_run:
            self.outputs, beside = super().forward(state)
            return self.outputs, beside
        self._meter.run_again(self, lambda: super(_MeasuredCall, self).forward(state)[0], state)
        return (), None


def _bytes_of_changed(module: nn.Module, versions: Sequence[int]) -> int:
    """Return the bytes of the buffers of modules in one that have new versions."""
    before = dict(zip(map(id, module.buffers()), versions, strict=False))
    return sum(
        buffer.nbytes
        for each in module.modules()
        if any(version_of(b) != before.get(id(b)) for b in each.buffers(recurse=False))
        for buffer in each.buffers(recurse=False)
    )


def _bytes_of(tensors: Iterable[Tensor], left_out: Container[torch.UntypedStorage]) -> int:
    """Return the bytes of tensors that are no parameters."""
    return bytes_of((t for t in tensors if not isinstance(t, nn.Parameter)), left_out)


def _attributes_with_a_graph(name: str, module: nn.Module) -> tuple[str, ...]:
    """Return the qualified names of attributes within a block that are tensors with a graph."""
    return tuple(
        ".".join(part for part in (name, inner, key) if part)
        for inner, each in named_modules(module)
        for key, value in vars(each).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    )


_MOST_ROUNDS = 10
_ENOUGH_SECONDS = 2.0  # for all rounds
_NUM_PARTS = 3  # of what may be kept for second runs (See Rule 6)


class Times(NamedTuple):
    """The times of a step, in seconds.

    Args:
        plain: of the step that keeps all residuals.
        again: for each call, what its second run takes, with all that belongs to it.
        shares: for each of the equal parts of what may be kept, the part of its counted work by
            which second runs are shorter where that and all before it is kept; below 0 where
            keeping takes longer.
    """

    plain: float
    again: list[float]
    shares: Sequence[float]


def times_of(
    step: Step,
    blocks: Sequence[Block],
    calls: Sequence[MeasuredCall],
    *,
    has_room: bool,
    plain_seconds: float | None = None,
) -> Times:
    """Time the steps of a model (See Rule 5).

    Args:
        step: the step.
        blocks: the names and modules of the blocks.
        calls: the measured calls of the blocks.
        has_room: whether the plain step may be run (See Rule 8).
        plain_seconds: the time of the plain step, if it is known from other blocks.
    """
    planned = PlannedModel.of(step, blocks, calls)
    runs: list[dict[int, float]] = []  # the seconds of second runs in each step that reads a clock

    @contextmanager
    def noted(index: int) -> Generator[None]:
        begin = now()
        try:  # a second run may end by an exception
            yield
        finally:
            runs[-1][index] = now() - begin  # the later run of a call counts

    def timed(index: int, run: str) -> AbstractContextManager[None]:
        return noted(index) if run in ("first", "again") else nullcontext()

    every_way: list[Way] = ["recompute"] * len(calls)
    again_all = constant([*every_way, "keep"])

    @contextmanager
    def each() -> Generator[None]:
        runs.append({})
        with planned.followed(again_all, timed):
            yield

    # Steps that keep a part of the products are named by its number.
    ways: dict[str | int, Callable[[], AbstractContextManager[Any]]] = {
        "again": partial(planned.followed, again_all), "each": each
    }  # fmt: skip
    if has_room and plain_seconds is None:
        ways["plain"] = nullcontext
    for part in range(1, _NUM_PARTS + 1) if has_room else ():
        chosen = [selection_of_part(call, part, _NUM_PARTS)[0] for call in calls]
        if any(chosen):
            kept = [c if call.until_again else None for c, call in zip(chosen, calls, strict=True)]
            ways[part] = partial(planned.followed, each_alone(kept))
    seconds = _in_turn(step, ways)
    shortest = [min((run[i] for run in runs if i in run), default=0.0) for i in range(len(calls))]
    again = medians_of_alike(calls, shortest)
    sum_again = sum(again)
    if plain_seconds is None:
        plain_seconds = seconds.get("plain", max(seconds["again"] - sum_again, sum_again))
    scale = max(seconds["again"] - plain_seconds, 0.5 * sum_again) / (sum_again or 1.0)
    again = largest_among_ranks(step.model, [scale * each for each in again])
    shares = [_share(part, calls, again, seconds) for part in range(1, _NUM_PARTS + 1)]
    return Times(plain_seconds, again, shares)


def _share(
    part: int,
    calls: Sequence[MeasuredCall],
    again: Sequence[float],
    seconds: Mapping[str | int, float],
) -> float:
    """Return which part of its counted work is saved where a part of all is kept."""
    chosen = [selection_of_part(call, part, _NUM_PARTS)[1] for call in calls]
    fractions = map(saved_fraction, calls, chosen)
    counted = sum(second * saved for second, saved in zip(again, fractions, strict=True))
    if part not in seconds or not counted:
        return 1.0
    return min(max((seconds["again"] - seconds[part]) / counted, -1.0), 1.0)


def _in_turn(
    step: Step, ways: dict[str | int, Callable[[], AbstractContextManager[Any]]]
) -> dict[str | int, float]:
    """Return the shortest time of the step in each way (See Rule 7)."""
    seconds: dict[str | int, float] = {}
    spent = 0.0
    for _ in range(1 if is_without_values() else _MOST_ROUNDS):
        if spent > _ENOUGH_SECONDS:
            break
        for name, entered in list(ways.items()):
            try:
                with entered():
                    taken = seconds_of(step)
            except (ChangedError, ReplayError):
                if isinstance(name, str):
                    raise
                taken = math.inf
            (taken,) = largest_among_ranks(step.model, [taken])
            if not math.isfinite(taken):
                seconds.pop(name, None)
                del ways[name]  # a rehearsal of a plan that keeps products says why
                continue
            seconds[name] = min(taken, seconds.get(name, taken))
            spent += taken
    return seconds


def medians_of_alike(calls: Sequence[MeasuredCall], seconds: Sequence[float]) -> list[float]:
    """Return, for each call, the median of the times of all calls that are like it (See Rule 6)."""
    alike: defaultdict[object, list[float]] = defaultdict(list)
    keys = [(type(c.module), c.state_bytes, c.output_bytes, c.own_bytes) for c in calls]
    for key, taken in zip(keys, seconds, strict=True):
        alike[key].append(taken)
    return [median(alike[key]) for key in keys]
