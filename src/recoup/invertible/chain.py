"""A chain of invertible modules, and its memory modes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, TypeGuard, cast, overload

import torch
from torch import Tensor, nn

from recoup._core.compile import is_watched, uncompiled
from recoup._core.devices import generators_restored
from recoup._core.drift_guard import Drift, DriftGuard
from recoup._core.modules import is_hooked
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
from recoup.schedules import Schedule, Way
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
        self._set_memory_mode(memory, drift)

    def _check_memory(self, memory: Memory) -> None:
        num_stages = sum(1 for _ in self._named(flat=memory != "linear"))
        if num_stages and not is_bytes(memory):
            schedule_for(memory, num_stages)
        if memory == "constant":
            self._say_what_recomputes()

    def _say_what_recomputes(self) -> None:
        names = [name for name, module in self._named(flat=True) if not module.inverts_in_backward]
        if names:
            shown_names = ", ".join(f"`{name}`" for name in names[:3])
            warnings.warn(
                f'Under memory="constant" {len(names)} of {len(list(self._named(flat=True)))} '
                f"modules ({shown_names}{', ...' if len(names) > 3 else ''}) are recomputed from "
                "their kept inputs: their inverses are iterations, which cost more and are not "
                "exact. Memory grows by one input each.",
                stacklevel=4,
            )

    def __len__(self) -> int:
        return len(self._modules)

    @overload
    def __getitem__(self, index: int) -> InvertibleModule: ...
    @overload
    def __getitem__(self, index: slice) -> Chain: ...
    def __getitem__(self, index: int | slice) -> InvertibleModule:
        modules = list(self)
        if isinstance(index, int):
            return modules[index]
        return Chain(
            *modules[index], memory=self._memory_of_other_lengths, drift=self._drift.anew()
        )

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
        if self._budget.is_bound:
            self._start(x, context)
            blocks = [module for _, module in self._named(flat=True)]
            call, args = self._forward_plainly, (x, context)
            return self._budget.run(self, call, args, blocks, self._drift)
        stages = self._module_stages(context)
        if False in [stage.module.has_started for stage in stages if stage.is_adapted]:
            self._start(x, context)
        units = joined(stages) if self._memory == "constant" else stages
        links = {
            unit.name: unit.module if isinstance(unit, ModuleStage) else unit for unit in units
        }
        ways: tuple[Way, ...] = tuple(
            ["invert" if each.inverts_in_backward else "recompute" for each in links.values()]
        )
        executor = self._ready_executor(links, ways)
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
        """Let layers start from their first batch, in a forward that changes nothing else."""
        modules = list(self.modules())
        adapted = [m for m in modules if isinstance(m, Adapted) and not m.has_started]
        norms = [m for m in modules if isinstance(m, ActNorm) and m.training and not m.started]
        if not adapted and not norms:
            return
        before = [_OwnTensors(m) for m in modules if any(True for _ in m.buffers(recurse=False))]
        try:
            with generators_restored():
                state = state_of(x, context)
                for stage in self._module_stages(context):
                    with torch.enable_grad():  # some layers take gradients themselves
                        state = detached(stage.forward(state)[0])
            for each in adapted:
                each.has_seen_a_batch()
        finally:
            for each in before:
                each.restore_buffers()

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
        total: Tensor | None = None
        for module in self:
            if flat and _is_flat(module):
                value = module._sum(log_dets, like, flat=True)
            else:
                value = next(log_dets)
            total = value if total is None else total + value
        if total is not None:
            return total
        dtype = like.dtype if like.is_floating_point() else None
        return torch.zeros(len(like), device=like.device, dtype=dtype)


class HasChain(nn.Module):
    """A module whose `memory` and `drift` are those of its `chain`; parts with chains follow.

    Attributes:
        chain: The chain of the module itself.
    """

    chain: Chain

    @property
    def memory(self) -> Memory:
        """The memory mode of the chain; may be set at any time.

        Setting it also sets that of the parts with chains of their own, except for a `Schedule`,
        which is made for one chain.
        """
        return self.chain.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self.chain.memory = memory
        if not isinstance(memory, Schedule):
            for part in self._parts_with_chains():
                part.memory = memory

    @property
    def drift(self) -> DriftGuard:
        """The `DriftGuard` of the chain, for constant memory; a string may be assigned."""
        return self.chain.drift

    @drift.setter
    def drift(self, drift: Drift) -> None:
        self.chain.drift = drift
        for part in self._parts_with_chains():
            part.drift = self.chain.drift.anew()

    def _parts_with_chains(self) -> list[HasChain]:
        return [part for part in self.children() if isinstance(part, HasChain)]


class _OwnTensors:
    """The parameters and buffers of a module itself, with their values now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = [(p, p.clone()) for p in module.parameters(recurse=False)]
        self._buffers = {name: (b, b.clone()) for name, b in module.named_buffers(recurse=False)}

    def restore_buffers(self) -> None:
        """Restore the buffers, unless the module has set its parameters: then it has started."""
        if all(torch.equal(*pair) for pair in self._parameters):
            for name, (buffer, content) in self._buffers.items():
                kept = content if buffer.is_inference() else buffer.copy_(content)
                setattr(self._module, name, kept)


def _is_flat(module: nn.Module) -> TypeGuard[Chain]:
    """Return whether a module is a chain whose modules may be called in its place."""
    return type(module) is Chain and not is_hooked(module)
