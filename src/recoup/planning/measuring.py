"""What each block of a model costs, measured in steps that leave no trace.

NOTE [ What is measured ]

Rule 1. In the step that is measured every block is run again in backward from its arguments, so
        measuring takes about as little memory as any plan does, and all of a block shows: its run
        without residuals in forward, its residuals when it is run again, its own backward.
Rule 2. Bytes are those of `measure`, read at the borders of blocks. What is alive at the begin of a
        block and is no argument of a block belongs to the code between blocks.
Rule 3. Work is counted, not clocked, so that a plan is the same on every day and in every process.
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
from recoup.planning.forwards import around, followed
from recoup.planning.linking import Returned
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
    """A training step: forward, loss, backward; on copies of the arguments, that share memory.

    Args:
        model: the model.
        call: what is called, the model itself or something that calls it.
        args: its arguments.
        kwargs: its keyword arguments.
        losses: from what it returns to one scalar or several.
        holds_output: whether what it returns is alive until backward has ended.
        seed: of its draws; None to go on with the streams as they are.
        verification: what its runs are compared with; another step has another one.
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
        """Return a context around runs of it, which leave no trace."""
        return rehearsal(self.model, (self.args, self.kwargs, self.call, self.losses))

    def run(self) -> list[Tensor | None]:
        """Run it; return the gradients of the arguments that require some."""
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
        """Let go of the gradients, so that what was allocated within a timeline ends within it."""
        for parameter in self.model.parameters():
            parameter.grad = None


def seed_all(seed: int) -> None:
    """Seed the streams that a rehearsal puts back: of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed)


@dataclass
class MeasuredCall:
    """What one call of a block cost; spans are of the timeline of the step.

    Args:
        name: the qualified name of the block.
        module: the block.
        is_linked: whether it was given what the call before it returned.
        state_bytes: its arguments, as far as no call before it was given them.
        output_bytes: what it returned.
        work: of one forward, counted.
        before: the span that ends when it begins.
        forward: the span of its forward.
        until_again: the span that ends when backward begins to run it again; None if it did not.
        again: the span of its second run, whose result is alive at the end.
        residuals: the moment after, without the result.
        after: the span after that, until the next second run or the end.
        again_bytes: what its second run returned.
        alive_bytes: of its residuals, what others hold (a cache).
        drawn_bytes: of the random states that a region of it writes down.
        holders: names of attributes within the block that are tensors with a graph.
        products: the costly operators within.
        saved: of each of them, whether what it makes is a residual.
        is_estimated: whether the call was not measured, but is taken to be like another one.
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
        """Bytes of its residuals that are its own."""
        if self.until_again is None:
            return 0
        begin, residuals = self.until_again.end_bytes, self.residuals.end_bytes
        return max(residuals - begin - self.shared_bytes - self.alive_bytes, 0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of what it returns that its own residuals hold."""
        return max(self.again_bytes - (self.again.end_bytes - self.residuals.end_bytes), 0)


@dataclass
class Measured:
    """A step, call by call.

    Args:
        calls: in the order of forward.
        between: the span from the end of the last call to the first second run.
        outcome: what the step left.
    """

    calls: list[MeasuredCall] = field(default_factory=list[MeasuredCall])
    between: Span = field(default_factory=Span)
    outcome: Outcome | None = None


def measure_blocks(
    step: Step,
    blocks: Iterable[Block],
    device: torch.device,
) -> Measured:
    """Measure a step in which each block is run again (See Rule 1).

    Args:
        step: the step.
        blocks: names and modules.
        device: where bytes are counted.
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
    """Run a step of a model that follows no plan, and return what it left."""
    with step.rehearsed():
        return outcome_of(step.model, step.run())


def peak_of(step: Step, device: torch.device) -> int:
    """Return the peak of a step of a model that follows a plan, on the rank on which it is largest.

    Raises:
        DifferentStepError: on some rank it does not compute what the plain step does.
    """
    with step.rehearsed(), timeline(device) as line:
        gradients = step.run()
        ran = line.mark()  # what is compared takes memory, too
        difference = step.verification.difference(outcome_of(step.model, gradients))
        del gradients
        step.forget()
    found = [ran.peak_bytes, float(difference is not None)]
    peak_bytes, is_different = largest_among_ranks(step.model, found)
    if is_different:
        raise DifferentStepError(difference or "On another rank, a planned step differs.")
    return int(peak_bytes)


def seconds_of(step: Step) -> float:
    """Return the time of a step of a model as it is, which has run before."""
    with step.rehearsed():
        begin = time.perf_counter()
        step.run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() - begin


class _Meter:
    """The follower of all blocks."""

    def __init__(
        self,
        names: dict[int, str],
        weights: set[int],
        given: Sequence[Tensor],
        line: Timeline,
        state_bytes: int,
    ) -> None:
        self.measured = Measured()
        self._state_bytes = state_bytes  # of a random state
        self._names = names
        self._around = around()
        self._line = line
        self._returned = Returned(())
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._know(given)  # alive before the step
        self._weights = weights
        self._latest: MeasuredCall | None = None  # whose second run was the last

    def called(
        self, module: nn.Module, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block between two moments."""
        if self._around != around() or is_in_backward():
            return run(*args, **kwargs)  # a checkpoint of others runs it, and will again
        calls = self.measured.calls
        name = self._names[id(module)]
        call = _MeasuredCall(self, len(calls), f"block `{name}`", run, args, kwargs, module)
        given = call.state
        taken = self._storages(given)
        at, _ = self._returned.places_in(given, module)
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
        if not is_compiled(module):  # one operator as far as anybody outside can see
            found.products = counter.products
        outputs = call.take_outputs()
        found.output_bytes = self._bytes_of(outputs, taken)
        found.alive_bytes = counter.alive_bytes(taken | self._storages(outputs) | self._weights)
        found.holders = _attributes_with_a_graph(name, module)
        self._returned = Returned(outputs)
        return output

    def second_run_begins(self, place: int) -> MeasuredCall:
        """Take the span until now."""
        span = self._line.mark()
        self._ended(span)
        found = self.measured.calls[place]
        found.until_again = span
        return found

    def second_run_ended(self, found: MeasuredCall, outputs: list[Tensor], given: State) -> None:
        """Take the span of the second run, and the moment after; `outputs` is emptied."""
        found.again = self._line.mark()
        found.again_bytes = self._bytes_of(outputs, self._storages(given))
        outputs.clear()
        found.residuals = self._line.mark()
        self._latest = found

    def step_ended(self) -> None:
        """Take the last span."""
        self._ended(self._line.mark())

    def _ended(self, span: Span) -> None:
        if self._latest is None:
            self.measured.between = span
        else:
            self._latest.after = span
        self._latest = None

    def _drawn(self) -> int:
        """Return what tells where the random stream is; what that allocates is in no span."""
        found = fingerprint()
        self._line.mark()
        return found

    def _fresh_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of tensors that no call was given before; parameters have none."""
        # Another storage may have the address of one that is gone.
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
    """A call that says when it runs again."""

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
        """Run between two moments, if it runs again."""
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
        """Return what the first run returned, and forget it."""
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
