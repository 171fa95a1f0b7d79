"""The follower of a plan: makes the blocks of a model keep or recompute their residuals.

NOTE [ Following a plan ]

Rule 1. A forward of the model is a pass. The blocks that it calls are the stages of the plan, in
        the order of the calls. Stages that each receive the output of the stage before form a
        chain, which the executor runs under its part of the schedule. Outside a forward of the
        model, a pass begins when a block is called whose stage is not after that of the last one.
Rule 2. A block that is skipped (LayerDrop) is a stage that does nothing: the next block receives
        the output of the block before the gap, and the chain goes on, in no more bytes than with
        it. If a block receives anything else, another chain begins at its stage.
Rule 3. A block that is called in another order, or more often, or was not called when the plan was
        made, is recomputed from its arguments. The gradients are right in all of these cases; one
        warning says that memory may be exceeded.
Rule 4. A pass holds its chain until the next chain begins or the pass ends (one outside a forward
        of the model, until the next forward). After that, only autograd holds what it has kept.
Rule 5. Blocks within a checkpoint of another library run plainly, in forward and in its
        recomputation, because that checkpoint recomputes what they save.
Rule 6. A plan for several forwards before one backward has the stages of all of them. A forward
        goes on after the stages of those whose backward is pending (NOTE [ Pending forwards ]).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from recoup._core.call import Call, run_again
from recoup._core.devices import explain_lack
from recoup._core.drift_guard import DriftGuard
from recoup._core.executor import Executor
from recoup._core.kept_products import Products
from recoup._core.saved_tensors import is_in_backward
from recoup._core.slots import State
from recoup.planning.arguments import PlannedArguments
from recoup.planning.blocks import Block
from recoup.planning.compiling import BlockCode
from recoup.planning.forwards import (
    Args,
    CallOutputs,
    Forward,
    Kwargs,
    enclosing_checkpoints,
    followed,
)
from recoup.planning.pending import PendingForwards, StepBound
from recoup.planning.pricing import MeasuredCall, chains_of, selections
from recoup.planning.step import Step
from recoup.planning.tiled_head import TiledHead
from recoup.schedules import Action, Advance, Drop, Invert, Keep, Load, Offload, Schedule, Tape

Run = Literal["call", "first", "again", "inverse"]
# From the index of a call to a context of a run of it: of the call as a whole in forward, of its
# first run and a later one, and of its inverse.
Watching = Callable[[int, Run], AbstractContextManager[Any]]


class _SkippedBlock:
    """A stage in the place of a block that was not called (See Rule 2)."""

    name = "a block that was left out"
    modules: tuple[nn.Module, ...] = ()
    compares = True
    is_in_place = False

    @property
    def code(self) -> object:
        """The same for all: there is no code to compare."""
        return _SkippedBlock

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        """Return the state itself."""
        return state, None

    def inverse(self, state: State) -> State:
        """Return the state itself."""
        return state


_SKIPPED = _SkippedBlock()


class _OpenChain:
    """A chain whose last block has not been called yet."""

    __slots__ = ("executor", "latest", "num_entered", "outputs", "run")

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.run = executor.begin()
        self.latest: Call | None = None
        self.outputs = CallOutputs(())
        self.num_entered = 0


class _Pass:
    """The progress of one forward of the model, from the stage of the latest call on."""

    def __init__(self, latest: int = -1) -> None:
        self.latest = latest  # the index of the stage of the last call
        self.chain: _OpenChain | None = None
        self.checkpoints = enclosing_checkpoints()

    def end_chain(self) -> None:
        """End the chain, which holds nothing from then on (See Rule 4)."""
        chain, self.chain = self.chain, None
        if chain is not None:
            chain.run.end(())


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.passes: list[_Pass] = []
        self.outside = _Pass()  # of blocks that are called outside a forward of the model


class _WatchedCall(Call):
    """A call whose runs are watched."""

    __slots__ = ("_index", "_watching")

    def __init__(self, watching: Watching, index: int, *args: Any) -> None:
        super().__init__(*args)
        self._watching = watching
        self._index = index

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        """Run the call."""
        with self._watching(self._index, "again" if self.has_run else "first"):
            return super().forward(state)

    def inverse(self, state: State) -> State:
        """Invert the call."""
        with self._watching(self._index, "inverse"):
            return super().inverse(state)


class PlanFollower:
    """The follower of a model and its blocks (See Rule 1).

    Blocks without a stage in the schedule are recomputed if they are called. `arguments` are to
    warn of larger ones, `bound` is what the plan sets to each step (None in rehearsals), and
    `watching` is entered around runs of calls.
    """

    def __init__(
        self,
        planned: PlannedModel,
        schedule: Schedule,
        arguments: PlannedArguments | None = None,
        bound: StepBound | None = None,
        watching: Watching | None = None,
    ) -> None:
        self._model, self._tiled = planned.root, planned.tiled
        self._num_forwards, self._bound, self._watching = planned.num_forwards, bound, watching
        self._pending = PendingForwards() if bound is None else bound.pending
        self._names = {id(module): name for name, module in planned.blocks}
        self._arguments = arguments
        self._stages = planned_stages(schedule, planned.calls, planned.guard)
        executors = (stage.executor for stage in self._stages if stage.step == 0)
        self.guards = [None if each is None else each.guard for each in executors]  # of each chain
        self._indices: dict[int, list[int]] = {}  # of the stages of each block
        for index, stage in enumerate(self._stages):
            self._indices.setdefault(id(stage.module), []).append(index)
        self._of_thread = _OfThread()
        self._has_warned = False

    def called(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run the model, or one of its blocks."""
        if module is self._model:
            return self._run_model(forward, args, kwargs)
        if self._tiled is not None and module is self._tiled.module:
            return self._tiled.called(module, forward, args, kwargs)
        passes = self._of_thread.passes
        now = passes[-1] if passes else self._of_thread.outside
        if id(module) not in self._names:
            return forward(*args, **kwargs)  # a block of another plan for the model
        if now.checkpoints != enclosing_checkpoints() or (not passes and is_in_backward()):
            return forward(*args, **kwargs)  # See Rule 5
        index = self._next_index(module, now)
        if index is None and not passes:
            now.end_chain()
            now = self._of_thread.outside = _Pass()
            index = self._next_index(module, now)
        if index is None:
            return self._run_out_of_order(module, now, forward, args, kwargs)
        now.latest = index
        watching, stage = self._watching, self._stages[index]
        if watching is None:
            return self._run_stage(stage, now, forward, args, kwargs)
        with watching(index, "call"):
            return self._run_stage(stage, now, forward, args, kwargs)

    def _run_model(self, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        passes, bound = self._of_thread.passes, self._bound
        self._of_thread.outside.end_chain()
        is_counted = not passes and enclosing_checkpoints() == (0, None)
        pending: Sequence[Any] = ()
        if is_counted:
            model = cast("nn.Module", self._model)
            pending = self._pending.alive() if bound is None else bound.check(model)
        if self._arguments is not None and self._model is not None:
            self._arguments.warn_if_larger(self._model, args, kwargs)
            self._warn_of_drift()
        if bound is not None and is_counted and not pending:
            bound.pending.watch(cast("nn.Module", self._model), bound.step_bytes)
        own = pending[len(pending) - len(pending) % self._num_forwards :]
        now = _Pass(max((each.latest for each in own), default=-1))  # See Rule 6
        passes.append(now)
        try:
            output = forward(*args, **kwargs)
        except BaseException as error:
            self._pending.unwatch()
            if isinstance(error, torch.OutOfMemoryError):
                explain_lack(error)
            raise
        finally:
            passes.remove(now)
            now.end_chain()
        if is_counted:
            held = 0 if bound is None else bound.held[len(own)]
            self._pending.add(output, held, now.latest)
        return output

    def _next_index(self, module: nn.Module, now: _Pass) -> int | None:
        indices = self._indices.get(id(module), ())
        return next((index for index in indices if index > now.latest), None)

    def _run_out_of_order(
        self, module: nn.Module, now: _Pass, forward: Forward, args: Args, kwargs: Kwargs
    ) -> Any:
        """Run a block whose stages are all before the last call (See Rule 3)."""
        now.end_chain()
        self._warn_of_order(module)
        return run_again(Call(f"block `{self._names[id(module)]}`", forward, args, kwargs, module))

    def _run_stage(
        self, stage: PlannedStage, now: _Pass, forward: Forward, args: Args, kwargs: Kwargs
    ) -> Any:
        executor = stage.executor
        if executor is None:
            now.end_chain()
            return stage.code.called(stage.module, forward, args, kwargs)
        forward = stage.code.of_call(stage.module, forward)
        given = (f"block `{stage.name}`", forward, args, kwargs, stage.module)
        watching = self._watching
        call = Call(*given) if watching is None else _WatchedCall(watching, now.latest, *given)
        call.products = stage.chosen
        if stage.step in executor.inverted:
            call.expect_inverse()
        linked, picks = (), ()
        if now.chain is not None and now.chain.executor is executor:
            linked, picks = now.chain.outputs.indices_in(call.tensors, stage.module)
            if not linked:
                self._warn_of_order(stage.module)
        if now.chain is None or not linked:
            now.end_chain()
            now.chain = _OpenChain(executor)
        # The pass releases the chain first: an exception then neither continues nor holds it.
        chain, now.chain = now.chain, None
        state = call.tensors
        if chain.latest is not None:
            chain.latest.hand_on(picks)
            state = tuple(call.tensors[index] for index in linked)
        for _ in range(chain.num_entered, stage.step):
            state, _ = chain.run.enter(_SKIPPED, state)
        if chain.latest is not None:
            step = executor.steps[stage.step]
            state = call.link(linked, may_run_again=not step.is_taped or step.is_run_again)
        state, _ = chain.run.enter(call, state)
        chain.latest, chain.outputs = call, CallOutputs(state)
        chain.num_entered = stage.step + 1
        if chain.num_entered == executor.num_stages:
            chain.run.end(state)
        else:
            now.chain = chain
        return call.take_output(state)

    def _warn_of_drift(self) -> None:
        if any(guard.kept for guard in self.guards if guard is not None):
            self._warn(
                f"Inverses of blocks of this {type(self._model).__name__} drift since the plan was "
                "made. The inputs of these blocks are computed again, so gradients are right, but "
                "a step may take more memory than was planned, and longer. Make a new plan."
            )

    def _warn_of_order(self, module: nn.Module) -> None:
        self._warn(
            f"A {type(module).__name__} of the planned model was called otherwise than when the "
            "plan was made (after other blocks, more often, or not at all then). Its gradients are "
            "right, but it may take more memory than was planned. Make the plan with arguments as "
            "those in training."
        )

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, stacklevel=5)


