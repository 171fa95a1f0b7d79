"""Training steps of a model that leave no trace, alike on all ranks that hold parts of it.

NOTE [ One decision on all ranks ]

Rule 1. The collectives of one rank wait for those of the others. A rank that rehearsed a different
        plan, or one plan more than the others, would wait forever.
Rule 2. Every decision that depends on measurements uses the largest number that any rank measured.
        So all ranks decide alike, and a plan keeps to its budget on all of them.
Rule 3. The backend may free a buffer in a thread of its own, a moment after the collective has
        ended. The allocator does not report this, and the buffer counts until the step ends.
        So a rehearsal that exceeded the budget is repeated a few times, and the least peak counts.
Rule 4. A block whose forward has collectives (tensor parallelism) repeats them where it runs again.
        Their time is in the measured times of the block, if there is a network to measure. FSDP2
        gathers outside of blocks, for backward in any case.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recoup._core.compile import is_compiled
from recoup._core.devices import Peaks, accelerator, is_accelerator, seed_generators, synchronize
from recoup._core.operators import InMode, explain_higher_order
from recoup._core.pytree import flatten
from recoup._core.saved_tensors import grad_mode, saving
from recoup._core.tensors import is_without_values
from recoup.memory.meter import Span, Timeline, most_of, timeline
from recoup.planning.arguments import explain_model
from recoup.planning.blocks import Block
from recoup.planning.forwards import Args, Kwargs, followed
from recoup.planning.rehearsal import (
    Undo,
    WriteWatch,
    foreign_leaves,
    rehearsal,
    restoring,
    without_gradients,
)
from recoup.planning.tiled_head import TiledHead
from recoup.planning.verification import DifferentStepError, Outcome, Verification, outcome_of
from recoup.planning.work import counted_seconds, timed_by_work
from recoup.schedules import Cost


class Observer:
    """What is called around the modules of a forward, without gradients."""

    def begins(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        """Do what is to be done before a call."""

    def ends(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any) -> None:
        """Do what is to be done after a call."""


AnyObserver = TypeVar("AnyObserver", bound=Observer)


@dataclass(frozen=True)
class Step:
    """A training step (forward, loss, backward) on copies of the arguments that share their memory.

    Args:
        model: the model.
        call: the model itself, or a function that calls it.
        args: its arguments.
        kwargs: its keyword arguments.
        losses: a function from the outputs of all calls to one scalar or several.
        holds_output: whether the outputs are alive until backward has ended.
        num_forwards: how often it is called before backward, with the same arguments.
        seed: the seed of its random draws, which are the same in each run of it.
        tiled: the output layer of the model, if it runs in tiles; None if not.
        written: the parameters that its forward writes to, which rehearsals restore.
        verification: the comparison of its runs with an expected outcome; each step has its own.
    """

    model: nn.Module
    call: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    losses: Callable[[Sequence[Any]], Sequence[Tensor]]
    holds_output: bool = True
    num_forwards: int = 1
    seed: int = field(default_factory=torch.initial_seed)
    tiled: TiledHead | None = None
    written: tuple[nn.Parameter, ...] = ()
    verification: Verification = field(default_factory=Verification, init=False)

    def __post_init__(self) -> None:
        if self.tiled is not None:
            self.verification.allow_other_sums(self.tiled.eps)

    @property
    def device(self) -> torch.device:
        """The device whose bytes are counted."""
        return device_of(self.model)

    @property
    def root(self) -> nn.Module | None:
        """The model, if the step calls nothing else."""
        return self.model if self.call is self.model else None

    def rehearsed(self) -> AbstractContextManager[None]:
        """Return a context in which runs of the step leave no trace."""
        return self._restoring([restoring(parameter) for parameter in self.written])

    @contextmanager
    def counted(self, line: Timeline) -> Generator[Timeline]:
        """Return a context in which a run leaves no trace, and a timeline counts its bytes.

        The gradients are freed at its end: memory allocated within a timeline is freed within it.
        """
        _take_workspaces(self.device)
        with self.rehearsed(), line:
            yield line
            for parameter in self.model.parameters():
                parameter.grad = None

    def knowing_writes(self) -> Step:
        """Run a forward, and return the step with the parameters that it writes to."""
        if any(map(is_compiled, self.model.modules())):
            return self  # the compiler gives up what it meets under a dispatch mode
        watch = WriteWatch(self.model)
        with self._restoring(watch.undo), suppress(Exception), InMode(watch):
            self.observe_forward((), Observer)  # if it fails, so will the measured step
        return replace(self, written=tuple(watch.written))

    def _restoring(self, undo: list[Undo]) -> AbstractContextManager[None]:
        return rehearsal(self.model, (self.args, self.kwargs, self.call, self.losses), undo)

    def unwritten(self, blocks: Sequence[Block]) -> list[Block]:
        """Return the blocks that may run again: forward writes to none of their parameters."""
        written = set(map(id, self.written))
        return [each for each in blocks if written.isdisjoint(map(id, each[1].parameters()))]

    def explain_writes(self) -> str | None:
        """Return why no blocks may run again, if forward writes to parameters."""
        if not self.written:
            return None
        written = set(map(id, self.written))
        names = [f"`{name}`" for name, p in self.model.named_parameters() if id(p) in written]
        return (
            f"The forward writes to parameters ({', '.join(names[:3])}), and would do so again. If "
            "only the first one does (a data-dependent initialization), run a forward "
            "before recoup.plan; otherwise make them buffers, which count once."
        )

    def run(
        self, mark: Callable[[], object] = bool, between: Callable[[], object] = bool
    ) -> list[Tensor | None]:
        """Run the step, and return the gradients of the arguments that require them.

        `mark` is called at the beginning and the end of forward, and of backward, and `between`
        before backward.
        """
        calls = self._calls()
        given = [t for t in flatten(calls[0])[0] if t.requires_grad and t.is_leaf]
        _seed_all(self.seed)
        parts = nullcontext() if self.tiled is None else followed([self.tiled.module], self.tiled)
        clock = timed_by_work() if is_without_values() else nullcontext()
        with grad_mode(True), parts, clock:
            mark()
            outputs = self._outputs_of(calls)
            losses = self.losses(outputs)
            mark()
            if not self.holds_output:
                outputs.clear()
            torch.clear_autocast_cache()  # as a training loop does: it leaves autocast here
            between()
            with without_gradients(foreign_leaves(self.model, losses)) as leaves:
                mark()
                try:
                    torch.autograd.backward(losses)
                except Exception as error:
                    explain_higher_order(f"The backward of a {type(self.model).__name__}", error)
                    raise
                mark()
                gradients = {id(leaf): leaf.grad for leaf in leaves}
        del outputs
        return [gradients.get(id(value)) for value in given]

    def observe_forward(
        self, modules: Iterable[nn.Module], observing: Callable[[], AnyObserver]
    ) -> AnyObserver:
        """Run a forward of the step, and return an observer, newly made, of the calls of modules.

        There is a graph, which a forward may ask for (hooks of tensors), but nothing is kept for
        its backward. A forward that fails so runs a backward of its own (forces): it is run once
        more with all that it keeps.
        """
        modules = list(modules)
        with suppress(Exception), saving(_NotKept):
            return self._observed(modules, observing())
        return self._observed(modules, observing())

    def _observed(self, modules: list[nn.Module], observer: AnyObserver) -> AnyObserver:
        quiet: Any = torch.no_grad()
        begins, ends = quiet(observer.begins), quiet(observer.ends)
        with grad_mode(True), ExitStack() as hooks:
            for module in modules:
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # it takes no hooks
                for handle in (
                    module.register_forward_pre_hook(begins, with_kwargs=True),
                    module.register_forward_hook(ends, with_kwargs=True),
                ):
                    hooks.callback(handle.remove)
            calls = self._calls()
            _seed_all(self.seed)
            self._outputs_of(calls)
        return observer

    def _outputs_of(self, calls: list[tuple[Args, Kwargs]]) -> list[Any]:
        try:
            return [self.call(*args, **kwargs) for args, kwargs in calls]
        except Exception as error:
            explain_higher_order(f"A {type(self.model).__name__}", error)
            if self.root is not None:
                explain_model(self.root, *calls[0], error)
            raise

    def _calls(self) -> list[tuple[Args, Kwargs]]:
        """Return the arguments of each call, with tensors without their history.

        A leaf that requires a gradient stays itself: a loss may ask for its gradient (forces). Each
        call has containers of its own: a model may write its output into a dict that it got.
        """
        tensors, tree = flatten((self.args, self.kwargs))
        # A tensor that is there twice is one tensor: code may ask (an attention does).
        own = {
            id(t): t if t.requires_grad and t.is_leaf
            else t.detach().requires_grad_(t.requires_grad)
            for t in tensors
        }  # fmt: skip
        copies = tuple(own[id(t)] for t in tensors)
        return [tree.unflatten(copies) for _ in range(self.num_forwards)]


class Rehearsed(NamedTuple):
    """What a step of a model took and made.

    Args:
        peak_bytes: its peak, on the rank on which it is largest.
        held_bytes: the bytes that its forwards held when its backward began, likewise.
        outcome: its outcome.
        peaks: its peak as it was requested, allocated and reserved, likewise.
    """

    peak_bytes: int
    held_bytes: int
    outcome: Outcome
    peaks: Peaks


def rehearse(step: Step) -> Rehearsed:
    """Run a step of a model that follows a plan, or none."""
    with step.counted(timeline(step.device)) as line:
        marks: list[Span] = []
        gradients = step.run(between=lambda: marks.append(line.mark()))
        marks.append(line.mark())  # before the outcome is summed up, which takes memory, too
        outcome = outcome_of(step.model, gradients, step.written)
        del gradients
    own = most_of(marks)
    found = [own.requested, own.allocated, own.reserved or 0, marks[0].end_bytes]
    requested, peak, reserved, held = map(int, largest_among_ranks(step.model, found))
    peaks = Peaks(requested, peak, None if own.reserved is None else reserved)
    return Rehearsed(peak, held, outcome, peaks)


def rehearse_planned(step: Step, tolerance: float = 0.0) -> Rehearsed:
    """Run a step of a model that follows a plan, and compare its outcome with the expected one.

    Inverses may make gradients differ by the tolerance, relative. A DifferentStepError says that
    the outcome differs on some rank.
    """
    found = rehearse(step)
    difference = step.verification.difference(found.outcome, tolerance)
    if on_any_rank(step.model, difference is not None):
        raise DifferentStepError(difference or "On another rank, a planned step differs.")
    return found


def _take_workspaces(device: torch.device) -> None:
    """Let libraries of a device take the memory that they hold from their first product on.

    A thread has its own, and backward runs in another one than forward: 32 MiB each on an H200.
    """
    if is_accelerator(device) and not is_without_values():
        with grad_mode(True):
            x = torch.zeros(16, 16, device=device, requires_grad=True)
            torch.autograd.grad((x @ x).sum(), x)


def seconds_of(step: Step) -> float:
    """Return the seconds of a step of the model, which must have run once before."""
    marks: list[float] = []
    with step.rehearsed():
        step.run(lambda: marks.append(now()))
    begin, end, backward_begins, backward_ends = marks
    return end - begin + backward_ends - backward_begins


def now() -> float:
    """Return a clock in seconds, when all that was asked of an accelerator is done.

    Without one, that is the time of this thread, which works or waits for its kernels: other
    programs do not count.
    """
    if is_without_values():
        return counted_seconds()
    device = accelerator()
    if device is None:
        return time.thread_time()
    synchronize(device)
    return time.perf_counter()


def device_of(model: nn.Module) -> torch.device:
    """Return the device whose bytes are counted: the accelerator that a part of a model is on."""
    for tensor in (*model.parameters(), *model.buffers()):
        if is_accelerator(tensor.device):
            return tensor.device
    return torch.device("cpu")


class _NotKept:
    """What autograd holds in a forward that is observed: there is no backward."""

    def __init__(self, tensor: Tensor) -> None:
        del tensor

    def get(self) -> Tensor:
        raise ValueError("Nothing is kept in this forward, so that no backward can run in it.")


def _seed_all(seed: int) -> None:
    """Seed the random streams that a rehearsal restores: those of torch, Python and numpy."""
    seed_generators(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed % 2**32)


# -- ranks -----------------------------------------------------------------------------------------


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of `model`."""
    return bool(_meshes_of(model))


