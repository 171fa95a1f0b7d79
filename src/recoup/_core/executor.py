"""The executor: runs a schedule over a chain; `Reversal` executes its part in backward.

NOTE [ One executor ]

Rule 1. The sweep runs with the model's forward, and the whole graph is built in it, so that
        parameters, hooks and `autograd.grad` see an ordinary graph. A stage that the sweep
        tapes keeps its residuals as any module does; a stage that it advances over becomes a
        region, whose slots are empty.
Rule 2. The run holds the results of its stages; a region holds the run, and only slots hold the
        region. So reference counting alone frees all of it with the slots that autograd holds.
Rule 3. States that the sweep keeps go through the pair of hooks beneath; states that backward
        keeps, for a short time, do not.
Rule 4. The last state may itself be a value that is not kept: a second run of the last stage makes
        it again, together with the residuals, in one run.
Rule 5. Stages may be entered one at a time, by user code.
Rule 6. Stages that the schedule always treats alike run as one stage: a segment of `sqrt` is one
        region, and its states are not handed over one by one.
Rule 7. A value that a stage returns and that is not kept could be made again by that stage alone.
        Where the schedule keeps it as a state, the tensor itself is kept: that stage cannot be run
        again in the middle of loading a state.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recoup._core.compile import is_watched, uncompiled
from recoup._core.drift_comparison import DriftComparison
from recoup._core.drift_guard import DriftGuard
from recoup._core.inverted_region import InvertedRegion
from recoup._core.lazy_values import Source, as_value, keep
from recoup._core.memory_layout import geometry_of, laid_out
from recoup._core.outcome import Outcome, compare, outcome_of
from recoup._core.prepared_schedule import Prepared
from recoup._core.region import Region, Stage, State, is_marked_in_place
from recoup._core.reversal import Forward, Reversal
from recoup._core.saved_tensors import (
    Kept,
    check_hooks_work,
    pair_in_force,
    storage_address,
)
from recoup._core.shared_evaluation import is_answered
from recoup._core.stage_group import grouped, ungrouped
from recoup.errors import ReplayError, ScheduleError
from recoup.schedules import Drop, Offload, Schedule
from recoup.schedules.grouping import groups_of, on_groups

__all__ = ["Executor", "Result", "Run", "changes_kept_input"]

Result = tuple[State, list[Tensor | None]]


class Executor:
    """The executor of one schedule, which it can run any number of times.

    Args:
        schedule: the schedule.
        stops: whether a second run ends with the last residual where its output is not needed.
        guard: the drift guard of the chain; None if inverses are not checked.
    """

    __slots__ = ("_groups", "_on_groups", "guard", "prepared")

    def __init__(
        self, schedule: Schedule, *, stops: bool = True, guard: DriftGuard | None = None
    ) -> None:
        self.prepared = Prepared(schedule, stops=stops)
        self.guard = guard if self.prepared.inverted else None
        self._groups = groups_of(schedule)
        self._on_groups: Prepared | None = None  # See Rule 6
        if len(self._groups) < schedule.num_stages and not self.prepared.inverted:
            self._on_groups = Prepared(on_groups(schedule, self._groups), stops=stops)

    def begin(self) -> Run:
        """Begin a chain whose stages come one at a time (See Rule 5)."""
        check_hooks_work()
        return Run(self.prepared, self.guard)

    def execute(self, stages: Sequence[Stage], state: State) -> Result:
        """Run the chain forward; its backward will follow the schedule.

        Returns:
            The last state and, for each stage, its second output (a log-determinant), if any.
        """
        num_stages = self.prepared.num_stages
        if num_stages != len(stages):
            raise ScheduleError(
                f"The schedule is for {num_stages} stages and the chain has {len(stages)}. "
                f"Make a schedule for {len(stages)} stages."
            )
        check_hooks_work()
        if is_answered():
            return _run_plainly(stages, state)  # the region around it owns every residual
        sweep = uncompiled(_sweep) if is_watched() else _sweep
        if self._on_groups is None:
            return sweep(Run(self.prepared, self.guard), stages, state)
        groups = grouped(stages, self._groups)
        state, of_groups = sweep(Run(self._on_groups, None), groups, state)
        return state, ungrouped(of_groups, groups)

    def execute_to_values(self, stages: Sequence[Stage], state: State) -> Result:
        """Run the chain forward as `execute` does, without keeping the last state either."""
        check_hooks_work()
        if is_answered():
            return _run_plainly(stages, state)
        sweep = uncompiled(_sweep_to_values) if is_watched() else _sweep_to_values
        return sweep(Run(self.prepared, self.guard), stages, state)


def _run_plainly(stages: Sequence[Stage], state: State) -> Result:
    beside: list[Tensor | None] = []
    for stage in stages:
        state, value = stage.forward(state)
        beside.append(value)
    return state, beside


def _sweep(run: Run, stages: Sequence[Stage], state: State) -> Result:
    return run.sweep(stages, state)


def _sweep_to_values(run: Run, stages: Sequence[Stage], state: State) -> Result:
    given = set(map(storage_address, state))
    last, beside = run.sweep(stages, state)
    return tuple(run.as_value(place, value, given) for place, value in enumerate(last)), beside


class _Output(Source):
    """A tensor of the last state, made by running the last stage again (See Rule 4)."""

    __slots__ = ("_geometry", "_outcome", "_run")

    def __init__(self, run: Run, name: str, output: Tensor) -> None:
        super().__init__(name, run.lock)
        self._run = run
        self._geometry = geometry_of(output)
        self._outcome: Outcome = {}
        if run.last.stage.compares:
            self._outcome = outcome_of([(0, output, output._version)], ())

    def take(self, output: Tensor) -> None:
        # Outer hooks may have returned the inputs in another memory layout.
        output = laid_out(output, self._geometry)
        if self._outcome:
            compare(self._outcome, [(0, output)], (), self._run.last.surroundings)
        self.give(output)

    def make(self) -> None:
        self._run.fill_slots(self._run.num_stages - 1)


class Run:
    """One forward of a chain and the backward that belongs to it.

    Args:
        schedule: the schedule.
        guard: the drift guard of the chain; None if inverses are not checked.
    """

    __slots__ = ("_forward", "_reversal", "_storages", "lock")

    def __init__(self, schedule: Prepared, guard: DriftGuard | None) -> None:
        drift: DriftComparison | None = None
        if guard is not None and guard.otherwise != "ignore":
            drift = DriftComparison(guard, schedule.inverted)
        self._forward = Forward(schedule, drift)
        self._reversal: Reversal | None = None  # until backward begins
        self._storages: set[int] = set()  # of the states that are kept
        self.lock = threading.RLock()

    def fill_slots(self, index: int) -> None:
        """Fill the slots of stage `index`, in backward or before forward has ended."""
        if self._reversal is None and self._forward.has_ended:
            self._reversal = Reversal(self._forward)
        (self._reversal or Reversal(self._forward)).fill_slots(index)

    @property
    def last(self) -> Region:
        """The record of the last stage, which runs again."""
        found = self._forward.runs[-1]
        if found is None:
            raise ScheduleError("The schedule does not run the last stage again.")
        return found

    @property
    def num_stages(self) -> int:
        """The number of stages that were entered so far."""
        return len(self._forward.stages)

    def sweep(self, stages: Sequence[Stage], state: State) -> tuple[State, list[Any]]:
        """Execute the part of the schedule that belongs to forward (See Rule 1)."""
        beside: list[Any] = []
        for stage in stages:
            state, value = self.enter(stage, state)
            beside.append(value)
        self.end(state)
        return state, beside

    def enter(self, stage: Stage, state: State) -> tuple[State, Any]:
        """Run the next stage, taped or advanced over according to the schedule."""
        forward = self._forward
        schedule = forward.schedule
        index = len(forward.stages)
        forward.stages.append(stage)
        forward.runs.append(None)
        if index == 0 and not schedule.inverted and schedule.last_keep >= 0:
            self._keep_input(0, state)
        step = schedule.steps[index]
        for action in step.before:
            if isinstance(action, Drop):
                if action.index != 0 and schedule.restarts:  # the others begin a restart
                    forward.kept.pop(action.index, None)
            elif isinstance(action, Offload):
                self._send_input(index, state, action.to)
            elif index not in forward.kept:
                self._keep_input(index, state)
        if self._storages and is_marked_in_place(stage):
            state = self._spared(state)
        if not step.is_taped:
            return self._record(index, state)
        if not step.is_run_again:
            return stage.forward(state)
        run = forward.runs[index] = Region(stage, state, index)
        return run.tape(state)

    def end(self, state: State) -> None:
        """End the forward; `state` is the output of the last stage."""
        forward = self._forward
        if forward.schedule.keeps_output and forward.is_whole:
            pair = pair_in_force()
            forward.kept[len(forward.stages)] = tuple(
                Kept(value, "The output of the chain", pair) for value in state
            )
        forward.has_ended = True
        forward.raise_failures()
        if forward.drift is not None:
            forward.drift.end_forward(self._lowest_wanted)
        for kept in forward.kept.values():
            for value in kept:
                value.check("before forward had ended")

    @property
    def _lowest_wanted(self) -> int:
        """The lowest stage whose residuals autograd may still need."""
        for index, run in enumerate(self._forward.runs):
            if run is not None and run.are_wanted:
                return index
        return len(self._forward.runs)

    def _send_input(self, index: int, state: State, to: str) -> None:
        pair = pair_in_force()
        if pair is not None:  # it decides where states are (See Rule 3)
            self._keep_input(index, state)
            return
        name, traffic = (
            f"The input of {self._forward.stages[index].name}",
            self._forward.traffic(to),
        )
        self._storages.update(map(storage_address, state))
        self._forward.kept[index] = tuple(
            [traffic.send(value, name) or Kept(value, name, None) for value in state]
        )

    def _keep_input(self, index: int, state: State) -> None:
        pair = pair_in_force()  # See Rule 3
        name = f"The input of {self._forward.stages[index].name}"
        self._storages.update(map(storage_address, state))
        if index == 0:
            self._forward.kept[0] = tuple([keep(value, name, pair) for value in state])
        else:  # See Rule 7
            self._forward.kept[index] = tuple([Kept(value, name, pair) for value in state])

    def _spared(self, state: State) -> State:
        """Return `state`, or a copy if a stage that changes it in place would change a kept one."""
        is_kept = not self._storages.isdisjoint(map(storage_address, state))
        return tuple(value.clone() for value in state) if is_kept else state

    def _record(self, index: int, state: State) -> tuple[State, Any]:
        forward = self._forward
        stage = forward.stages[index]
        is_inverted = index in forward.schedule.inverted
        kind = InvertedRegion if is_inverted else Region
        run = forward.runs[index] = kind(stage, state, index)
        result = run.record(state, self)
        if is_inverted and forward.drift is not None and not run.changes_input:
            is_always = getattr(stage, "is_one_call", False)
            forward.drift.sketch_input(index, state, result[0], is_always=is_always)
        if run.changes_input and index in forward.kept and not is_marked_in_place(stage):
            raise changes_kept_input(stage)
        return result

    def as_value(self, place: int, value: Tensor, given: set[int]) -> Tensor:
        """Return `value` marked as a value, if it is a plain tensor with new memory (Rule 4)."""
        if type(value) is not Tensor or value.is_sparse or storage_address(value) in given:
            return value
        source = _Output(self, f"What {self._forward.stages[-1].name} returned", value)
        self._forward.outputs.append((place, weakref.ref(source)))
        # An alias: user code may hold the returned tensor, so it must not be marked itself.
        return as_value(value.view_as(value), source)


def changes_kept_input(stage: Stage) -> ReplayError:
    return ReplayError(
        f"{stage.name} changes its input in place, but the schedule keeps that input. "
        "Let it change a clone (for an activation, set inplace=False)."
    )
