"""Chains whose `memory` may be bytes: they plan in their first forward.

NOTE [ Chains that plan themselves ]

Rule 1. A chain imports its `Budget` from here: `Sequential`, and the chains of invertible layers.
Rule 2. The plan is made in the first forward with gradients. Another is made if a later forward may
        need more memory: arguments that are larger in any dimension or of another type, an input or
        a parameter that requires a gradient and did not, a module that trains and did not, another
        autocast, or other modules; and where the drift guard has refused what an inverse returned.
        Plans of before are followed again where they suffice, so that shapes of which none covers
        another do not plan at each step; those of other modules are forgotten.
Rule 3. A forward whose backward has not come holds bytes of the budget. One more forward beside it
        is an error before it takes memory, unless both fit (See NOTE [ Pending forwards ]).
Rule 4. The outermost budget applies: a chain within another chain that has a budget, or within a
        region that is recomputed in backward, makes no plan of its own.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from recoup._core.compile import is_traced, is_watched, uncompiled
from recoup._core.drift_guard import Drift, DriftGuard
from recoup._core.executor import Executor, executor_for
from recoup._core.rng import is_run_again
from recoup.errors import BudgetError
from recoup.memory.size import parse_bytes
from recoup.planning.arguments import ArgumentShapes, shapes_of
from recoup.planning.forwards import Args, enclosing_checkpoints
from recoup.planning.frontier import frontier_of
from recoup.planning.options import PlanOptions
from recoup.planning.pending import PendingForwards
from recoup.planning.plan import Plan
from recoup.schedules import Schedule, Way
from recoup.schedules.memory import Memory, shown


def is_bytes(memory: object) -> TypeGuard[str]:
    """Whether `memory` looks like bytes with a unit, such as ``"2 GiB"``."""
    return isinstance(memory, str) and memory.lstrip(" .")[:1].isdigit()


class _Here(threading.local):
    is_within = False


_here = _Here()
_planning = threading.RLock()  # one thread plans, and others wait for its plan
_MOST_PLANS = 64  # of a chain that are remembered


class Budget:
    """The byte budget for a step of a chain, and the plan that keeps to it.

    A copy, made with a copy of the chain, has the same budget and no plan yet.

    Args:
        bytes_: the budget with a unit, such as ``"2 GiB"``; None for no bound.
    """

    def __init__(self, bytes_: str | None = None) -> None:
        self._bytes = bytes_
        self._plans: list[tuple[ArgumentShapes, Plan]] = []
        self._others: tuple[object, ...] = ()  # what else they depend on (See Rule 2)
        self._pending = PendingForwards()

    @property
    def is_bound(self) -> bool:
        """Whether there is a bound."""
        return self._bytes is not None

    def bound(self, memory: object) -> None:
        """Set the bound to `memory`, or remove it if `memory` does not begin as bytes do."""
        bytes_ = memory if is_bytes(memory) else None
        if bytes_ is not None:
            parse_bytes(bytes_, name="memory")  # or it is no number of bytes
        self._remove_plans()
        self._bytes = bytes_

    def run(
        self,
        chain: nn.Module,
        call: Callable[..., Any],
        args: Args,
        blocks: Iterable[nn.Module],
        guard: DriftGuard | None = None,
        loss: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return the result of `call` under a plan that keeps to the budget.

        Args:
            chain: the chain that the budget is for.
            call: a function that calls the blocks, without recomputing any of them itself.
            args: its arguments.
            blocks: modules of the chain; a module may occur several times.
            guard: the drift guard of blocks that are inverted; None to invert none.
            loss: the loss that follows in each step, as for `recoup.plan`.
        """
        if is_watched():
            return uncompiled(Budget.run)(self, chain, call, args, blocks, guard, loss)
        if _here.is_within or is_run_again() or is_traced():
            return call(*args)  # See Rule 4
        _here.is_within = True
        try:
            with _planning:
                plan = self._followed(chain, call, args, blocks, guard, loss)
            if plan is None or enclosing_checkpoints() != (0, None):
                return call(*args)
            bound = plan.bound(self._pending)
            try:
                bound.check(chain)  # See Rule 3
            except BudgetError as error:
                error.args = (str(error).replace("Plan with", "Give it to recoup.plan with", 1),)
                raise
            output = call(*args)
            self._pending.add(output, bound.held[0], 0)
            return output
        finally:
            _here.is_within = False

    def _followed(
        self,
        chain: nn.Module,
        call: Callable[..., Any],
        args: Args,
        blocks: Iterable[nn.Module],
        guard: DriftGuard | None,
        loss: Callable[[Any], Any] | None,
    ) -> Plan | None:
        """Let the chain follow a plan that suffices for these arguments, if any (See Rule 2)."""
        if self._bytes is None or not torch.is_grad_enabled():
            return None
        shapes = shapes_of(chain, args, {})
        if not shapes.has_backward:
            return None
        distinct = tuple({id(each): each for each in blocks}.values())
        others = (distinct, guard, None if guard is None else guard.kept)
        if others != self._others:
            self._remove_plans()
            self._others = others
        for known, plan in reversed(self._plans):
            if known.cover(shapes):
                return plan.apply_while_held()
        for _, plan in self._plans:
            plan.remove()
        options = PlanOptions(loss=loss, blocks=distinct)
        frontier = frontier_of(options.step(chain, call, args, {}), options, guard)
        try:
            made = frontier.plan(self._bytes)
        except BudgetError as error:  # the user has set `memory`
            error.args = (str(error).replace("`budget`", "`memory`", 1),)
            raise
        self._plans = [*self._plans[-_MOST_PLANS + 1 :], (shapes, made.apply_while_held())]
        return made

    def _remove_plans(self) -> None:
        plans, self._plans = self._plans, []
        for _, plan in plans:
            plan.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Budget:
        return Budget(self._bytes)

    def __reduce__(self) -> Any:
        return Budget, (self._bytes,)


class HasMemoryMode(nn.Module):
    """A chain of modules whose `memory` and `drift` may be changed at any time."""

    def _set_memory_mode(self, memory: Memory, drift: Drift) -> None:
        self._drift = DriftGuard.of(drift)
        self._budget = Budget()
        self.memory = memory

    @property
    def drift(self) -> DriftGuard:
        """The drift guard: checks inverses and records their drift."""
        return self._drift

    @drift.setter
    def drift(self, drift: Drift) -> None:
        self._drift = DriftGuard.of(drift)

    @property
    def memory(self) -> Memory:
        """The memory mode of the chain."""
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self._check_memory(memory)
        self._budget.bound(memory)
        self._memory: Memory = memory
        self._executor: tuple[object, Executor] | None = None

    @abstractmethod
    def _check_memory(self, memory: Memory) -> None:
        """Raise a ValueError if `memory` is unknown, or does not apply to this chain."""

    @property
    def _memory_of_other_lengths(self) -> Memory:
        """The memory mode for a chain of another length that is made from this one."""
        return "linear" if isinstance(self._memory, Schedule) else self._memory

    def _ready_executor(self, links: Mapping[str, Any], ways: Sequence[Way] | None) -> Executor:
        """Return the executor for these links, the previous one if nothing has changed.

        `ways` are those in which each restores its input under "constant"; None in other modes.
        """
        key = (len(links), ways, self._drift, self._drift.kept)
        if self._executor is None or self._executor[0] != key:
            self._executor = (key, executor_for(self._memory, links, ways, self._drift))
        return self._executor[1]

    def extra_repr(self) -> str:
        """Return the memory mode, for the repr."""
        return f"memory={shown(self._memory)}"
