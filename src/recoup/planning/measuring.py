"""Measurement of the blocks of a model, in training steps that leave no trace.

NOTE [ Measured steps ]

Rule 1. The measured step recomputes every block in backward from its arguments. So measuring takes
        about as little memory as any plan, and shows each phase of a block by itself: the run
        without residuals in forward, the recomputation with residuals, and the backward.
Rule 2. Bytes are counted as `measure` counts them, and read where blocks begin and end. Memory that
        is alive at the beginning of a block and is no argument of a block is attributed to the code
        between blocks.
Rule 3. Work is counted, not timed, so that every process arrives at the same plan; that of backward
        is counted with that of the step. Compiled code does not run while work is counted, so of a
        step with any, only second runs are counted. What it saves no count shows, so plans over
        compiled blocks time all codes of a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from recoup._core.call import Call, run_again
from recoup._core.compile import is_compiled
from recoup._core.generators import fingerprint
from recoup._core.pytree import flatten
from recoup._core.saved_tensors import is_in_backward
from recoup._core.stage import State
from recoup._core.storage_tracking import bytes_of, storages_of
from recoup.memory.timeline import Span, Timeline, timeline
from recoup.planning.blocks import Block
from recoup.planning.compiling import BlockCode
from recoup.planning.forwards import CallOutputs, enclosing_checkpoints, followed
from recoup.planning.step import Step
from recoup.planning.verification import (
    Outcome,
    outcome_of,
)
from recoup.planning.work import Product, WorkCounter

__all__ = ["Measured", "MeasuredCall", "measure_blocks"]

Run = Callable[..., Any]


@dataclass
class MeasuredCall:
    """The measured costs of one call of a block; spans are those of the timeline of the step.

    Args:
        name: the qualified name of the block.
        module: the block.
        is_linked: whether one of its arguments is an output of the call before it.
        state_bytes: bytes of its arguments (of the linked ones, if there are some), except those
            that an earlier call was given.
        output_bytes: bytes of its output.
        work: the counted work of one forward.
        before: the span that ends when the call begins.
        forward: the span of its forward.
        until_again: the span that ends when its second run begins in backward; None if there is no
            second run.
        again: the span of its second run, at the end of which its output is alive.
        residuals: the span that ends when that output has been freed.
        after: the span from there to the next second run, or to the end.
        again_bytes: bytes of the output of its second run.
        alive_bytes: bytes of its residuals that other code holds (a cache).
        drawn_bytes: bytes of the random states that its recomputation needs.
        holders: names of attributes within the block that are tensors with a graph.
        products: the costly operators in its forward.
        saved: for each of them, whether its output is a residual.
        is_invertible: whether its input can be made from its output, by `inverse` of the block.
        is_estimated: whether the call was not measured, but is estimated from another one.
        again_seconds: the time of its second run.
        backward_seconds: the time from there to the next second run, or to the end.
        codes: the code of each tape of the cost of the call; none if all are the block's own.
        code_again: the code of the call if it is run again.
    """

    name: str
    module: nn.Module
    is_linked: bool
    state_bytes: int
    output_bytes: int = 0
    work: float = 0.0
    before: Span = field(default_factory=Span)
    forward: Span = field(default_factory=Span)
    until_again: Span | None = None
    again: Span = field(default_factory=Span)
    residuals: Span = field(default_factory=Span)
    after: Span = field(default_factory=Span)
    again_bytes: int = 0
    alive_bytes: int = 0
    drawn_bytes: int = 0
    holders: tuple[str, ...] = ()
    products: list[Product] = field(default_factory=list[Product])
    saved: list[bool] = field(default_factory=list[bool])
    is_invertible: bool = False
    is_estimated: bool = False
    again_seconds: float = 0.0
    backward_seconds: float = 0.0
    codes: tuple[BlockCode, ...] = ()
    code_again: BlockCode | None = None

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
        between: the span from the end of the last call to the first second run.
        work: the counted work of the step without second runs, as of one that keeps all residuals;
            None if it was not counted (See Rule 3).
        outcome: the outcome of the step.
    """

    calls: list[MeasuredCall] = field(default_factory=list[MeasuredCall])
    between: Span = field(default_factory=Span)
    work: float | None = None
    outcome: Outcome | None = None


def measure_blocks(
    step: Step,
    blocks: Iterable[Block],
    device: torch.device,
    code: BlockCode | None = None,
) -> Measured:
    """Measure a step in which each block is recomputed (See Rule 1).

    Args:
        step: the step.
        blocks: the names and modules of the blocks.
        device: the device whose bytes are counted.
        code: the code that the blocks run by; it is timed, and its work is not counted (See
            Rule 3). None to count the work of the blocks' own.
    """
    blocks = list(blocks)
    state_bytes = 0 if device.type == "cuda" else torch.get_rng_state().nbytes
    with step.rehearsed(), timeline(device) as line:
        names = {id(module): name for name, module in blocks}
        meter = _Meter(step, names, line, state_bytes, code)
        counter = meter.counter()
        is_counted = code is None and not any(map(is_compiled, step.model.modules()))
        counting = counter.counting() if is_counted else nullcontext()
        with followed([module for _, module in blocks], meter), counting:
            gradients = step.run()
        meter.step_ended()
        if is_counted:
            meter.measured.work = counter.work - meter.work_again
        meter.measured.outcome = outcome_of(step.model, gradients)
        step.forget()
    return meter.measured