class PlannedModel(NamedTuple):
    """A model and its blocks, which can follow any schedule of the calls of these blocks.

    Args:
        model: the model.
        root: the module whose forward is one pass; None if the step does not call the model itself.
        blocks: the names and modules of the blocks.
        calls: the calls of blocks that were seen, in order.
        tiled: the output layer of the model, if it runs in tiles; None if not.
        guard: the drift guard of inverted blocks; None if no schedule inverts any.
        num_forwards: the number of forwards of the root that the calls are of.
    """

    model: nn.Module
    root: nn.Module | None
    blocks: Sequence[Block]
    calls: Sequence[MeasuredCall]
    tiled: TiledHead | None = None
    guard: DriftGuard | None = None
    num_forwards: int = 1

    @classmethod
    def of(
        cls,
        step: Step,
        blocks: Sequence[Block],
        calls: Sequence[MeasuredCall],
        guard: DriftGuard | None = None,
    ) -> PlannedModel:
        """Return the model of a step with its blocks; the step tiles its parts itself."""
        return cls(step.model, step.root, blocks, calls, step.tiled, guard, step.num_forwards)

    @property
    def followed_modules(self) -> list[nn.Module]:
        """The modules whose forwards go through the follower."""
        return [*self.whole_modules, *([] if self.tiled is None else [self.tiled.module])]

    @property
    def whole_modules(self) -> list[nn.Module]:
        """The same without an output layer that runs in tiles."""
        return [*([] if self.root is None else [self.root]), *(block for _, block in self.blocks)]

    def rehearsing(self, schedule: Schedule, watching: Watching | None = None) -> PlanFollower:
        """Return a follower of a schedule, in steps that leave no trace."""
        guard = None if self.guard is None else self.guard.anew()
        return PlanFollower(self._replace(guard=guard), schedule, watching=watching)

    def followed(
        self, schedule: Schedule, watching: Watching | None = None
    ) -> AbstractContextManager[None]:
        """Return a context of such steps, which tile the parts of the model themselves.

        The schedule is of the calls, and of one more stage: the code after them.
        """
        return followed(self.whole_modules, self.rehearsing(schedule, watching))


