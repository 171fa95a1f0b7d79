"""A chain of invertible modules, and its memory modes."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import is_watched, uncompiled
from recoup._core.devices import generators_restored
from recoup._core.drift_guard import Drift
from recoup._core.module_marks import is_hooked
from recoup._core.saved_tensors import detached
from recoup._core.slots import State
from recoup.errors import ConvergenceError
from recoup.invertible.chain_stages import (
    ModuleStage,
    StageGroup,
    check_defined,
    joined,
    state_of,
    to_output,
    to_state,
)
from recoup.invertible.channels import ActNorm
from recoup.invertible.contract import Adapted, InvertibleModule
from recoup.planning.budget import HasMemoryMode, is_bytes
from recoup.schedules import Way
from recoup.schedules.memory import Memory, schedule_for


class Chain(HasMemoryMode, InvertibleModule):
    """Invertible modules in sequence, with a choice of what autograd keeps for backward.

    With ``memory="constant"`` the chain keeps its output, and its input for the guard: backward
    inverts the modules one by one, and every network runs once in forward and once in backward. A
    `DriftGuard` checks the inputs that the inverses compute. Modules whose inverse is an iteration
    (`InvertibleResidual`) are recomputed from their kept inputs instead, and the chain warns about
    them. The other modes keep and recompute as `recoup.Sequential` does. The gradients are the
    same, up to rounding.

    A chain among the modules is treated as the modules in it, under this chain's `memory` and
    `drift`; under "linear" its own apply.

    A `context` (labels as numbers, features of another network) is passed to the modules that take
    one, and receives its gradient from them.

    A `Split` sends part of its input straight to the output. The output is then a tuple: the early
    latents in the order in which they were split off, and last the value that passed through the
    whole chain.

    Args:
        modules: the invertible modules, data to latent.
        memory: "linear", "inputs", "sqrt", "log", "constant", a number of slots, bytes with a unit,
            or a `recoup.schedules.Schedule`; may be changed at any time by assignment. Bytes
            (``"2 GiB"``) are for a step of this chain alone: in the first forward `recoup.plan`
            chooses what each module keeps so that backward recomputes as little as the bytes
            allow, and does so again for a larger input. Modules are kept, recomputed and inverted
            then, and the gradients are equal to rounding, as under "constant".
        drift: Under "constant" and bytes, what to do when an inverse does not reproduce its input:
            "recompute" (then the first state is kept too), "raise", "warn", "ignore", or a
            `DriftGuard`.

    Raises:
        ValueError: When a module is not invertible, `memory` or `drift` is unknown, or, in a call,
            a module returns something other than a value and its log-determinant.
        NotInvertibleError: When a module defines no `inverse`, and does not set
            ``inverts_in_backward = False`` (for densities that are not sampled), with which it is
            recomputed.
        BudgetError: In forward, when no plan keeps to the bytes.
        DriftError: In backward, when an inverse drifted and `drift` is "raise".

    Example:
        >>> import torch
        >>> from recoup.invertible import ActNorm, Chain, Flip
        >>> chain = Chain(ActNorm(2), Flip(), memory="constant")
        >>> y, log_det = chain(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
        >>> y.shape, log_det.shape
        (torch.Size([2, 2]), torch.Size([2]))

    Gomez et al., "The Reversible Residual Network", https://arxiv.org/abs/1707.04585.
    """

    def __init__(
        self, *modules: nn.Module, memory: Memory = "linear", drift: Drift = "recompute"
    ) -> None:
        super().__init__()
        for index, module in enumerate(modules):
            if not isinstance(module, InvertibleModule):
                raise ValueError(
                    f"`modules[{index}]` is a {type(module).__name__}, which is not an "
                    "InvertibleModule. Derive from recoup.invertible.InvertibleModule, or put it "
                    "in a recoup.Sequential, which takes any module."
                )
            check_defined(index, module)
            self.add_module(str(index), module)
        self._started: list[bool] = []  # the modes of all modules in which layers have started
        self._set_memory_mode(memory, drift)

    def _check_memory(self, memory: Memory) -> None:
        num_stages = sum(1 for _ in self._named(flat=memory != "linear"))
        if num_stages and not is_bytes(memory):
            schedule_for(memory, num_stages)
        if memory == "constant":
            self._say_what_recomputes()

    def _say_what_recomputes(self) -> None:
        modules = dict(self._named(flat=True))
        names = [f"`{name}`" for name, each in modules.items() if not each.inverts_in_backward]
        if names:
            warnings.warn(
                f'Under memory="constant" {len(names)} of {len(modules)} modules '
                f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}) are recomputed from "
                "their kept inputs: their inverses are iterations, which cost more and are not "
                "exact. Memory grows by one input each.",
                stacklevel=4,
            )

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> InvertibleModule:
        return list(self)[index]

    def __iter__(self) -> Iterator[InvertibleModule]:
        return cast("Iterator[InvertibleModule]", iter(self._modules.values()))

    @property
    def takes_context(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a module of the chain takes a context."""
        return any(module.takes_context for module in self)

    @property
    def num_early(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of latents that the chain splits off early."""
        return sum(module.num_early for module in self)

    @property
    def inverts_in_backward(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether every module of the chain inverts in backward; as an outer chain asks."""
        return all(module.inverts_in_backward for module in self)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Any, Tensor]:
        """Map ``x`` of shape ``(N, ...)`` to ``(y, log_det)``, ``log_det`` of shape ``(N,)``."""
        self._check_context(context)
        if not torch.is_grad_enabled() or self._memory == "linear" or not len(self):
            return self._forward_plainly(x, context)
        return (uncompiled(Chain._forward) if is_watched() else Chain._forward)(self, x, context)

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Any, Tensor]:
        stages = self._module_stages(context)
        if self._budget.is_bound or True in [stage.is_adapted for stage in stages]:
            self._start(x, context)
        if self._budget.is_bound:
            blocks = [stage.module for stage in stages]
            call, args = self._forward_plainly, (x, context)
            return self._budget.run(self, call, args, blocks, self._drift)
        units = joined(stages) if self._memory == "constant" else stages
        links = {
            unit.name: unit.module if isinstance(unit, ModuleStage) else unit for unit in units
        }
        ways: list[Way] = [
            "invert" if each.inverts_in_backward else "recompute" for each in links.values()
        ]
        executor = self._ready_executor(links, tuple(ways))
        groups: list[ModuleStage | StageGroup] = []
        for each in executor.groups:
            several = units[each.start : each.stop]
            groups.append(several[0] if len(several) == 1 else StageGroup(several))
        state, values = executor.execute(groups, state_of(x, context))
        log_dets: list[Tensor] = []
        for value in values:
            log_dets += value if isinstance(value, list) else (value,)
        return self._to_pair(x, context, state, log_dets)

    def _forward_plainly(self, x: Tensor, context: Tensor | None) -> tuple[Any, Tensor]:
        state = state_of(x, context)
        log_dets: list[Tensor] = []
        for stage in self._module_stages(context):
            state, value = stage.forward(state)
            log_dets.append(value)
        return self._to_pair(x, context, state, log_dets)

    def _to_pair(
        self, x: Tensor, context: Tensor | None, state: State, log_dets: list[Tensor]
    ) -> tuple[Any, Tensor]:
        if context is not None:
            state = (state[0], *state[2:])
        return to_output(state), self._sum(iter(log_dets), x, flat=self._is_flat)

    @torch.no_grad()
    def _start(self, x: Tensor, context: Tensor | None) -> None:
        """Let layers start from their first batch, in a forward that changes nothing else.

        That is needed once in each mode, in which it finds all of them started if it runs again.
        """
        modules = list(self.modules())
        modes = [module.training for module in modules]
        if modes == self._started or not any(isinstance(m, Adapted | ActNorm) for m in modules):
            return
        with _buffers_restored(modules), generators_restored():
            state = state_of(x, context)
            for stage in self._module_stages(context):
                with torch.enable_grad():  # some layers take gradients themselves
                    state = detached(stage.forward(state)[0])
        self._started = modes

    def inverse(self, y: Any, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map ``y``, as `forward` returns it, to ``(x, log_det)``."""
        self._check_context(context)
        state = to_state(y)
        if context is not None:
            state = (state[0], context, *state[1:])
        log_dets: list[Tensor] = []
        for stage in reversed(self._module_stages(context)):
            try:
                state, value = stage.invert(state)
            except (ConvergenceError, NotImplementedError) as error:
                error.add_note(f"It is {stage.name} of the chain.")
                raise
            log_dets.append(value)
        log_dets.reverse()  # so that both directions add in the same order
        return state[0], self._sum(iter(log_dets), state[0], flat=self._is_flat)

    def _check_context(self, context: Tensor | None) -> None:
        if context is not None and not self.takes_context:
            raise ValueError(
                "`context` is given, but no module of the chain takes one, so it would change "
                "nothing. Leave it out, or give couplings networks with `takes_context = True`."
            )

    @property
    def _is_flat(self) -> bool:
        return self._memory != "linear"

    def _module_stages(self, context: Tensor | None) -> list[ModuleStage]:
        return [
            ModuleStage(name, module, context) for name, module in self._named(flat=self._is_flat)
        ]

    def _named(self, *, flat: bool) -> Iterator[tuple[str, InvertibleModule]]:
        """Yield the modules in order with their names; if `flat`, inner chains as their modules."""
        for index, module in enumerate(self):
            if flat and _is_flat(module):
                for name, inner in module._named(flat=True):
                    yield f"{index}.{name}", inner
            else:
                yield str(index), module

    def _sum(self, log_dets: Iterator[Tensor], like: Tensor, *, flat: bool) -> Tensor:
        """Sum the log-determinants of the stages, each inner chain first: addition rounds."""
        if not len(self):
            dtype = like.dtype if like.is_floating_point() else None
            return torch.zeros(len(like), device=like.device, dtype=dtype)
        values = [
            module._sum(log_dets, like, flat=True) if flat and _is_flat(module) else next(log_dets)
            for module in self
        ]
        return sum(values[1:], values[0])


@contextmanager
def _buffers_restored(modules: Iterable[nn.Module]) -> Generator[None]:
    """Restore the buffers of modules, but of one that has set its parameters: it has started."""
    before = [
        (
            module,
            [(p, p.clone()) for p in module.parameters(recurse=False)],
            {name: (b, b.clone()) for name, b in module.named_buffers(recurse=False)},
        )
        for module in modules
        if any(True for _ in module.buffers(recurse=False))
    ]
    try:
        yield
    finally:
        for module, parameters, buffers in before:
            if all(torch.equal(*pair) for pair in parameters):
                for name, (buffer, value) in buffers.items():
                    setattr(module, name, value if buffer.is_inference() else buffer.copy_(value))


def _is_flat(module: nn.Module) -> TypeGuard[Chain]:
    """Return whether a module is a chain whose modules may be called in its place."""
    return type(module) is Chain and not is_hooked(module)
