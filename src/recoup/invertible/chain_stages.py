"""The stages of a chain: what maps the tensors that pass through it, and these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recoup._core.modules import check_pair, has_inverse
from recoup._core.slots import State
from recoup.errors import NotInvertibleError
from recoup.invertible.contract import Adapted, InvertibleModule
from recoup.invertible.rearrange import Split


class ModuleStage:
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
        first, *early = y if self._is_split else to_state(y)
        return (first, *state[1:], *early), log_det

    def invert(self, state: State) -> tuple[State, Tensor]:
        """Return the state before the module, and the log-determinant of its inverse."""
        start = len(state) - self._num_early
        after = (state[0], *state[start:])
        y = after if self._is_split else to_output(after)
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


class StageGroup:
    """Several modules as one stage, because the schedule treats all of them alike.

    Args:
        units: the stages, or groups of them: two or more.
    """

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


def joined(stages: Sequence[ModuleStage]) -> Sequence[ModuleStage | StageGroup]:
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
    return [group[0] if len(group) == 1 else StageGroup(group) for group in groups]


def state_of(x: Tensor, context: Tensor | None) -> State:
    """Return the state before the first module."""
    return (x,) if context is None else (x, context)


def to_output(state: State) -> Any:
    """Return what a chain returns for the state after its last module."""
    return state[0] if len(state) == 1 else (*state[1:], state[0])


def to_state(y: Any) -> State:
    """Return the state after the last module, from what a chain returned."""
    if isinstance(y, Tensor):
        return (y,)
    return (y[-1], *y[:-1])


def check_defined(index: int, module: InvertibleModule) -> None:
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