def largest_among_ranks(model: nn.Module, numbers: Sequence[float]) -> list[float]:
    """Return the largest of each of `numbers` among the ranks that hold parts of `model`."""
    meshes = _meshes_of(model)
    if not meshes:
        return list(numbers)
    found = torch.tensor(list(numbers), dtype=torch.float64, device="cpu")
    for mesh in meshes:
        moved = found.to(mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(moved, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        found = moved.cpu()
    return [float(number) for number in found]


def on_any_rank(model: nn.Module, condition: bool) -> bool:
    """Whether a condition holds on any of these ranks."""
    return largest_among_ranks(model, [float(condition)]) != [0.0]


def largest_costs_among_ranks(model: nn.Module, costs: Sequence[Cost]) -> list[Cost]:
    """Return the largest costs among the ranks that hold parts of `model`.

    If the ranks found different variants or results of stages, all of them are left out.
    """
    found = [tuple(costs)]
    for mesh in _meshes_of(model):
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, found, group=group)
            found = [each for several in gathered for each in several]
    if len({tuple((len(c.variants), len(c.results)) for c in each) for each in found}) > 1:
        found = [tuple(replace(c, variants=(), results=()) for c in each) for each in found]
    if len(found) > 1:  # one may end a run where it need not, or hold its input, on one rank alone
        found = [tuple(map(_with_tape_again, each)) for each in found]
    return list(_largest(found))


def _with_tape_again(cost: Cost) -> Cost:
    """Return a cost with the tape that a run in backward makes, also where it is the whole one."""
    tape = cost.tape_again
    stopped_run_bytes = tape.run_bytes(goes_on=False)
    return replace(cost, again=replace(tape, stopped_run_bytes=stopped_run_bytes))


def _largest(values: Sequence[Any]) -> Any:
    """Return the largest of numbers; of tuples and dataclasses, number by number."""
    first = values[0]
    if isinstance(first, tuple):
        return tuple(map(_largest, zip(*values, strict=True)))
    if is_dataclass(first):
        own = {f.name: [getattr(value, f.name) for value in values] for f in fields(first)}
        return replace(cast("Any", first), **{name: _largest(each) for name, each in own.items()})
    return max(values) if type(first) in (int, float) else first


def _meshes_of(model: nn.Module) -> list[Any]:
    """Return the meshes of the parameters that are DTensors, in the order of the parameters."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return list({mesh: None for mesh in meshes if mesh is not None})
