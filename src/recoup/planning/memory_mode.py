"""The `memory` and `drift` of a chain, and the executor that they determine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from recoup._core.callable_chain import executor_for
from recoup._core.drift_guard import Drift, DriftGuard
from recoup._core.executor import Executor
from recoup.planning.budget import Budget
from recoup.schedules import Schedule, Way
from recoup.schedules.memory import Memory, shown

__all__ = ["HasMemoryMode"]


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

        Args:
            links: the modules in order, by their names in errors.
            ways: the way in which each restores its input under "constant"; None in other modes.
        """
        key = (len(links), ways, self._drift, self._drift.kept)
        if self._executor is None or self._executor[0] != key:
            self._executor = (key, executor_for(self._memory, links, ways, self._drift))
        return self._executor[1]

    def extra_repr(self) -> str:
        """Return the memory mode, for the repr."""
        return f"memory={shown(self._memory)}"
