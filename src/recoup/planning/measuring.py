"""Measurement of the blocks of a model, in training steps that leave no trace.

NOTE [ Measured steps ]

Rule 1. The measured step recomputes every block in backward from its arguments. So measuring takes
        about as little memory as any plan, and shows each phase of a block by itself: the run
        without residuals in forward, the recomputation with residuals, and the backward.
Rule 2. Bytes are counted as `measure` counts them, and read where blocks begin and end. Memory that
        is alive at the beginning of a block and is no argument of a block is attributed to the code
        between blocks.
Rule 3. Work is counted, not timed, so that every process arrives at the same plan.
"""

from __future__ import annotations

import random
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.call import Call, run_again
from recoup._core.compile import is_compiled
from recoup._core.pytree import flatten
from recoup._core.rng import fingerprint
from recoup._core.saved_tensors import grad_mode, is_in_backward, storage_of
from recoup._core.snapshots import copied
from recoup._core.stage import State
from recoup.memory.timeline import Span, Timeline, timeline
from recoup.planning.blocks import Block
from recoup.planning.forwards import CallOutputs, enclosing_checkpoints, followed
from recoup.planning.ranks import largest_among_ranks
from recoup.planning.rehearsal import backward_within_model, rehearsal
from recoup.planning.verification import (
    DifferentStepError,
    Outcome,
    Verification,
    outcome_of,
)
from recoup.planning.work import Product, WorkCounter

__all__ = [
    "Measured",
    "MeasuredCall",
    "Step",
    "measure_blocks",
    "peak_of",
    "plain_outcome",
    "seconds_of",
    "seed_all",
]

Run = Callable[..., Any]


@dataclass(frozen=True)
class Step:
    """A training step (forward, loss, backward) on copies of the arguments that share their memory.

    Args:
        model: the model.
        call: the model itself, or a function that calls it.
        args: its arguments.
        kwargs: its keyword arguments.
        losses: a function from its output to one scalar or several.
        holds_output: whether the output is alive until backward has ended.
        seed: the seed of its random draws; None to leave the random streams as they are.
        verification: the comparison of its runs with an expected outcome; each step has its own.
    """

    model: nn.Module
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    losses: Callable[[Any], Sequence[Tensor]]
    holds_output: bool = True
    seed: int | None = None
    verification: Verification = field(default_factory=Verification, init=False)

    def rehearsed(self) -> AbstractContextManager[None]:
        """Return a context in which runs of the step leave no trace."""
        return rehearsal(self.model, (self.args, self.kwargs, self.call, self.losses))

    def run(self) -> list[Tensor | None]:
        """Run the step, and return the gradients of the arguments that require them."""
        args, kwargs = copied((self.args, self.kwargs))
        given = [t for t in flatten((args, kwargs))[0] if t.requires_grad and t.is_leaf]
        if self.seed is not None:
            seed_all(self.seed)
        with grad_mode(True):
            output = self.call(*args, **kwargs)
            losses = self.losses(output)
            if not self.holds_output:
                output = None
            gradients = backward_within_model(self.model, losses)
        del output
        return [gradients.get(id(value)) for value in given]

    def forget(self) -> None:
        """Free the gradients, so that memory allocated within a timeline is freed within it."""
        for parameter in self.model.parameters():
            parameter.grad = None


def seed_all(seed: int) -> None:
    """Seed the random streams that a rehearsal restores: those of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed)


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
        is_estimated: whether the call was not measured, but is estimated from another one.
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
    is_estimated: bool = False

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
        outcome: the outcome of the step.
    """

    calls: list[MeasuredCall] = field(default_factory=list[MeasuredCall])
    between: Span = field(default_factory=Span)
    outcome: Outcome | None = None


def measure_blocks(
    step: Step,
    blocks: Iterable[Block],
    device: torch.device,
) -> Measured:
    """Measure a step in which each block is recomputed (See Rule 1).

    Args:
        step: the step.
        blocks: the names and modules of the blocks.
        device: the device whose bytes are counted.
    """
    blocks = list(blocks)
    state_bytes = 0 if device.type == "cuda" else torch.get_rng_state().nbytes
    with step.rehearsed(), timeline(device) as line:
        names = {id(module): name for name, module in blocks}
        own = (*step.model.parameters(), *step.model.buffers())
        weights = set(map(storage_of, own))
        meter = _Meter(names, weights, flatten((step.args, step.kwargs))[0], line, state_bytes)
        with followed([module for _, module in blocks], meter):
            gradients = step.run()
        meter.step_ended()
        meter.measured.outcome = outcome_of(step.model, gradients)
        step.forget()
    return meter.measured


def plain_outcome(step: Step) -> Outcome:
    """Run a step of a model that follows no plan, and return its outcome."""
    with step.rehearsed():
        return outcome_of(step.model, step.run())


