"""A chain of invertible modules, and its memory modes."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import is_watched, uncompiled
from recoup._core.devices import generators_restored
from recoup._core.drift_guard import Drift
from recoup._core.module_marks import check_pair, has_inverse, is_hooked
from recoup._core.saved_tensors import detached
from recoup._core.slots import State
from recoup.errors import ConvergenceError, NotInvertibleError
from recoup.invertible.channels import ActNorm
from recoup.invertible.contract import Adapted, InvertibleModule
from recoup.invertible.rearrange import Split
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
            _check_defined(index, module)
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
        units = _joined(stages) if self._memory == "constant" else stages
        links = {
            unit.name: unit.module if isinstance(unit, _ModuleStage) else unit for unit in units
        }
        ways: list[Way] = [
            "invert" if each.inverts_in_backward else "recompute" for each in links.values()
        ]
        executor = self._ready_executor(links, tuple(ways))
        groups: list[_ModuleStage | _StageGroup] = []
        for each in executor.groups:
            several = units[each.start : each.stop]
            groups.append(several[0] if len(several) == 1 else _StageGroup(several))
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
        """Let layers start from their first batch, in a forward that changes nothing else.

        That is needed once in each mode, in which it finds all of them started if it runs again.
        """
        modules = list(self.modules())
        modes = [module.training for module in modules]
        waiting = any(
            isinstance(m, Adapted) or (isinstance(m, ActNorm) and m.training and not m.started)
            for m in modules
        )
        if not waiting or modes == self._started:
            return
        with _buffers_restored(modules), generators_restored():
            state = _state_of(x, context)
            for stage in self._module_stages(context):
                with torch.enable_grad():  # some layers take gradients themselves
                    state = detached(stage.forward(state)[0])
        self._started = modes

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

    def _module_stages(self, context: Tensor | None) -> list[_ModuleStage]:
        return [
            _ModuleStage(name, module, context) for name, module in self._named(flat=self._is_flat)
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


class _ModuleStage:
    """A module that maps the first tensor of the state; a context and early latents pass by.

    The early latents of a module come last in the state after it.

    Args:
        name: its name in the chain.
        module: the module.
        context: the context of the chain, the second tensor of the state; None for none.
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
        """Return the next state and the log-determinant."""
        returned = self.module(state[0], *self._context(state))
        if not self._is_checked:  # a later run returns the same
            check_pair(returned, len(state[0]), "forward", self.name, num_early=self._num_early)
            self._is_checked = True
        y, log_det = returned
        first, *early = y if self._is_split else _to_state(y)
        return (first, *state[1:], *early), log_det

    def invert(self, state: State) -> tuple[State, Tensor]:
        """Return the state before the module, and the log-determinant of its inverse."""
        start = len(state) - self._num_early
        after = (state[0], *state[start:])
        y = after if self._is_split else _to_output(after)
        returned = self.module.inverse(y, *self._context(state))
        x, log_det = check_pair(returned, len(state[0]), "inverse", self.name)
        return (x, *state[1:start]), log_det

    def inverse(self, state: State) -> State:
        """Return the state before the module."""
        if self.is_adapted:  # its log-determinant may cost another run
            return (self.module.input_of(state[0], *self._context(state)), *state[1:])
        return self.invert(state)[0]

    def _context(self, state: State) -> State:
        return state[1:2] if self._hands_context else ()


class _StageGroup:
    """Several modules as one stage, because the schedule treats all of them alike.

    Args:
        units: the stages, or groups of them: two or more.
    """

    compares = True

    def __init__(self, units: Sequence[_ModuleStage | _StageGroup]) -> None:
        stages: list[_ModuleStage] = []
        for unit in units:
            stages += unit._stages if isinstance(unit, _StageGroup) else (unit,)
        self._stages = stages
        self.name = f"{stages[0].name} to {stages[-1].name}"
        self.code, self.is_in_place = stages[0].code, stages[0].is_in_place
        self.modules = [stage.module for stage in stages]

    @property
    def inverts_in_backward(self) -> bool:
        """Whether backward inverts each of them."""
        return all(module.inverts_in_backward for module in self.modules)

    def forward(self, state: State) -> tuple[State, list[Tensor]]:
        """Return the state after the last module, and the log-determinants of all."""
        log_dets: list[Tensor] = []
        for stage in self._stages:
            state, value = stage.forward(state)
            log_dets.append(value)
        return state, log_dets

    def inverse(self, state: State) -> State:
        """Return the state before the first module."""
        for stage in reversed(self._stages):
            state = stage.inverse(state)
        return state


def _joined(stages: Sequence[_ModuleStage]) -> Sequence[_ModuleStage | _StageGroup]:
    """Join adapted layers without networks to a layer before or after them."""
    if True not in [stage.is_adapted for stage in stages]:
        return stages
    groups: list[list[_ModuleStage]] = []
    for stage in stages:
        before = groups[-1] if groups else []
        are_adapted = all(each.is_adapted for each in (*before, stage))
        lights = [each.module.is_light for each in before] if are_adapted else []
        if lights and (stage.module.is_light or all(lights)):
            before.append(stage)
        else:
            groups.append([stage])
    return [group[0] if len(group) == 1 else _StageGroup(group) for group in groups]


def _state_of(x: Tensor, context: Tensor | None) -> State:
    """Return the state before the first module."""
    return (x,) if context is None else (x, context)


def _to_output(state: State) -> Any:
    """Return what a chain returns for the state after its last module."""
    return state[0] if len(state) == 1 else (*state[1:], state[0])


def _to_state(y: Any) -> State:
    """Return the state after the last module, from what a chain returned."""
    if isinstance(y, Tensor):
        return (y,)
    return (y[-1], *y[:-1])


def _check_defined(index: int, module: InvertibleModule) -> None:
    """Raise unless a module defines both directions, or declares that it has forward only."""
    name = f"`modules[{index}]` is a {type(module).__name__}, which"
    if getattr(module.forward, "is_missing", False):
        raise ValueError(f"{name} does not define `forward`.")
    if module.inverts_in_backward and not has_inverse(module):
        raise NotInvertibleError(
            f"{name} does not define `inverse`. Define it; or, for a module that is used forward "
            "only (a density that is not sampled), set `inverts_in_backward = False` on its class: "
            'memory="constant" then recomputes it.'
        )


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
