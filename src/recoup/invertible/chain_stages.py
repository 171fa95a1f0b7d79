"""The stages of a chain: what maps the tensors that pass through it, and these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from recoup._core.module_marks import check_pair, has_inverse
from recoup._core.slots import State
from recoup.errors import NotInvertibleError
from recoup.invertible.adapted import Adapted, Backwards
from recoup.invertible.contract import InvertibleModule
from recoup.invertible.rearrange import Split

__all__ = [
    "ModuleStage",
    "StageGroup",
    "check_defined",
    "joined",
    "module_stage",
    "state_of",
    "to_output",
    "to_state",
]


class ModuleStage:
    """A module that maps the first tensor of the state; a context and early latents pass by."""

    __slots__ = (
        "_hands_context",
        "_is_checked",
        "code",
        "is_in_place",
        "module",
        "modules",
        "name",
    )
    compares = True
    has_started = True  # else the chain lets it start before its first run
    is_light = False  # whether it is inverted, and takes less time than a stage by itself costs

    def __init__(self, name: str, module: InvertibleModule, *, hands_context: bool) -> None:
        self.name = f"module `{name}` ({type(module).__name__})"
        self.module: Any = module
        self.code: object = module
        self.modules = (module,)
        self._hands_context = hands_context
        self.is_in_place: bool = module.__dict__.get("inplace", False)
        self._is_checked = False

    def forward(self, state: State) -> tuple[State, Tensor]:
        """Return the next state and the log-determinant."""
        returned = self.module(state[0], *self._context(state))
        if not self._is_checked:  # a later run returns the same
            num = len(state[0])
            check_pair(returned, num, "forward", self.name, num_early=self.module.num_early)
            self._is_checked = True
        y, log_det = returned
        return self._after(y, state[1:]), log_det

    def invert(self, state: State) -> tuple[State, Tensor]:
        """Return the state before the module, and the log-determinant of its inverse."""
        y, passed = self._before(state)
        returned = self.module.inverse(y, *self._context(state))
        x, log_det = check_pair(returned, len(state[0]), "inverse", self.name)
        return (x, *passed), log_det

    def _context(self, state: State) -> State:
        return state[1:2] if self._hands_context else ()

    def _after(self, y: Any, passed: State) -> State:
        """Return the state after the module, from its value and the tensors that pass by."""
        return (y, *passed)

    def _before(self, state: State) -> tuple[Any, State]:
        """Return the value of the module that a state holds, and the tensors that passed by."""
        return state[0], state[1:]

    def inverse(self, state: State) -> State:
        """Return the state before the module."""
        return self.invert(state)[0]


class _SplitStage(ModuleStage):
    """A split: the state after it has one more tensor."""

    __slots__ = ()

    def _after(self, y: Any, passed: State) -> State:
        h, z = y
        return (h, *passed, z)

    def _before(self, state: State) -> tuple[Any, State]:
        return (state[0], state[-1]), state[1:-1]


class _ChainStage(ModuleStage):
    """A chain that splits: its early latents come last in the state after it."""

    __slots__ = ()

    def _after(self, y: Any, passed: State) -> State:
        return (y[-1], *passed, *y[:-1])

    def _before(self, state: State) -> tuple[Any, State]:
        start = len(state) - self.module.num_early
        return (*state[start:], state[0]), state[1:start]


class _AdaptedStage(ModuleStage):
    """A layer of another library, whose log-determinant of the inverse may cost another run."""

    __slots__ = ()

    @property
    def has_started(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the layer has started from its first batch."""
        return self.module.has_started

    @property
    def is_light(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether backward inverts the layer, and it has no networks."""
        return self.module.is_light

    def inverse(self, state: State) -> State:
        """Return the state before the module."""
        return (self.module.input_of(state[0], *self._context(state)), *state[1:])


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
    if _AdaptedStage not in map(type, stages):
        return stages
    groups: list[list[ModuleStage]] = []
    for stage in stages:
        before = groups[-1] if groups else []
        are_adapted = all(isinstance(each, _AdaptedStage) for each in (*before, stage))
        if before and are_adapted and (stage.is_light or all(each.is_light for each in before)):
            before.append(stage)
        else:
            groups.append([stage])
    return [group[0] if len(group) == 1 else StageGroup(group) for group in groups]


def module_stage(name: str, module: InvertibleModule, context: Tensor | None) -> ModuleStage:
    """Return the stage that a module is."""
    hands_context = context is not None and module.takes_context
    kind = _ChainStage if module.num_early else ModuleStage
    kind = _SplitStage if isinstance(module, Split) else kind
    kind = _AdaptedStage if isinstance(module, Adapted | Backwards) else kind
    return kind(name, module, hands_context=hands_context)


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