# -- stages ----------------------------------------------------------------------------------------


class PlannedStage(NamedTuple):
    """The part of a plan for one call of a block.

    Args:
        name: the qualified name of the block.
        module: the block.
        executor: runs the schedule of its chain; None if all stages of that keep their residuals.
        step: its index in that chain.
        chosen: the operators whose results it keeps for its second run; None if it keeps none.
        code: the code that it runs by.
    """

    name: str
    module: nn.Module
    executor: Executor | None
    step: int
    chosen: Products | None
    code: BlockCode


def planned_stages(
    schedule: Schedule, calls: Sequence[MeasuredCall], guard: DriftGuard | None = None
) -> list[PlannedStage]:
    """Return a stage for each call, given a schedule of them and the code after them.

    The drift guard is that of the first chain that inverts; the others get one with its settings.
    """
    variants = {a.index: a.variant for a in schedule.actions if isinstance(a, Tape)}
    results = {a.start: a.results for a in schedule.actions if isinstance(a, Advance) and a.results}
    stages: list[PlannedStage] = []
    for start, stop in chains_of(calls):
        executor = _executor_of(schedule, start, stop, guard)
        if guard is not None and executor is not None and executor.guard is guard:
            guard = guard.anew()
        for index in range(start, stop):
            step, call = index - start, calls[index]
            is_kept = executor is None or executor.steps[step].is_taped
            chosen, code = None, BlockCode()
            if call.codes:
                variant = variants.get(index, 0)
                code = call.codes[variant] if is_kept else call.code_again or call.codes[0]
            elif index in results:
                chosen = selections(call)[results[index] - 1].products
            stages.append(PlannedStage(call.name, call.module, executor, step, chosen, code))
    return stages


