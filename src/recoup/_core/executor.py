"""The executor, which runs a schedule over a chain any number of times, and chains of callables.

NOTE [ One executor ]

Rule 1. Stages that a schedule always treats alike are given as one stage: a segment of `sqrt` is
        one region, and its states are not handed over one by one (see `groups_of`).
Rule 2. Within a region that is inverted, its owner has every residual, and stages run plainly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from recoup._core.captured import joint_code, parts_of
from recoup._core.chain_run import Run
from recoup._core.compile import is_watched, uncompiled
from recoup._core.drift_guard import DriftGuard
from recoup._core.modules import (
    Direction,
    are_in_place,
    check_pair,
    has_inverse,
    mark_of,
    marks_of,
)
from recoup._core.pytree import BARE, Tree, flatten
from recoup._core.region import Stage
from recoup._core.saved_tensors import check_hooks_work, storage_id
from recoup._core.shared_evaluation import answers
from recoup._core.slots import State
from recoup.errors import NotInvertibleError, ReplayError, ScheduleError
from recoup.schedules import Invert, Schedule, Way
from recoup.schedules._simulate import Prepared
from recoup.schedules.actions import groups_of, on_groups
from recoup.schedules.memory import Memory, schedule_for

Result = tuple[State, list[Any]]


class Executor(Prepared):
    """The executor of one schedule, which it can run any number of times.

    Each stage of it may stand for a group. Without a drift guard inverses are not checked.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        guard: DriftGuard | None = None,
        groups: Sequence[range] | None = None,
    ) -> None:
        super().__init__(schedule)
        singles = [range(index, index + 1) for index in range(schedule.num_stages)]
        self.groups = singles if groups is None else groups
        self.guard = guard if self.inverted else None

    def begin(self) -> Run:
        """Begin a chain whose stages come one at a time."""
        check_hooks_work()
        return Run(self, self.guard)

    def execute(self, stages: Sequence[Stage], state: State) -> Result:
        """Run the chain forward; its backward will follow the schedule.

        Returns the last state and, for each stage, its second output (a log-determinant), if any.
        """
        if self.num_stages != len(stages):
            raise ScheduleError(
                f"The schedule is for {self.num_stages} stages and the chain has "
                f"{len(stages)}. Make a schedule for {len(stages)} stages."
            )
        check_hooks_work()
        sweep = uncompiled(Executor._sweep) if is_watched() else Executor._sweep
        return sweep(self, stages, state)

    def _sweep(self, stages: Sequence[Stage], state: State) -> Result:
        run = None if answers.answer is not None else Run(self, self.guard)  # See Rule 2
        beside: list[Any] = []
        for stage in stages:
            state, value = stage.forward(state) if run is None else run.enter(stage, state)
            beside.append(value)
        if run is not None:
            run.end(state)
        return state, beside


Otherwise = Literal["recompute", "keep"] | None


def ways_of(callables: Mapping[str, Any], otherwise: Otherwise) -> tuple[Way, ...]:
    """Return the way in which each callable gets its input back under "constant".

    That of callables that cannot be inverted is `otherwise`; if it is None, they are an error.
    """
    if otherwise not in (None, "recompute", "keep"):
        raise ValueError(f'`otherwise` is {otherwise!r}, but must be "recompute", "keep" or None.')
    ways: list[Way] = []
    for name, fn in callables.items():
        if not getattr(fn, "inverts_in_backward", True):
            ways.append("recompute")
        elif has_inverse(fn):
            ways.append("invert")
        elif otherwise is None:
            raise NotInvertibleError(
                f'`memory` is "constant", but {name} has no inverse. Use "sqrt" or "log", or '
                'pass otherwise="recompute" or otherwise="keep" for the modules that have none.'
            )
        else:
            ways.append(otherwise)
    return tuple(ways)


