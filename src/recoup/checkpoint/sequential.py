"""Any chain of modules, with a choice of what its backward remembers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from recoup.errors import NotInvertibleError, ReplayError
from recoup.residuals.executor import Plan
from recoup.residuals.stage import State
from recoup.residuals.tree import Tree, flatten
from recoup.schedules import Schedule, Way
from recoup.schedules.memory import Memory, schedule_for, shown

__all__ = ["Sequential"]


@runtime_checkable
class _Invertible(Protocol):
    def inverse(self, y: Any) -> Any: ...


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` with a choice of what its backward remembers.

    ==============  ==========================================  ================================
    `memory`        kept, for n modules                         backward pays
    ==============  ==========================================  ================================
    ``"linear"``    every residual                              nothing
    ``"sqrt"``      about ``sqrt(2 n)`` states and tapes        less than one forward
    ``"log"``       about ``log4(n)`` states and tapes          at most about log4(n) forwards
    a number        that many states, a tape before each        the fewest forwards possible
    ``"constant"``  the output                                  one inverse of each module
    ==============  ==========================================  ================================

    A state is what goes from one module to the next, a tape is what one module keeps. Gradients,
    buffers and the random stream are those of ``nn.Sequential``, bit for bit; under "constant" to
    rounding.

    Args:
        modules: the modules, or one ordered dictionary of them, as for ``nn.Sequential``. What
            goes from one to the next may be tensors in tuples, lists and dicts.
        memory: "linear", "sqrt", "log", "constant", a number of slots, or a
            `recoup.schedules.Schedule`; may be changed at any time by assignment.
        otherwise: under "constant", what to do with a module that cannot be inverted (it has no
            method ``inverse``): "recompute" it from its kept input, or "keep" its residuals. An
            invertible module may return ``(y, log_det)``; ``log_det`` is left out here, and
            `recoup.invertible.Chain` sums it.

    Raises:
        ValueError: `memory` or `otherwise` is unknown.
        NotInvertibleError: under "constant", a module has no inverse and `otherwise` is not given.

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
        otherwise: Literal["recompute", "keep"] | None = None,
    ) -> None:
        super().__init__(*modules)
        if otherwise not in (None, "recompute", "keep"):
            raise ValueError(
                f'`otherwise` is {otherwise!r}, but must be "recompute", "keep" or None.'
            )
        self.otherwise: Literal["recompute", "keep"] | None = otherwise
        self._plan: tuple[object, Plan] | None = None
        self.memory = memory

    @property
    def memory(self) -> Memory:
        """What backward remembers."""
        return self._memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        if len(self):
            _planned(memory, self._ways() if memory == "constant" else None, len(self))
        self._memory: Memory = memory
        self._plan = None

    def forward(self, input: Any) -> Any:
        """Call the modules in order."""
        if not torch.is_grad_enabled() or self._memory == "linear" or not len(self):
            for module in self:
                input = _value(module, module(input))
            return input
        state, tree = flatten(input)
        trees = [tree] * (len(self) + 1)
        stages = [
            _Stage(index, name, module, trees)
            for index, (name, module) in enumerate(self._modules.items())
        ]
        state, _ = self._ready_plan().execute(stages, state)
        return trees[-1].unflatten(state)

    def _ready_plan(self) -> Plan:
        ways = self._ways() if self._memory == "constant" else None
        key = (len(self), ways)
        if self._plan is None or self._plan[0] != key:
            plan = _planned(self._memory, ways, len(self))
            self._check_inverses(plan)
            self._plan = (key, plan)
        return self._plan[1]

    def _check_inverses(self, plan: Plan) -> None:
        for index, (name, module) in enumerate(self._modules.items()):
            if index in plan.inverted and not isinstance(module, _Invertible):
                raise NotInvertibleError(
                    f"The schedule inverts module `{name}` ({type(module).__name__}), which has no "
                    "method `inverse`. Give it one, or tape or recompute it in the schedule."
                )

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, Sequential) and isinstance(index, slice):
            found.otherwise = self.otherwise
            found.memory = self._carried
        return found

    def _ways(self) -> tuple[Way, ...]:
        otherwise = self.otherwise
        ways: list[Way] = []
        for name, module in self._modules.items():
            if isinstance(module, _Invertible):
                ways.append("invert")
            elif otherwise is None:
                raise NotInvertibleError(
                    f'`memory` is "constant", but module `{name}` ({type(module).__name__}) has '
                    'no inverse. Use "sqrt" or "log", or say otherwise="recompute" or '
                    'otherwise="keep" for the modules without one.'
                )
            else:
                ways.append(otherwise)
        return tuple(ways)

    def __add__(self, other: Any) -> Sequential:
        return Sequential(*self, *other, memory=self._carried, otherwise=self.otherwise)

    def __mul__(self, other: int) -> Sequential:
        modules = [module for _ in range(other) for module in self]
        return Sequential(*modules, memory=self._carried, otherwise=self.otherwise)

    @property
    def _carried(self) -> Memory:
        """What a chain of another length may take over."""
        return "linear" if isinstance(self._memory, Schedule) else self._memory

    def extra_repr(self) -> str:
        """Show the memory mode."""
        return f"memory={shown(self._memory)}"


def _planned(memory: Memory, ways: Sequence[Way] | None, num_stages: int) -> Plan:
    return Plan(schedule_for(memory, num_stages, ways))


def _value(module: nn.Module, output: Any) -> Any:
    """Leave out the log-determinant that an invertible module returns beside its value."""
    return output[0] if getattr(module, "returns_log_det", False) else output


class _Stage:
    """A module between two nested values, whose shapes the first run writes down."""

    __slots__ = ("_index", "_module", "_trees", "name")

    def __init__(self, index: int, name: str, module: nn.Module, trees: list[Tree]) -> None:
        self._index = index
        self.name = f"module `{name}` ({type(module).__name__})"
        self._module: Any = module
        self._trees = trees

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self._module,)

    @property
    def code(self) -> object:
        return self._module

    @property
    def held(self) -> None:
        return None

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        output = self._module(self._trees[self._index].unflatten(state))
        state, tree = flatten(_value(self._module, output))
        opaque = tree.opaque()
        if opaque is not None:
            raise ReplayError(
                f"{self.name} returns a {type(opaque).__name__}, whose tensors cannot be seen. "
                'Return tensors in tuples, lists or dicts, or use memory="linear".'
            )
        self._trees[self._index + 1] = tree
        return state, None

    def inverse(self, state: State) -> State:
        output = self._module.inverse(self._trees[self._index + 1].unflatten(state))
        return flatten(_value(self._module, output))[0]