def _executor_of(
    schedule: Schedule, start: int, stop: int, guard: DriftGuard | None
) -> Executor | None:
    """Return the executor of a chain; None if all of its stages keep their residuals."""
    actions = tuple(_within(schedule.actions, start, stop))
    runs_again = any(isinstance(action, Advance | Invert) for action in actions)
    part = Schedule(stop - start, actions, name=schedule.name)
    sweep = actions[: part.sweep_end]
    inverts = any(isinstance(action, Invert) for action in actions)
    if inverts and Keep(0) not in sweep and Offload(0) not in sweep:
        # What an inverse gets wrong is computed again from the first state.
        part = replace(part, actions=(Keep(0), *actions))
    return Executor(part, guard=guard) if runs_again else None


def _within(actions: Sequence[Action], start: int, stop: int) -> Iterator[Action]:
    """Yield the actions on the stages of one chain, with the stages numbered from 0.

    The last state of a chain counts where a stage is inverted from it: then only code follows that
    is no block.
    """
    is_inverted_from = Invert(stop - 1) in actions
    for action in actions:
        if isinstance(action, Advance):
            first, last = max(action.start, start), min(action.stop, stop)
            if first < last:
                yield Advance(first - start, last - start)
        elif is_inverted_from and action.index == stop and isinstance(action, Keep | Load | Drop):
            yield replace(action, index=stop - start)
        elif start <= action.index < stop:
            # The variant of the tape is known to the stage (`PlannedStage.code`).
            of_stage = Tape(action.index) if isinstance(action, Tape) else action
            yield replace(of_stage, index=action.index - start)