def executor_for(
    memory: Memory, callables: Mapping[str, Any], ways: Sequence[Way] | None, guard: DriftGuard
) -> Executor:
    """Return the executor, in groups, for these callables; raise if one lacks an inverse."""
    ways = None if ways is None else guard.ways(ways)
    schedule = schedule_for(memory, len(callables), ways)
    inverted = {action.index for action in schedule.actions if isinstance(action, Invert)}
    if not inverted:
        groups = groups_of(schedule)
        return Executor(on_groups(schedule, groups), guard=guard, groups=groups)
    for index, (name, fn) in enumerate(callables.items()):
        if index in inverted and not has_inverse(fn):
            raise NotInvertibleError(
                f"The schedule inverts {name}, which has no method `inverse`. Define one, or use "
                "a schedule that tapes or recomputes this stage."
            )
    return Executor(schedule, guard=guard)


def run_through(
    executor: Executor, callables: Mapping[str, Any], value: Any, *, compares: bool = True
) -> Any:
    """Call each of the callables in order; backward follows the schedule, which is in groups."""
    names, fns = list(callables), list(callables.values())
    parts = list(zip(fns, are_in_place(fns), marks_of(fns, "returns_log_det"), strict=True))
    state, tree = flatten(value)
    trees = [tree] * (len(executor.groups) + 1)
    stages: list[_Segment] = []
    for group in executor.groups:
        within = slice(group.start, group.stop)
        stages.append(_Segment(len(stages), names[within], parts[within], trees, compares))
    state, _ = executor.execute(stages, state)
    return trees[-1].unflatten(state)


def value_of(fn: Any, output: Any, given: Any, direction: Direction = "forward") -> Any:
    """Return `output` without the log-determinant that an invertible module adds to its value."""
    if not mark_of(fn, "returns_log_det"):
        return output
    tensors, _ = flatten(given)
    if tensors and tensors[0].dim():
        num_early = getattr(fn, "num_early", 0) if direction == "forward" else 0
        name = type(fn).__name__
        check_pair(output, len(tensors[0]), direction, name, num_early=num_early)
    return output[0]


class _Segment:
    """Callables that run as one stage; the first run records the structures before and after.

    With each is told whether it changes its input in place, and whether it returns a
    log-determinant beside its value.
    """

    def __init__(
        self,
        place: int,
        names: Sequence[str],
        parts: Sequence[tuple[Any, bool, Any]],
        trees: list[Tree],
        compares: bool,
    ) -> None:
        self._place, self._parts, self._trees = place, parts, trees
        self.name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        self.compares, self.is_in_place = compares, parts[0][1]
        self.code: object = parts[0][0]
        self.modules: list[nn.Module] = []
        codes: list[object] = []
        for fn, _, _ in parts:
            if isinstance(fn, nn.Module):
                self.modules.append(fn)
            else:
                code, modules = parts_of(fn)
                codes.append(code)
                self.modules += modules
        if codes:
            self.code = joint_code(codes)

    def forward(self, state: State) -> tuple[State, None]:
        trees, place = self._trees, self._place
        value = state[0] if trees[place] is BARE else trees[place].unflatten(state)
        for fn, is_in_place, returns_log_det in self._parts:
            if is_in_place and not self.is_in_place:  # else a copy is kept
                value = _spared(value, state)
            given, value = value, fn(value)
            if returns_log_det:
                value = value_of(fn, value, given)
        if isinstance(value, Tensor):
            trees[place + 1] = BARE
            return (value,), None
        state, tree = flatten(value)
        opaque = tree.opaque()
        if opaque is not None:
            raise ReplayError(
                f"{self.name} returns a {type(opaque).__name__}, in which recoup cannot find the "
                'tensors. Return tensors in tuples, lists or dicts, or use memory="linear".'
            )
        trees[place + 1] = tree
        return state, None

    def inverse(self, state: State) -> State:
        fn: Any = self._parts[0][0]  # schedules that invert have no groups
        given = self._trees[self._place + 1].unflatten(state)
        return flatten(value_of(fn, fn.inverse(given), given, "inverse"))[0]


def _spared(value: Any, state: State) -> Any:
    """Return a value to be changed in place, or copies where the schedule may keep its tensors."""
    tensors, tree = flatten(value)
    if set(map(storage_id, state)).isdisjoint(map(storage_id, tensors)):
        return value
    return tree.unflatten(tuple([tensor.clone() for tensor in tensors]))
