"""`recoup.Sequential`: a chain of modules with a choice of what its backward remembers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from recoup._arguments import check_flag, check_type
from recoup._core.compile import break_graph, is_followed
from recoup._core.drift_guard import Drift
from recoup._core.executor import Otherwise, run_through, value_of, ways_of
from recoup.planning.budget import HasMemoryMode, is_bytes
from recoup.regions.recompute import checkpoint_in_graph
from recoup.schedules import Way
from recoup.schedules.memory import Memory, schedule_for, segment_lengths

_NOT_IN_GRAPH = (
    "A recoup.Sequential with this `memory` runs outside of graphs. In a graph there are "
    'memory="linear", "inputs" and "sqrt". Or compile the modules in it one by one, or leave '
    "`fullgraph` out."
)


class Sequential(HasMemoryMode, nn.Sequential):
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

    A state is a value passed from one module to the next, a tape the residuals of one module.
    Gradients, buffers and the random stream are those of ``nn.Sequential``, bit for bit; to
    rounding under "constant", and under bytes if modules have a method ``inverse``: these may be
    inverted then.

    In a graph of torch.compile "inputs" and "sqrt" call torch's own checkpoint, around each segment
    but the last; the graph breaks at a chain with another `memory`.

    Args:
        modules: the modules, or one ordered dictionary of them, as for ``nn.Sequential``. Values
            passed from one to the next may be tensors in tuples, lists and dicts.
        memory: "linear", "inputs", "sqrt", "log", "constant", a number of slots, bytes with a
            unit for a step of this chain alone, of one forward (the plan is made in the first one,
            which takes the bytes of a plain step if there is room, and anew for a larger input), or
            a `recoup.schedules.Schedule`; may be changed at any time by assignment.
        otherwise: under "constant", what to do with a module that cannot be inverted (it has no
            method ``inverse``): "recompute" it from its kept input, or "keep" its residuals. An
            invertible module may return ``(y, log_det)``; ``log_det`` is left out here, and
            `recoup.invertible.Chain` sums it.
        drift: under "constant" and bytes, what to do where inverses do not reproduce the inputs:
            "recompute", "raise", "warn", "ignore", or a `recoup.invertible.DriftGuard`.
        compare: whether what second runs make is compared with the first, as for `checkpoint`.

    Raises:
        ValueError: `memory` or `otherwise` is unknown.
        NotInvertibleError: under "constant", a module has no inverse and `otherwise` is not given.
        BudgetError: in forward, no plan keeps to the bytes, or not beside forwards whose backward
            has not come.

    Example:
        >>> import recoup, torch
        >>> blocks = [torch.nn.Linear(8, 8) for _ in range(10)]
        >>> model = recoup.Sequential(*blocks, memory="sqrt")
        >>> model(torch.ones(2, 8)).shape
        torch.Size([2, 8])

    Source: Chen et al., https://arxiv.org/abs/1604.06174; Griewank and Walther, "Algorithm 799:
    Revolve".
    """

    def __init__(
        self,
        *modules: Any,
        memory: Memory = "linear",
        otherwise: Otherwise = None,
        drift: Drift = "recompute",
        compare: bool = True,
    ) -> None:
        check_flag(compare=compare)
        for each in modules:
            check_type((nn.Module, OrderedDict), "an nn.Module", modules=each)
        super().__init__(*modules)
        self.compare = compare
        ways_of({}, otherwise)  # raises if it is unknown
        self.otherwise: Otherwise = otherwise
        self._set_memory_mode(memory, drift)

    def _check_memory(self, memory: Memory) -> None:
        if len(self) and not is_bytes(memory):
            schedule_for(memory, len(self), self._ways() if memory == "constant" else None)

    def forward(self, input: Any) -> Any:
        """Call the modules in order."""
        if not torch.is_grad_enabled() or self._memory == "linear" or not len(self):
            return self._forward_plainly(input)
        if is_followed():
            if self._memory in ("inputs", "sqrt"):
                return self._forward_in_graph(input)
            break_graph(_NOT_IN_GRAPH)
        if self._budget.is_bound:
            return self._budget.run(self, self._forward_plainly, (input,), self, self._drift)
        links = self._links()
        ways = self._ways() if self._memory == "constant" else None
        executor = self._ready_executor(links, ways)
        return run_through(executor, links, input, compares=self.compare)

    def _forward_plainly(self, input: Any) -> Any:
        return _through(self, input)

    def _forward_in_graph(self, input: Any) -> Any:
        """Call the modules in checkpoints, as the schedule has them: all but the last segment."""
        modules = list(self)
        lengths = segment_lengths(len(modules)) if self._memory == "sqrt" else [1] * len(modules)
        start = 0
        for length in lengths[:-1]:
            segment = modules[start : start + length]
            input = checkpoint_in_graph(_through, segment, input, use_reentrant=False)
            start += length
        return _through(modules[start:], input)

    def _links(self) -> dict[str, Any]:
        links: dict[str, Any] = {}
        for name, module in self._modules.items():
            links[f"module `{name}` ({type(module).__name__})"] = module
        return links

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, Sequential) and isinstance(index, slice):
            found.otherwise, found.compare = self.otherwise, self.compare
            found.drift = self._drift.anew()
            found.memory = self._memory_of_other_lengths
        return found

    def _ways(self) -> tuple[Way, ...]:
        return ways_of(self._links(), self.otherwise)

    def __add__(self, other: Any) -> Sequential:
        return self._of([*self, *other])

    def __mul__(self, other: int) -> Sequential:
        return self._of([module for _ in range(other) for module in self])

    def _of(self, modules: list[Any]) -> Sequential:
        return Sequential(
            *modules,
            memory=self._memory_of_other_lengths,
            otherwise=self.otherwise,
            drift=self._drift.anew(),
            compare=self.compare,
        )


def _through(modules: Iterable[nn.Module], input: Any) -> Any:
    for module in modules:
        input = value_of(module, module(input), input)
    return input
