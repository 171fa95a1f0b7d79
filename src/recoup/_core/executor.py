"""The executor: runs a schedule over a chain, any number of times.

NOTE [ One executor ]

Rule 1. Stages that a schedule always treats alike are given as one stage: a segment of `sqrt` is
        one region, and its states are not handed over one by one (see `schedules/grouping`).
Rule 2. The last state may itself be a value that is not kept: a second run of the last stage makes
        it again, together with the residuals, in one run.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recoup._core.chain_run import Run
from recoup._core.compile import is_watched, uncompiled
from recoup._core.drift_guard import DriftGuard
from recoup._core.fake_values import PLAIN
from recoup._core.lazy_values import Source, as_value
from recoup._core.memory_layout import geometry_of, laid_out
from recoup._core.outcome import Outcome, compare, outcome_of
from recoup._core.prepared_schedule import Prepared
from recoup._core.region import Stage
from recoup._core.saved_tensors import check_hooks_work, storage_id
from recoup._core.shared_evaluation import answers
from recoup._core.slots import State
from recoup._core.surroundings import Surroundings
from recoup.errors import ScheduleError
from recoup.schedules import Schedule

Result = tuple[State, list[Any]]


class Executor:
    """The executor of one schedule, which it can run any number of times.

    Args:
        schedule: the schedule.
        stops: whether a second run ends with the last residual where its output is not needed.
        guard: the drift guard of the chain; None if inverses are not checked.
        groups: the stages that each stage of the schedule stands for; None if it is one by itself.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        stops: bool = True,
        guard: DriftGuard | None = None,
        groups: Sequence[range] | None = None,
    ) -> None:
        singles = [range(index, index + 1) for index in range(schedule.num_stages)]
        self.groups = singles if groups is None else groups
        self.prepared = Prepared(schedule, stops=stops)
        self.guard = guard if self.prepared.inverted else None

    def begin(self) -> Run:
        """Begin a chain whose stages come one at a time."""
        check_hooks_work()
        return Run(self.prepared, self.guard)

    def execute(self, stages: Sequence[Stage], state: State, *, keeps_last: bool = True) -> Result:
        """Run the chain forward; its backward will follow the schedule.

        Args:
            stages: the stages.
            state: the input of the first one.
            keeps_last: whether the last state is kept; else it is a value, too (See Rule 2).

        Returns:
            The last state and, for each stage, its second output (a log-determinant), if any.
        """
        if self.prepared.num_stages != len(stages):
            raise ScheduleError(
                f"The schedule is for {self.prepared.num_stages} stages and the chain has "
                f"{len(stages)}. Make a schedule for {len(stages)} stages."
            )
        check_hooks_work()
        if answers.answer is not None:  # the region around it owns every residual
            beside: list[Any] = []
            for stage in stages:
                state, value = stage.forward(state)
                beside.append(value)
            return state, beside
        sweep = uncompiled(_sweep) if is_watched() else _sweep
        return sweep(Run(self.prepared, self.guard), stages, state, keeps_last)


def _sweep(run: Run, stages: Sequence[Stage], state: State, keeps_last: bool) -> Result:
    last, beside = run.sweep(stages, state)
    if not keeps_last:
        given = set(map(storage_id, state))
        last = tuple([_as_value(run, place, each, given) for place, each in enumerate(last)])
    return last, beside


def _as_value(run: Run, place: int, value: Tensor, given: set[int]) -> Tensor:
    """Return `value` marked as a value, if it is a plain tensor with new memory (See Rule 2)."""
    if type(value) not in PLAIN or value.is_sparse or storage_id(value) in given:
        return value
    source = _Output(run, value)
    run.outputs.append((place, weakref.ref(source)))
    # An alias: user code may hold the returned tensor, so it must not be marked itself.
    return as_value(value.view_as(value), source)


class _Output(Source):
    """A tensor of the last state, made by running the last stage again (See Rule 2)."""

    def __init__(self, run: Run, output: Tensor) -> None:
        super().__init__(f"What {run.stages[-1].name} returned", run.lock)
        self._run = run
        self._geometry = geometry_of(output)
        self._outcome: Outcome = {}
        if run.stages[-1].compares:
            self._outcome = outcome_of([(0, output, output._version)], ())

    def take(self, output: Tensor, surroundings: Surroundings) -> None:
        # Outer hooks may have returned the inputs in another memory layout.
        output = laid_out(output, self._geometry)
        if self._outcome:
            compare(self._outcome, [(0, output)], (), surroundings)
        self.give(output)

    def make(self) -> None:
        self._run.fill_slots(len(self._run.stages) - 1)
