"""The executor: runs a schedule over a chain, any number of times.

NOTE [ One executor ]

Rule 1. Stages that a schedule always treats alike are given as one stage: a segment of `sqrt` is
        one region, and its states are not handed over one by one (see `schedules/grouping`).
Rule 2. Within a region that is inverted, its owner has every residual, and stages run plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recoup._core.chain_run import Run
from recoup._core.compile import is_watched, uncompiled
from recoup._core.drift_guard import DriftGuard
from recoup._core.prepared_schedule import Prepared
from recoup._core.region import Stage
from recoup._core.saved_tensors import check_hooks_work
from recoup._core.shared_evaluation import answers
from recoup._core.slots import State
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

    def execute(self, stages: Sequence[Stage], state: State) -> Result:
        """Run the chain forward; its backward will follow the schedule.

        Args:
            stages: the stages.
            state: the input of the first one.

        Returns:
            The last state and, for each stage, its second output (a log-determinant), if any.
        """
        if self.prepared.num_stages != len(stages):
            raise ScheduleError(
                f"The schedule is for {self.prepared.num_stages} stages and the chain has "
                f"{len(stages)}. Make a schedule for {len(stages)} stages."
            )
        check_hooks_work()
        sweep = uncompiled(Executor._sweep) if is_watched() else Executor._sweep
        return sweep(self, stages, state)

    def _sweep(self, stages: Sequence[Stage], state: State) -> Result:
        run = None if answers.answer is not None else Run(self.prepared, self.guard)  # See Rule 2
        beside: list[Any] = []
        for stage in stages:
            state, value = stage.forward(state) if run is None else run.enter(stage, state)
            beside.append(value)
        if run is not None:
            run.end(state)
        return state, beside
