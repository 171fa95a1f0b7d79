"""Any chain of modules, with a choice of what its backward remembers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recoup._core.callable_chain import Otherwise, plan_for, run_through, value_of, ways_of
from recoup._core.drift_guard import Drift, DriftGuard
from recoup._core.executor import Executor
from recoup.planning.budget import Budget, is_bytes
from recoup.schedules import Schedule, Way
from recoup.schedules.memory import Memory, schedule_for, shown

__all__ = ["Sequential"]


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` with a choice of what its backward remembers.

    ==============  ==========================================  ================================
    `memory`        kept, for n modules                         backward pays
    ==============  ==========================================  ================================
    ``"linear"``    every residual                              nothing
    ``"inputs"``    the input of each                           one forward, but for the last
    ``"sqrt"``      about ``sqrt(2 n)`` states and tapes        less than one forward
    ``"log"``       about ``log4(n)`` states and tapes          at most about log4(n) forwards
    a number        that many states, a tape before each        the fewest forwards possible
    ``"constant"``  the output, and the input for a guard       one inverse of each module
    ``"2 GiB"``     what fits, by `recoup.plan`                 the least that this allows
    ==============  ==========================================  ================================

    A state is what goes from one module to the next, a tape is what one module keeps. Gradients,
    buffers and the random stream are those of ``nn.Sequential``, bit for bit; under "constant" to
    rounding.

    Args:
        modules: the modules, or one ordered dictionary of them, as for ``nn.Sequential``. What
            goes from one to the next may be tensors in tuples, lists and dicts.
        memory: "linear", "inputs", "sqrt", "log", "constant", a number of slots, bytes with a
            unit for a step of this chain alone (the plan is made in the first forward, and made
            anew for a larger input), or a `recoup.schedules.Schedule`; may be changed at any time
            by assignment.
        otherwise: under "constant", what to do with a module that cannot be inverted (it has no
            method ``inverse``): "recompute" it from its kept input, or "keep" its residuals. An
            invertible module may return ``(y, log_det)``; ``log_det`` is left out here, and
            `recoup.invertible.Chain` sums it.
        drift: under "constant", what to do where inverses do not find their way back:
            "recompute", "raise", "warn", "ignore", or a `recoup.invertible.DriftGuard`.

    Raises:
        ValueError: `memory` or `otherwise` is unknown.
        NotInvertibleError: under "constant", a module has no inverse and `otherwise` is not given.
        BudgetError: in forward, no plan keeps to the bytes.

    Example:
        >>> import recoup, torch
        >>> blocks = [torch.nn.Linear(8, 8) for _ in range(10)]
        >>> model = recoup.Sequential(*blocks, memory="sqrt")
        >>> model(torch.ones(2, 8)).shape
        torch.Size([2, 8])

    Chen et al., https://arxiv.org/abs/1604.06174; Griewank and Walther, "Algorithm 799: Revolve".
    """

    def __init__(
        self,
        *modules: Any,
        memory: Memory = "linear",
        otherwise: Otherwise = None,
        drift: Drift = "recompute",
    ) -> None:
        super().__init__(*modules)
        ways_of({}, otherwise)  # raises if it is unknown
        self.otherwise: Otherwise = otherwise
        self._drift = DriftGuard.of(drift)
        self._plan: tuple[object, Executor] | None = None
        self._budget = Budget()
        self.memory = memory

    @property
    def drift(self) -> DriftGuard:
        """What happens where inverses do not find their way back, and what was seen of them."""
        return self._drift

    @drift.setter
    def drift(self, drift: Drift) -> None:
        self._drift = DriftGuard.of(drift)

    @property
    def memory(self) -> Memory:
        """What backward remembers."""
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        if len(self) and not is_bytes(memory):
            schedule_for(memory, len(self), self._ways(memory))  # raises if it is unknown
        self._budget.bound(memory)
        self._memory: Memory = memory
        self._plan = None

    def forward(self, input: Any) -> Any:
        """Call the modules in order."""
        if not torch.is_grad_enabled() or self._memory == "linear" or not len(self):
            return self._forward_plainly(input)
        if self._budget.is_bound:
            return self._budget.run(self, self._forward_plainly, (input,), self)
        return run_through(self._ready_plan(), self._links(), input)

    def _forward_plainly(self, input: Any) -> Any:
        for module in self:
            input = value_of(module, module(input), input)
        return input

    def _ready_plan(self) -> Executor:
        ways = self._ways(self._memory)
        key = (len(self), ways, self.drift, self.drift.kept)
        if self._plan is None or self._plan[0] != key:
            self._plan = (key, plan_for(self._memory, self._links(), ways, self.drift))
        return self._plan[1]

    def _links(self) -> dict[str, Any]:
        return {
            f"module `{name}` ({type(module).__name__})": module
            for name, module in self._modules.items()
        }

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, Sequential) and isinstance(index, slice):
            found.otherwise = self.otherwise
            found.drift = self._drift.anew()
            found.memory = self._carried
        return found

    def _ways(self, memory: Memory) -> tuple[Way, ...] | None:
        return ways_of(self._links(), self.otherwise) if memory == "constant" else None

    def __add__(self, other: Any) -> Sequential:
        return self._of([*self, *other])

    def __mul__(self, other: int) -> Sequential:
        return self._of([module for _ in range(other) for module in self])

    def _of(self, modules: list[Any]) -> Sequential:
        return Sequential(
            *modules, memory=self._carried, otherwise=self.otherwise, drift=self._drift.anew()
        )

    @property
    def _carried(self) -> Memory:
        """What a chain of another length may take over."""
        return "linear" if isinstance(self._memory, Schedule) else self._memory

    def extra_repr(self) -> str:
        """Show the memory mode."""
        return f"memory={shown(self._memory)}"
