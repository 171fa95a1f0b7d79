"""A chain of invertible modules, its memory modes, and its stages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard, cast, overload

import torch
from torch import Tensor, nn

from recoup._core.compile import is_watched, uncompiled
from recoup._core.devices import generators_restored
from recoup._core.drift_guard import Drift, DriftGuard
from recoup._core.modules import check_pair, has_inverse, is_hooked
from recoup._core.saved_tensors import detached
from recoup._core.slots import State
from recoup._core.tensors import check_tensors
from recoup.errors import ConvergenceError, NotInvertibleError
from recoup.invertible.channels import ActNorm
from recoup.invertible.contract import Adapted, InvertibleModule, as_tuple
from recoup.invertible.rearrange import Split
from recoup.planning.budget import HasMemoryMode, is_bytes
from recoup.schedules import Schedule, Way
from recoup.schedules.memory import Memory, schedule_for


class Chain(HasMemoryMode, InvertibleModule):
    """Invertible modules in sequence, with a choice of what autograd keeps for backward.

    With ``memory="constant"`` the chain keeps its output, and its input for the guard: backward
    inverts the modules one by one, and every network runs once in forward and once in backward. A
    `DriftGuard` checks the inputs that the inverses compute. Modules whose inverse is an iteration
    (`InvertibleResidual`) are recomputed from their kept inputs instead, of which the chain warns.
    The other modes keep and recompute as `recoup.Sequential` does, with the same gradients.

    A chain among the modules is treated as the modules in it, under this chain's `memory` and
    `drift`; under "linear" its own apply.

    A `context` (labels as numbers, features of another network) is passed to the modules that take
    one, and receives its gradient from them.

    A `Split` sends part of its input straight to the output, which is then a tuple: the early
    latents in the order in which they were split off, and last what passed the whole chain.

    Args:
        modules: the invertible modules, data to latent.
        memory: "linear", "inputs", "sqrt", "log", "constant", a number of slots, bytes with a unit,
            or a `recoup.schedules.Schedule`; may be changed at any time by assignment. Bytes
            (``"2 GiB"``) are for a step of this chain alone: in the first forward, and for a larger
            input, `recoup.plan` chooses what modules keep so that backward recomputes as little as
            the bytes allow. The gradients are then equal to rounding, as under "constant".
        drift: Under "constant" and bytes, what to do when an inverse does not reproduce its input:
            "recompute" (then the first state is kept too), "raise", "warn", "ignore", or a
            `DriftGuard`.

    Raises:
        ValueError: When a module is not invertible, `memory` or `drift` is unknown, or, in a call,
            a module returns something other than a value and its log-determinant.
        NotInvertibleError: When a module defines no `inverse`, and does not say by
            ``inverts_in_backward = False`` that it is to be recomputed.
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
            name = f"`modules[{index}]` is a {type(module).__name__}, which"
            if not isinstance(module, InvertibleModule):
                raise ValueError(
                    f"{name} is not an InvertibleModule. Derive from "
                    "recoup.invertible.InvertibleModule, or put it in a recoup.Sequential, which "
                    "takes any module."
                )
            if getattr(module.forward, "is_missing", False):
                raise ValueError(f"{name} does not define `forward`.")
            if module.inverts_in_backward and not has_inverse(module):
                raise NotInvertibleError(
                    f"{name} does not define `inverse`. Define it; or, for a module that is used "
                    "forward only (a density that is not sampled), set `inverts_in_backward = "
                    'False` on its class: memory="constant" then recomputes it.'
                )
            self.add_module(str(index), module)
        self._set_memory_mode(memory, drift)

    def _check_memory(self, memory: Memory) -> None:
        num_stages = sum(1 for _ in self._named(flat=memory != "linear"))
        if num_stages and not is_bytes(memory):
            schedule_for(memory, num_stages)
        names = [name for name, module in self._named(flat=True) if not module.inverts_in_backward]
        if names and memory == "constant":
            shown_names = ", ".join(f"`{name}`" for name in names[:3])
            warnings.warn(
                f'Under memory="constant" {len(names)} of {num_stages} modules ({shown_names}'
                f"{', ...' if len(names) > 3 else ''}) are recomputed from their kept inputs: "
                "their inverses are iterations, which cost more and are not exact. Memory grows "
                "by one input each.",
                stacklevel=3,
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
        options: Any = {"memory": self._memory_of_other_lengths, "drift": self._drift.anew()}
        return Chain(*modules[index], **options)

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
        check_tensors(x=x)
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
        units = _joined(stages) if self._memory == "constant" else stages
        links = {
            each.name: each.module if isinstance(each, ModuleStage) else each for each in units
        }
        invert = [each.inverts_in_backward for each in links.values()]
        ways: tuple[Way, ...] = tuple(["invert" if each else "recompute" for each in invert])
        executor = self._ready_executor(links, ways)
        groups = [_one_of(units[each.start : each.stop]) for each in executor.groups]
        state, values = executor.execute(groups, _state_of(x, context))
        log_dets: list[Tensor] = []
        for value in values:
            log_dets += value if isinstance(value, list) else (value,)
        return self._to_pair(x, context, state, log_dets)

    def _forward_plainly(self, x: Tensor, context: Tensor | None) -> tuple[Any, Tensor]:
        state = _state_of(x, context)
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
        return _to_output(state), self._sum(iter(log_dets), x, flat=self._is_flat)

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
                state = _state_of(x, context)
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
        state = _to_state(y)
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
        named = self._named(flat=self._is_flat)
        return [ModuleStage(name, module, context) for name, module in named]

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
    """A module whose `memory` and `drift` are those of its `chain`; parts with chains follow."""

    chain: Chain

    @property
    def memory(self) -> Memory:
        """The memory mode, which may be set at any time.

        It is then also that of parts with chains of their own; a `Schedule`, made for one chain, is
        not.
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


# -- stages ----------------------------------------------------------------------------------------


class ModuleStage:
    """A module that maps the first tensor of the state; a context and early latents pass by.

    The context of the chain is the second tensor of the state, and the early latents of a module
    come last in the state after it.
    """

    compares = True

    def __init__(self, name: str, module: InvertibleModule, context: Tensor | None) -> None:
        self.name = f"module `{name}` ({type(module).__name__})"
        self.module: Any = module
        self.code: object = module
        self.modules = (module,)
        self.is_adapted = isinstance(module, Adapted)
        self.is_in_place: bool = module.__dict__.get("inplace", False)
        self._hands_context = context is not None and module.takes_context
        self._is_checked = False
        self._is_split = isinstance(module, Split)  # whose value has the early latent last
        self._num_early = module.num_early

    def forward(self, state: State) -> tuple[State, Tensor]:
        returned = self.module(state[0], *self._context(state))
        if not self._is_checked:  # a later run returns the same
            check_pair(returned, len(state[0]), "forward", self.name, num_early=self._num_early)
            self._is_checked = True
        y, log_det = returned
        first, *early = y if self._is_split else _to_state(y)
        return (first, *state[1:], *early), log_det

    def invert(self, state: State) -> tuple[State, Tensor]:
        start = len(state) - self._num_early
        after = (state[0], *state[start:])
        y = after if self._is_split else _to_output(after)
        returned = self.module.inverse(y, *self._context(state))
        x, log_det = check_pair(returned, len(state[0]), "inverse", self.name)
        return (x, *state[1:start]), log_det

    def inverse(self, state: State) -> State:
        if self.is_adapted:  # its log-determinant may cost another run
            return (self.module.input_of(state[0], *self._context(state)), *state[1:])
        return self.invert(state)[0]

    def _context(self, state: State) -> State:
        return state[1:2] if self._hands_context else ()


class StageGroup:
    """Several modules as one stage, because the schedule treats all of them alike."""

    compares = True

    def __init__(self, units: Sequence[ModuleStage | StageGroup]) -> None:
        stages: list[ModuleStage] = []
        for unit in units:
            stages += unit._stages if isinstance(unit, StageGroup) else (unit,)
        self._stages = stages
        self.name = f"{stages[0].name} to {stages[-1].name}"
        self.code, self.is_in_place = stages[0].code, stages[0].is_in_place
        self.modules = [stage.module for stage in stages]

    @property
    def inverts_in_backward(self) -> bool:
        return all(module.inverts_in_backward for module in self.modules)

    def forward(self, state: State) -> tuple[State, list[Tensor]]:
        log_dets: list[Tensor] = []
        for stage in self._stages:
            state, value = stage.forward(state)
            log_dets.append(value)
        return state, log_dets

    def inverse(self, state: State) -> State:
        for stage in reversed(self._stages):
            state = stage.inverse(state)
        return state


def _joined(stages: Sequence[ModuleStage]) -> Sequence[ModuleStage | StageGroup]:
    """Join adapted layers without networks to a layer before or after them."""
    if True not in [stage.is_adapted for stage in stages]:
        return stages
    groups: list[list[ModuleStage]] = []
    for stage in stages:
        before = groups[-1] if groups else []
        are_adapted = all(each.is_adapted for each in (*before, stage))
        lights = [each.module.is_light for each in before] if are_adapted else []
        if lights and (stage.module.is_light or all(lights)):
            before.append(stage)
        else:
            groups.append([stage])
    return [_one_of(group) for group in groups]


def _one_of(units: Sequence[ModuleStage | StageGroup]) -> ModuleStage | StageGroup:
    return units[0] if len(units) == 1 else StageGroup(units)


def _state_of(x: Tensor, context: Tensor | None) -> State:
    return (x,) if context is None else (x, context)


def _to_output(state: State) -> Any:
    """Return what a chain returns for the state after its last module."""
    return state[0] if len(state) == 1 else (*state[1:], state[0])


def _to_state(y: Any) -> State:
    """Return the state after the last module, from what a chain returned."""
    if isinstance(y, Tensor):
        return (y,)
    *early, last = as_tuple(y)
    return (last, *early)