def peak_of(step: Step, device: torch.device) -> int:
    """Return the peak of a step of a model that follows a plan, on the rank on which it is largest.

    Raises:
        DifferentStepError: on some rank the outcome differs from that of the plain step.
    """
    with step.rehearsed(), timeline(device) as line:
        gradients = step.run()
        ran = line.mark()  # before the comparison, which takes memory, too
        difference = step.verification.difference(outcome_of(step.model, gradients))
        del gradients
        step.forget()
    found = [ran.peak_bytes, float(difference is not None)]
    peak_bytes, is_different = largest_among_ranks(step.model, found)
    if is_different:
        raise DifferentStepError(difference or "On another rank, a planned step differs.")
    return int(peak_bytes)


def seconds_of(step: Step) -> float:
    """Return the seconds of a step of the model, which must have run once before."""
    with step.rehearsed():
        begin = time.perf_counter()
        step.run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() - begin


class _Meter:
    """The follower that measures all blocks."""

    def __init__(
        self,
        names: dict[int, str],
        weights: set[int],
        given: Sequence[Tensor],
        line: Timeline,
        state_bytes: int,
    ) -> None:
        self.measured = Measured()
        self._state_bytes = state_bytes  # bytes of a random state
        self._names = names
        self._checkpoints = enclosing_checkpoints()
        self._line = line
        self._returned = CallOutputs(())
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._know(given)  # alive before the step
        self._weights = weights
        self._latest: MeasuredCall | None = None  # the call whose second run was the last

    def called(
        self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block, and measure it."""
        if self._checkpoints != enclosing_checkpoints() or is_in_backward():
            return run(*args, **kwargs)  # a checkpoint of another library recomputes it
        calls = self.measured.calls
        name = self._names[id(module)]
        call = _MeasuredCall(self, len(calls), f"block `{name}`", run, args, kwargs, module)
        given = call.state
        taken = self._storages(given)
        at, _ = self._returned.indices_in(given, module)
        linked = tuple(given[place] for place in at)
        found = MeasuredCall(name, module, bool(at), self._fresh_bytes(linked or given))
        calls.append(found)
        found.before = self._line.mark()
        drawn_before = self._drawn()
        counter = WorkCounter()
        with counter.counting():
            output = run_again(call, stops=False)
        found.forward = self._line.mark()
        found.drawn_bytes = self._state_bytes if self._drawn() != drawn_before else 0
        found.work = counter.work
        if not is_compiled(module):  # else its operators cannot be intercepted one by one
            found.products = counter.products
        outputs = call.take_outputs()
        found.output_bytes = self._bytes_of(outputs, taken)
        found.alive_bytes = counter.alive_bytes(taken | self._storages(outputs) | self._weights)
        found.holders = _attributes_with_a_graph(name, module)
        self._returned = CallOutputs(outputs)
        return output

    def second_run_begins(self, place: int) -> MeasuredCall:
        """Record the span until now, and return the call that runs again."""
        span = self._line.mark()
        self._ended(span)
        found = self.measured.calls[place]
        found.until_again = span
        return found

    def second_run_ended(self, found: MeasuredCall, outputs: list[Tensor], given: State) -> None:
        """Record the span of the second run and the one after; empties `outputs`."""
        found.again = self._line.mark()
        found.again_bytes = self._bytes_of(outputs, self._storages(given))
        outputs.clear()
        found.residuals = self._line.mark()
        self._latest = found

    def step_ended(self) -> None:
        """Record the last span."""
        self._ended(self._line.mark())

    def _ended(self, span: Span) -> None:
        if self._latest is None:
            self.measured.between = span
        else:
            self._latest.after = span
        self._latest = None

    def _drawn(self) -> int:
        """Return a fingerprint of the random stream; a mark keeps its memory out of the spans."""
        found = fingerprint()
        self._line.mark()
        return found

    def _fresh_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the bytes of tensors that no earlier call was given, parameters excluded."""
        # A new storage may have the address of one that was freed.
        known = {key for key, storage in self._known.items() if storage() is not None}
        num_bytes = self._bytes_of(tensors, known)
        self._know(tensors)
        return num_bytes

    def _know(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if key := storage_of(tensor):
                self._known[key] = weakref.ref(tensor.untyped_storage())

    def _storages(self, tensors: Sequence[Tensor]) -> set[int]:
        return set(map(storage_of, tensors))

    def _bytes_of(self, tensors: Sequence[Tensor], left_out: set[int]) -> int:
        found = {storage_of(t): t for t in tensors if not isinstance(t, nn.Parameter)}
        return sum(
            tensor.untyped_storage().nbytes()
            for key, tensor in found.items()
            if key and key not in left_out
        )


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
        counter = WorkCounter()
        with counter.counting():
            outputs = list(super().forward(state)[0])
        self._meter.second_run_ended(found, outputs, state)
        found.saved = counter.products_alive() if found.products else []
        return (), None

    def take_outputs(self) -> State:
        """Return the outputs of the first run, and release them."""
        outputs, self.outputs = self.outputs, None
        return outputs or ()


def _attributes_with_a_graph(name: str, module: nn.Module) -> tuple[str, ...]:
    """Return the qualified names of attributes within a block that are tensors with a graph."""
    return tuple(
        ".".join(part for part in (name, inner, key) if part)
        for inner, each in cast("Iterator[Block]", module.named_modules())
        for key, value in vars(each).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    )
