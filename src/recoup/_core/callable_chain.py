"""A chain of callables, each from one nested value to the next, run under a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from recoup._core.captured import parts_of
from recoup._core.drift_guard import DriftGuard
from recoup._core.executor import Executor
from recoup._core.log_det_pairs import Direction, check_pair, has_inverse
from recoup._core.module_marks import mark_of
from recoup._core.pytree import BARE, Tree, flatten
from recoup._core.region import State
from recoup.errors import NotInvertibleError, ReplayError
from recoup.schedules import Way
from recoup.schedules.memory import Memory, schedule_for

__all__ = ["Otherwise", "executor_for", "run_through", "value_of", "ways_of"]

Otherwise = Literal["recompute", "keep"] | None


def ways_of(callables: Mapping[str, Any], otherwise: Otherwise) -> tuple[Way, ...]:
    """Return the way in which each callable gets its input back under "constant".

    Args:
        callables: the callables in order, by their names in error messages.
        otherwise: the way of callables that cannot be inverted; None if those are an error.
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
    """Return the executor for `memory` and these callables; raise if one lacks an inverse."""
    ways = None if ways is None else guard.ways(ways)
    executor = Executor(schedule_for(memory, len(callables), ways), guard=guard)
    for index, (name, fn) in enumerate(callables.items()):
        if index in executor.prepared.inverted and not has_inverse(fn):
            raise NotInvertibleError(
                f"The schedule inverts {name}, which has no method `inverse`. Define one, or use "
                "a schedule that tapes or recomputes this stage."
            )
    return executor


def run_through(
    executor: Executor, callables: Mapping[str, Any], value: Any, *, compares: bool = True
) -> Any:
    """Call each of the callables in order; backward follows the schedule.

    Args:
        executor: the executor of the schedule.
        callables: the callables in order, by their names in error messages.
        value: the input of the first one.
        compares: whether what later runs make is compared with the first.
    """
    state, tree = flatten(value)
    trees = [tree] * (len(callables) + 1)
    stages = [
        _CallableStage(index, name, fn, trees, compares)
        for index, (name, fn) in enumerate(callables.items())
    ]
    state, _ = executor.execute(stages, state)
    return trees[-1].unflatten(state)


def value_of(fn: Any, output: Any, given: Any, direction: Direction = "forward") -> Any:
    """Return `output` without the log-determinant that an invertible module adds to its value.

    Args:
        fn: the callable.
        output: the result of the call.
        given: the input of the call.
        direction: the method that was called.
    """
    if not mark_of(fn, "returns_log_det"):
        return output
    tensors, _ = flatten(given)
    if tensors and tensors[0].dim():
        num_early = getattr(fn, "num_early", 0) if direction == "forward" else 0
        name = type(fn).__name__
        check_pair(output, len(tensors[0]), direction, name, num_early=num_early)
    return output[0]


class _CallableStage:
    """One callable as a stage; the first run records the structures of its input and output."""

    __slots__ = (
        "_fn",
        "_index",
        "_returns_log_det",
        "_trees",
        "code",
        "compares",
        "modules",
        "name",
    )

    def __init__(self, index: int, name: str, fn: Any, trees: list[Tree], compares: bool) -> None:
        self._index = index
        self._fn = fn
        self._trees = trees
        self.name = name
        self.compares = compares
        self.code, self.modules = (fn, [fn]) if isinstance(fn, nn.Module) else parts_of(fn)
        self._returns_log_det = mark_of(fn, "returns_log_det")

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        trees, index = self._trees, self._index
        given = state[0] if trees[index] is BARE else trees[index].unflatten(state)
        output = self._fn(given)
        if self._returns_log_det:
            output = value_of(self._fn, output, given)
        if isinstance(output, Tensor):
            trees[index + 1] = BARE
            return (output,), None
        state, tree = flatten(output)
        opaque = tree.opaque()
        if opaque is not None:
            raise ReplayError(
                f"{self.name} returns a {type(opaque).__name__}, in which recoup cannot find the "
                'tensors. Return tensors in tuples, lists or dicts, or use memory="linear".'
            )
        trees[index + 1] = tree
        return state, None

    def inverse(self, state: State) -> State:
        given = self._trees[self._index + 1].unflatten(state)
        return flatten(value_of(self._fn, self._fn.inverse(given), given, "inverse"))[0]