class _Meter:
    """The follower that measures all blocks."""

    def __init__(
        self,
        step: Step,
        names: dict[int, str],
        line: Timeline,
        state_bytes: int,
        code: BlockCode | None,
    ) -> None:
        self.measured = Measured()
        self.work_again = 0.0  # of second runs
        self._code = code
        self._clock = 0.0  # at the end of the latest second run
        self._state_bytes = state_bytes  # bytes of a random state
        self._names = names
        self._checkpoints = enclosing_checkpoints()
        self._line = line
        self._returned = CallOutputs(())
        # Storages that are alive before the step, or that a call was given.
        self._known = WeakSet(storages_of(flatten((step.args, step.kwargs))[0]))
        self._weights = WeakSet(storages_of((*step.model.parameters(), *step.model.buffers())))
        self._latest: MeasuredCall | None = None  # the call whose second run was the last

    def called(
        self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block, and measure it."""
        if self._checkpoints != enclosing_checkpoints() or is_in_backward():
            return run(*args, **kwargs)  # a checkpoint of another library recomputes it
        calls = self.measured.calls
        name = self._names[id(module)]
        if self._code is not None:
            run = self._code.of_call(module, run)
        call = _MeasuredCall(self, len(calls), f"block `{name}`", run, args, kwargs, module)
        given = call.state
        taken = WeakSet(storages_of(given))
        at, _ = self._returned.indices_in(given, module)
        linked = tuple(given[place] for place in at)
        found = MeasuredCall(name, module, bool(at), _bytes_of(linked or given, self._known))
        self._known.update(storages_of(linked or given))
        found.is_invertible = call.is_invertible_from(at)
        calls.append(found)
        found.before = self._line.mark()
        drawn_before = self._drawn()
        counter = self.counter()
        with counter.counting():
            output = run_again(call, stops=False)
        found.forward = self._line.mark()
        found.drawn_bytes = self._state_bytes if self._drawn() != drawn_before else 0
        found.work = counter.work
        if self._code is None and not is_compiled(module):  # else nothing can be intercepted
            found.products = counter.products
        outputs = call.take_outputs()
        found.output_bytes = _bytes_of(outputs, taken)
        taken.update(storages_of(outputs))
        found.alive_bytes = counter.alive_bytes(taken | self._weights)
        found.holders = _attributes_with_a_graph(name, module)
        self._returned = CallOutputs(outputs)
        return output

    def counter(self) -> WorkCounter:
        """Return a counter of a run."""
        return WorkCounter(counts_operators=self._code is None)

    def second_run_begins(self, place: int) -> MeasuredCall:
        """Record the span until now, and return the call that runs again."""
        span = self._line.mark()
        self._ended(span)
        found = self.measured.calls[place]
        found.until_again = span
        self._clock = self._now()
        return found

    def second_run_ended(self, found: MeasuredCall, outputs: list[Tensor], given: State) -> None:
        """Record the span of the second run and the one after; empties `outputs`."""
        begin, self._clock = self._clock, self._now()
        found.again_seconds = self._clock - begin
        found.again = self._line.mark()
        found.again_bytes = _bytes_of(outputs, set(storages_of(given)))
        outputs.clear()
        found.residuals = self._line.mark()
        self._latest = found
        self._clock = self._now()

    def step_ended(self) -> None:
        """Record the last span."""
        self._ended(self._line.mark())

    def _ended(self, span: Span) -> None:
        if self._latest is None:
            self.measured.between = span
        else:
            self._latest.after = span
            self._latest.backward_seconds = self._now() - self._clock
        self._latest = None

    def _now(self) -> float:
        if self._code is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def _drawn(self) -> int:
        """Return a fingerprint of the random stream; a mark keeps its memory out of the spans."""
        found = fingerprint()
        self._line.mark()
        return found


class _MeasuredCall(Call):
    """A call that reports its second run to the meter."""

    __slots__ = ("_meter", "_place", "outputs")

    def __init__(
        self,
        meter: _Meter,
        place: int,
        name: str,
        run: Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module,
    ) -> None:
        super().__init__(name, run, args, kwargs, module)
        self._meter = meter
        self._place = place
        self.outputs: State | None = None

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        """Run the block; measure a second run."""
        if not self.has_run:
            self.outputs, beside = super().forward(state)
            return self.outputs, beside
        found = self._meter.second_run_begins(self._place)
        counter = self._meter.counter()
        with counter.counting():
            outputs = list(super().forward(state)[0])
        self._meter.work_again += counter.work
        self._meter.second_run_ended(found, outputs, state)
        found.saved = counter.products_alive() if found.products else []
        return (), None

    def take_outputs(self) -> State:
        """Return the outputs of the first run, and release them."""
        outputs, self.outputs = self.outputs, None
        return outputs or ()


def _bytes_of(tensors: Iterable[Tensor], left_out: Container[torch.UntypedStorage]) -> int:
    """Return the bytes of tensors that are no parameters."""
    return bytes_of((t for t in tensors if not isinstance(t, nn.Parameter)), left_out)


def _attributes_with_a_graph(name: str, module: nn.Module) -> tuple[str, ...]:
    """Return the qualified names of attributes within a block that are tensors with a graph."""
    return tuple(
        ".".join(part for part in (name, inner, key) if part)
        for inner, each in cast("Iterator[Block]", module.named_modules())
        for key, value in vars(each).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    )
