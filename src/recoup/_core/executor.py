"""The executor: runs a schedule over a chain, in forward and in backward.

NOTE [ One executor ]

Rule 1. The sweep runs with the model's forward, and the whole graph is built in it, so that
        parameters, hooks and `autograd.grad` see an ordinary graph. A stage that the sweep
        tapes keeps its residuals as any module does; a stage that it advances over becomes a
        region, whose slots are empty.
Rule 2. Autograd unpacks residuals in descending order of stages. Unpacking an empty slot executes
        the schedule up to the action that tapes its stage.
Rule 3. If that action was already executed (a second backward over a retained graph, or one after
        an exception), the schedule is executed again from its start, on the same graph. If the
        stage has not been reversed yet, that stage alone is run again.
Rule 4. The run holds the results of its stages; a region holds the run, and only slots hold the
        region. So reference counting alone frees all of it with the slots that autograd holds.
Rule 5. States that the sweep keeps go through the pair of hooks beneath; states that backward
        keeps, for a short time, do not.
Rule 6. The last state may itself be a value that is not kept: a second run of the last stage makes
        it again, together with the residuals, in one run.
Rule 7. Stages above the one whose residuals are needed are advanced over, not taped: a loss of an
        early latent alone would otherwise make tapes that autograd never uses.
Rule 8. A state that an inverse returns is compared with the state of forward before autograd uses
        anything computed from it. If it is too far off, the drift guard decides.
Rule 9. Stages may be entered one at a time, by user code. If there are fewer than the schedule is
        for, actions on the missing ones are skipped. If residuals of a stage are needed before the
        chain has ended, the stage is run again from the nearest state that is kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recoup._core.autocast_copies import geometry_of, laid_out
from recoup._core.compile import is_loaded, uncompiled
from recoup._core.drift_comparison import DriftComparison
from recoup._core.drift_guard import DriftGuard
from recoup._core.lazy_values import HasTensor, Source, as_value, keep
from recoup._core.offload import moved_to_host
from recoup._core.prepared_schedule import Prepared
from recoup._core.saved_tensors import (
    Kept,
    check_hooks_work,
    detached,
    pair_in_force,
    storage_of,
)
from recoup._core.shared_evaluation import is_answered
from recoup._core.stage import Stage, StageRun, State, is_marked_in_place
from recoup.errors import DriftError, ReplayError, ScheduleError
from recoup.schedules import (
    Action,
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Offload,
    Reverse,
    Schedule,
    Tape,
)

__all__ = ["Executor", "Result", "Run"]

Result = tuple[State, list[Tensor | None]]


class Executor:
    """The executor of one schedule, which it can run any number of times.

    Args:
        schedule: the schedule.
        stops: whether a second run ends with the last residual where its output is not needed.
        guard: the drift guard of the chain; None if inverses are not checked.
    """

    __slots__ = ("guard", "prepared")

    def __init__(
        self, schedule: Schedule, *, stops: bool = True, guard: DriftGuard | None = None
    ) -> None:
        self.prepared = Prepared(schedule, stops=stops)
        self.guard = guard if self.prepared.inverted else None

    def begin(self) -> Run:
        """Begin a chain whose stages come one at a time (See Rule 9)."""
        check_hooks_work()
        return Run(self)

    def execute(self, stages: Sequence[Stage], state: State) -> Result:
        """Run the chain forward; its backward will follow the schedule.

        Returns:
            The last state and, for each stage, its second output (a log-determinant), if any.
        """
        num_stages = self.prepared.num_stages
        if num_stages != len(stages):
            raise ScheduleError(
                f"The schedule is for {num_stages} stages and the chain has {len(stages)}. "
                f"Make it anew for {len(stages)} stages."
            )
        check_hooks_work()
        if is_answered():
            return _run_plainly(stages, state)  # the region around it owns every residual
        sweep = uncompiled(_sweep) if is_loaded() else _sweep
        return sweep(self, stages, state)

    def execute_to_values(self, stages: Sequence[Stage], state: State) -> Result:
        """Run the chain forward as `execute` does, without keeping the last state either."""
        check_hooks_work()
        if is_answered():
            return _run_plainly(stages, state)
        sweep = uncompiled(_sweep_to_values) if is_loaded() else _sweep_to_values
        return sweep(self, stages, state)


def _run_plainly(stages: Sequence[Stage], state: State) -> Result:
    beside: list[Tensor | None] = []
    for stage in stages:
        state, value = stage.forward(state)
        beside.append(value)
    return state, beside


def _sweep(executor: Executor, stages: Sequence[Stage], state: State) -> Result:
    return Run(executor).sweep(stages, state)


def _sweep_to_values(executor: Executor, stages: Sequence[Stage], state: State) -> Result:
    run = Run(executor)
    given = set(map(storage_of, state))
    last, beside = run.sweep(stages, state)
    return tuple(run.as_value(place, value, given) for place, value in enumerate(last)), beside


class _Output(Source):
    """A tensor of the last state, made by running the last stage again (See Rule 6)."""

    __slots__ = ("_geometry", "_run")

    def __init__(self, run: Run, name: str, output: Tensor) -> None:
        super().__init__(name, run.lock)
        self._run = run
        self._geometry = geometry_of(output)

    def take(self, output: Tensor) -> None:
        # Outer hooks may have returned the inputs in another memory layout.
        self.give(laid_out(output, self._geometry))

    def make(self) -> None:
        self._run.fill_slots(len(self._run._stages) - 1)


class Run:
    """One forward of a chain and the backward that belongs to it."""

    __slots__ = (
        "_current",
        "_drift",
        "_has_ended",
        "_inputs",
        "_kept_in_backward",
        "_kept_in_forward",
        "_offloaded",
        "_outputs",
        "_position",
        "_runs",
        "_schedule",
        "_stages",
        "_storages",
        "lock",
    )

    def __init__(self, executor: Executor) -> None:
        self._schedule = executor.prepared
        self._drift: DriftComparison | None = None
        if executor.guard is not None and executor.guard.otherwise != "ignore":
            self._drift = DriftComparison(executor.guard, self._schedule.inverted)
        self._stages: list[Stage] = []
        self._runs: list[StageRun | None] = []
        self._kept_in_forward: dict[int, tuple[HasTensor, ...]] = {}
        self._storages: set[int] = set()
        self._kept_in_backward: dict[int, State] = {}
        self._offloaded: dict[int, tuple[Any, ...]] = {}
        self._current: tuple[int, State] = (-1, ())
        self._inputs: dict[int, State] = {}  # of stages that are taped and not yet reversed
        self._position = 0
        self._has_ended = False
        self.lock = threading.RLock()
        self._outputs: list[tuple[int, weakref.ref[_Output]]] = []

    # -- forward ---------------------------------------------------------------------------

    def sweep(self, stages: Sequence[Stage], state: State) -> Result:
        """Execute the part of the schedule that belongs to forward (See Rule 1)."""
        beside: list[Tensor | None] = []
        for stage in stages:
            state, value = self.enter(stage, state)
            beside.append(value)
        self.end(state)
        return state, beside

    def enter(self, stage: Stage, state: State) -> tuple[State, Tensor | None]:
        """Run the next stage, taped or advanced over according to the schedule."""
        index = len(self._stages)
        self._stages.append(stage)
        self._runs.append(None)
        if index == 0 and not self._schedule.inverted and self._schedule.last_keep >= 0:
            self._kept_in_forward[0] = self._keep(0, state)
        step = self._schedule.steps[index]
        for action in step.before:
            if isinstance(action, Drop):
                self._drop(action.index)
            elif index not in self._kept_in_forward or isinstance(action, Offload):
                is_offloaded = isinstance(action, Offload)
                self._kept_in_forward[index] = self._keep(index, state, is_offloaded=is_offloaded)
        if step.is_taped:
            return self._tape_first(index, state, step.is_run_again)
        return self._advance_first(index, state)

    def end(self, state: State) -> None:
        """End the forward; `state` is the output of the last stage."""
        if self._schedule.keeps_output and self._is_whole:
            self._kept_in_forward[len(self._stages)] = self._keep(len(self._stages), state)
        self._position = self._schedule.sweep_end
        self._has_ended = True
        if self._drift is not None:
            self._drift.end_forward(self._lowest_wanted)
        for kept in self._kept_in_forward.values():
            for value in kept:
                value.check("before forward had ended")

    @property
    def _lowest_wanted(self) -> int:
        """The lowest stage whose residuals autograd may still need."""
        runs = enumerate(self._runs)
        return next((at for at, run in runs if run is not None and run.is_wanted), len(self._runs))

    @property
    def _is_whole(self) -> bool:
        return len(self._stages) == self._schedule.num_stages

    def _keep(
        self, index: int, state: State, *, is_offloaded: bool = False
    ) -> tuple[HasTensor, ...]:
        pair = pair_in_force()  # See Rule 5
        if is_offloaded:
            pair = moved_to_host(pair)
        if index == len(self._stages):
            return tuple(Kept(value, "The output of the chain", pair) for value in state)
        name = f"The input of {self._stages[index].name}"
        self._storages.update(map(storage_of, state))
        return tuple(keep(value, name, pair) for value in state)

    def _spared(self, stage: Stage, state: State) -> State:
        """Return `state`, or a copy if `stage` would change a kept state in place."""
        if not is_marked_in_place(stage):
            return state
        is_kept = not self._storages.isdisjoint(map(storage_of, state))
        return tuple(value.clone() for value in state) if is_kept else state

    def _tape_first(
        self, index: int, state: State, is_run_again: bool
    ) -> tuple[State, Tensor | None]:
        stage = self._stages[index]
        if self._storages:
            state = self._spared(stage, state)
        if not is_run_again:
            return stage.forward(state)
        run = self._runs[index] = StageRun(stage, state, index, is_inverted=False)
        return run.tape(state)

    def _advance_first(self, index: int, state: State) -> tuple[State, Tensor | None]:
        stage = self._stages[index]
        if self._storages:
            state = self._spared(stage, state)
        is_inverted = index in self._schedule.inverted
        run = self._runs[index] = StageRun(stage, state, index, is_inverted=is_inverted)
        result = run.record(state, self)
        if is_inverted and self._drift is not None and not run.changes_input:
            self._drift.sketch_input(index, state, result[0])
        if run.changes_input and index in self._kept_in_forward and not is_marked_in_place(stage):
            raise ReplayError(
                f"{stage.name} changes its input in place, and the schedule keeps that input. "
                "Make it change a clone (for an activation, inplace=False)."
            )
        return result

    def as_value(self, place: int, value: Tensor, given: set[int]) -> Tensor:
        """Return `value` marked as a value, if it is a plain tensor with new memory (Rule 6)."""
        if type(value) is not Tensor or value.is_sparse or storage_of(value) in given:
            return value
        source = _Output(self, f"What {self._stages[-1].name} returned", value)
        self._outputs.append((place, weakref.ref(source)))
        # An alias: user code may hold the returned tensor, so it must not be marked itself.
        return as_value(value.view_as(value), source)

    # -- backward --------------------------------------------------------------------------

    def fill_slots(self, index: int) -> None:
        """Fill the slots of stage `index` (See Rules 2 and 3)."""
        target = self._schedule.tape_at[index]
        try:
            if not self._has_ended or (self._schedule.inverted and not self._is_whole):
                self._fill_alone(index)
                return
            inputs = self._inputs.get(index)
            if inputs is not None and target < self._position:
                self._fill(index, inputs)
                return
            if target < self._position:
                self._restart()
            if self._drift is not None and self._position == self._schedule.sweep_end:
                self._drift.begin_backward()
            while self._position <= target:
                action = self._schedule.actions[self._position]
                self._position += 1
                self._execute(action, index)
        except BaseException:
            self._forget()
            raise

    def _fill_alone(self, index: int) -> None:
        """Fill the slots of stage `index` from the nearest state that is kept (See Rule 9)."""
        if self._schedule.inverted:
            raise ReplayError(
                f"{self._stages[-1].name} is not the last of the {self._schedule.num_stages} "
                "stages that the schedule is for, and what comes after it was to be inverted. Make the "
                "plan anew, with arguments for which the same blocks are called."
            )
        start = max(at for at in self._kept_in_forward if at <= index)
        self._load(start)
        for at in range(start, index):
            self._advance(at)
        state = self._state_at(index)
        self._forget()
        self._fill(index, state)

    def _forget(self) -> None:
        """Release all that backward has made, so that the next demand starts over."""
        self._position = len(self._schedule.actions)
        self._current = (-1, ())
        self._kept_in_backward.clear()
        self._offloaded.clear()
        self._inputs.clear()

    def _restart(self) -> None:
        """Restore the states that the sweep kept and backward has dropped (See Rule 3)."""
        self._forget()
        if not self._schedule.inverted:  # a run that inverts drops nothing that the sweep kept
            self._load(0)
            for action in self._schedule.actions[: self._schedule.last_keep + 1]:
                self._execute(action, -1)
        self._position = self._schedule.sweep_end

    def _execute(self, action: Action, demanded: int) -> None:
        num_stages = len(self._stages)
        match action:
            case Advance(start, stop) if stop >= num_stages and not self._is_whole:
                for index in range(start, num_stages - 1):  # See Rule 9
                    self._advance(index)
            case Advance():
                for index in range(action.start, action.stop):
                    self._advance(index)
            case _ if action.index >= num_stages and not self._is_whole:
                pass
            case Keep(at):
                self._kept_in_backward[at] = self._state_at(at)
            case Offload(at):
                pair = moved_to_host(None)
                self._offloaded[at] = tuple(pair[0](value) for value in self._state_at(at))
            case Drop(at):
                self._drop(at)
            case Load(at):
                self._load(at)
            case Tape(index) if index <= demanded:
                state = self._inputs[index] = self._state_at(index)
                self._current = (index + 1, self._fill(index, state))
            case Tape(index):
                self._advance(index)  # See Rule 7
            case Invert(index):
                self._invert(index, is_taped=index <= demanded)
            case Reverse(index):
                # Autograd reverses the stage; its slots are empty by now.
                self._inputs.pop(index, None)

    def _fill(self, index: int, state: State) -> State:
        is_last = index + 1 == len(self._stages)
        needs_output = index in self._schedule.tapes_that_go_on or (
            is_last and any(ref() is not None for _, ref in self._outputs)
        )
        output = self._run(index).fill(state, needs_output=needs_output)
        if not is_last:
            return output
        for place, ref in self._outputs:
            source = ref()
            if source is not None and output:
                source.take(output[place])
        return ()  # nothing is run from the last state

    def _advance(self, index: int) -> None:
        self._current = (index + 1, self._run(index).advance(self._state_at(index)))

    def _invert(self, index: int, *, is_taped: bool) -> None:
        # Handed over, so that the stage can free it half way.
        state = self._run(index).invert(self._take(index + 1), is_taped=is_taped)
        if self._drift is not None:
            state = self._compared(index, state, self._drift, is_taped=is_taped)
        self._current = (index, state)
        if is_taped:
            self._inputs[index] = state

    def _compared(
        self, index: int, state: State, drift: DriftComparison, *, is_taped: bool
    ) -> State:
        """Return the state that an inverse returned, or the recomputed one (See Rule 8)."""
        if drift.is_within(index, state, self._stages[index].name):
            if index not in self._kept_in_backward:
                return state
            drift.mark_exact(index)
            # Backward kept it to recompute the stages above, which are done now.
            return (
                self._kept_in_backward[index]
                if index in self._kept_in_forward
                else self._kept_in_backward.pop(index)
            )
        del state
        sources = [at for at in (*self._kept_in_forward, *self._kept_in_backward) if at <= index]
        if not sources:
            raise DriftError(
                f"The inverse of {self._stages[index].name} drifted, and the schedule keeps no "
                'state to compute its input from. Keep one in the schedule, or use drift="raise".'
            )
        start = max(sources)
        self._check_alone(start, index)
        spacing = drift.keep_from_now_on(index)
        self._load(start)
        for at in range(start, index):
            if (index - at) % spacing == 0 and at not in self._kept_in_backward:
                self._kept_in_backward[at] = self._state_at(at)
            self._advance(at)
        drift.mark_exact(index)
        state = self._state_at(index)
        if is_taped:
            self._run(index).fill(state)
        return state

    def _check_alone(self, start: int, stop: int) -> None:
        """Raise if a stage is sharded: other ranks may see no drift, and would not run it again."""
        for stage in self._stages[start:stop]:
            if any(hasattr(part, "unshard") for one in stage.modules for part in one.modules()):
                raise DriftError(
                    f"The inverse of {self._stages[stop].name} drifted, and its input cannot be "
                    f"computed again: {stage.name} is sharded, so that all ranks must run it "
                    'together. Bound the scale of the layers, or use memory="sqrt".'
                )

    def _drop(self, index: int) -> None:
        self._kept_in_backward.pop(index, None)
        self._offloaded.pop(index, None)
        # The source of a restart stays: the first state, or all that the sweep of a run that
        # inverts has kept, since backward keeps nothing on top of it.
        if index != 0 and not self._schedule.inverted:
            self._kept_in_forward.pop(index, None)

    def _load(self, index: int) -> None:
        state = self._kept_in_backward.get(index)
        moved = self._offloaded.get(index)
        if state is None and moved is not None:
            state = tuple(moved_to_host(None)[1](value) for value in moved)
        elif state is None:
            # The pair beneath may give it once only (torch's checkpoint does).
            state = detached(kept.get() for kept in self._kept_in_forward[index])
            self._kept_in_backward[index] = state
        self._current = (index, state)
        if self._drift is not None:
            self._drift.mark_exact(index)

    def _state_at(self, index: int) -> State:
        at, state = self._current
        if at != index:
            raise ScheduleError(f"The schedule needs state {index} where it has state {at}.")
        return state

    def _take(self, index: int) -> State:
        state = self._state_at(index)
        self._current = (-1, ())
        return state

    def _run(self, index: int) -> StageRun:
        run = self._runs[index]
        if run is None:
            raise ScheduleError(f"The schedule runs {self._stages[index].name} a second time.")
        return run
