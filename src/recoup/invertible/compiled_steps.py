"""The steps of a compiled chain.

NOTE [ A step ]

Rule 1. A step is a run of modules of a chain that is compiled as a whole, up to and with a module
        that has parts of its own, such as a coupling with its networks. Modules without parameters,
        which begin a scale, are steps of their own, so that there are fewer kinds of steps. Steps
        of the same kinds of modules share compiled code, whatever their parameters.
Rule 2. Under "constant" a step is one node (NOTE [ One node ]). Otherwise it is an ordinary
        compiled function, whose residuals are kept or made again as those of any stage.
Rule 3. A step that may draw random numbers runs uncompiled. Forward and backward are two graphs,
        which may draw by different operators and in another order of memory. So does one with a
        norm that updates its statistics, since transforms allow no write to a buffer.
Rule 4. A first run under a dispatch mode is uncompiled, and so are its later runs. recoup itself
        looks in this way for random numbers that no second run repeats, once for each module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from recoup._core.compiled_calls import Compiled, CompileSettings, is_compilable_here
from recoup._core.module_marks import updates_statistics
from recoup._core.one_call import Gradients, OneCallStage
from recoup._core.region import State
from recoup._core.saved_tensors import without_pairs
from recoup._core.shared_evaluation import draws_nothing, is_answered, unshared
from recoup._core.stand_ins import is_stand_in
from recoup.errors import ChangedError
from recoup.invertible import step_code
from recoup.invertible.contract import InvertibleModule
from recoup.invertible.step_code import Part

__all__ = ["CompiledStage", "Step", "steps_of"]


class _Code:
    """The compiled code of steps of one kind (See Rule 1)."""

    def __init__(self, settings: CompileSettings) -> None:
        self.compute = Compiled(step_code.compute, settings)
        self.compute_inputs = Compiled(step_code.compute_inputs, settings)
        self.compute_both = Compiled(step_code.compute_both, settings)
        self.compute_gradients = Compiled(step_code.compute_gradients, settings)

    @property
    def reason(self) -> str | None:
        """Why steps of this kind run uncompiled, if they do."""
        for one in (self.compute, self.compute_inputs, self.compute_both, self.compute_gradients):
            if one.failure is not None:
                return one.reason
        return None


_codes: WeakValueDictionary[tuple[Any, ...], _Code] = WeakValueDictionary()  # steps hold them


class Step:
    """A step of a chain (See Rule 1).

    Args:
        named: the modules with their names.
        settings: the settings of the compiler.
        said: the reasons of the chain that a warning gave already.
        has_context: whether the chain is given a context.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, InvertibleModule]],
        settings: CompileSettings,
        said: set[str],
        *,
        has_context: bool,
    ) -> None:
        self.modules = tuple(module for _, module in named)
        self.names = tuple(f"module `{name}` ({type(m).__name__})" for name, m in named)
        self.parts = tuple(
            Part(module, name, takes_context=has_context and module.takes_context)
            for name, module in zip(self.names, self.modules, strict=True)
        )
        self.num_inputs = 1 + any(part.takes_context for part in self.parts)
        self._settings = settings
        self._said = said
        kind = [(type(part.module), part.takes_context) for part in self.parts]
        shapes = [parameter.shape for part in self.parts for parameter in part.parameters()]
        self._kind = (settings, *kind, *shapes)
        self._code: _Code | None = None

    @property
    def name(self) -> str:
        """The name in error messages and warnings."""
        first, last = self.names[0], self.names[-1]
        return first if len(self.names) == 1 else f"{first} to {last}"

    def stage(self) -> CompiledStage:
        """Return the stage for a forward, with the modules as they are now."""
        found = _Found()
        for module in self.modules:
            found.begin(module)
            found.walk(module)
        code = self._code = self._code or _codes.get(self._kind) or _Code(self._settings)
        _codes[self._kind] = code
        reason = found.obstacle or _why_draws(found.drawing) or code.reason
        if reason is None:
            return CompiledStage(self, code, tuple(found.learned))
        if reason not in self._said:
            self._said.add(reason)
            self._say(reason)
        return CompiledStage(self, None, ())

    def _say(self, reason: str) -> None:
        message = f"{self.name} of the chain is not compiled: {reason}"
        if self._settings.fullgraph:
            raise ValueError(f"{message}. Or leave `fullgraph` out, and it runs uncompiled.")
        warnings.warn(f"{message}. It runs as before, and so do its like.", stacklevel=2)


def _why_draws(drawing: Sequence[nn.Module]) -> str | None:
    """Return why parts that may draw cannot be compiled, if there are any (See Rule 3)."""
    if not drawing:
        return None
    kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in drawing))
    return (
        f"{kinds} may draw random numbers, which two graphs need not repeat. Where only modules "
        "within draw, set `draws_only_in_modules = True` on the class"
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Found:
    """What one walk over the modules of a step finds; it is made in every forward.

    Attributes:
        learned: The parameters that get a gradient, in the order of `step_code.compute_both`.
        drawing: The networks that may draw random numbers, and modules of which that is unknown.
        obstacle: Why the step cannot be compiled as it is, or None.
    """

    def __init__(self) -> None:
        self.learned: list[Tensor] = []
        self.drawing: list[nn.Module] = []
        self.obstacle: str | None = None
        self._seen: set[object] = set()

    def begin(self, module: InvertibleModule) -> None:
        """Begin a module of the step."""
        self._seen.clear()
        kind = type(module)
        is_known = kind.__module__.startswith("recoup.")
        if not is_known and not vars(kind).get("draws_only_in_modules"):
            self.drawing.append(module)
            return
        for child in module.children():
            if not draws_nothing(child):
                self.drawing.append(child)

    def walk(self, module: nn.Module) -> None:
        """Walk over a module and the modules in it."""
        if module in self._seen:
            return
        self._seen.add(module)
        own = module.__dict__
        if updates_statistics(module):
            self.obstacle = f"{type(module).__name__} updates its statistics in forward"
        for kind in _HOOKS:
            if own[kind]:
                self.obstacle = f"{type(module).__name__} has hooks"
        if is_stand_in(type(module)) or hasattr(type(module), "unshard"):
            self.obstacle = f"the weights of {type(module).__name__} are computed as it runs"
        for parameter in own["_parameters"].values():
            if parameter is not None and parameter not in self._seen:
                self._seen.add(parameter)
                if parameter.requires_grad:
                    self.learned.append(parameter)
        for child in own["_modules"].values():
            if child is not None:
                self.walk(child)


class CompiledStage(OneCallStage):
    """A step in one forward of its chain.

    Args:
        step: the step.
        code: its compiled code; None if it runs uncompiled.
        learned: the parameters that get a gradient.
    """

    compares = True
    is_in_place = False

    def __init__(self, step: Step, code: _Code | None, learned: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.step = step
        self.name = step.name
        self.modules = step.modules
        self.code = step.modules[0]
        self.num_inputs = step.num_inputs
        self._code = code
        self._learned = learned
        self._wants_context = False
        self._is_plain: bool | None = None if code is not None else True

    def forward(self, state: State) -> tuple[State, Tensor]:
        """Return the next state and the log-determinant (See Rules 2 and 4)."""
        if self._is_plain is None:
            self._is_plain = not is_compilable_here() or not state[0].is_floating_point()
        inputs = state[: self.num_inputs]
        if self._is_plain:
            outputs = step_code.compute(self.step.parts, state[0], self._context(inputs))
        elif is_answered() and torch.is_grad_enabled():
            self._wants_context = self.num_inputs > 1 and inputs[-1].requires_grad
            outputs = self.as_node(inputs, self._learned)
        else:
            outputs = self.compute(inputs)
        return (outputs[0], *state[1:], *outputs[1:-1]), outputs[-1]

    def inverse(self, state: State) -> State:
        """Return the state before the step."""
        num_early = sum(module.num_early for module in self.modules)
        passed = state[1 : len(state) - num_early]
        values = (state[0], *state[len(state) - num_early :])
        context = passed[: self.num_inputs - 1]
        if self._is_plain:
            parts = self.step.parts
            return step_code.compute_inputs(parts, values, *context or (None,)), *passed
        return self.reverse((*values, *context))[0], *passed

    def compute(self, inputs: State) -> State:
        """Return the value after the step, early latents, and the log-determinant."""
        x, context = inputs[0], self._context(inputs)
        return self._call("compute", x, context)

    def compute_inputs(self, outputs: State) -> State:
        """Return the value before the step; a context comes last in `outputs`."""
        values, context = self._values(outputs)
        return (self._call("compute_inputs", values, context),)

    def compute_both(self, outputs: State, gradients: State) -> tuple[State, Gradients]:
        """Return the value before the step, and all gradients."""
        values, context = self._values(outputs)
        return self._sorted(
            self._call("compute_both", values, context, gradients, self._wants_context)
        )

    def compute_gradients(self, inputs: State, gradients: State) -> Gradients:
        """Return all gradients."""
        x, context = inputs[0], self._context(inputs)
        return self._sorted(
            self._call("compute_gradients", x, context, gradients, self._wants_context)
        )[1]

    def _context(self, inputs: State) -> Tensor | None:
        return inputs[1] if self.num_inputs > 1 else None

    def _values(self, outputs: State) -> tuple[State, Tensor | None]:
        return (outputs[:-1], outputs[-1]) if self.num_inputs > 1 else (outputs, None)

    def _sorted(self, found: tuple[Tensor, Tensor, Tensor | None, list[Tensor]]) -> Any:
        x, of_x, of_context, of_parameters = found
        if len(of_parameters) != len(self._learned) or not all(
            parameter.requires_grad for parameter in self._learned
        ):
            raise ChangedError(
                f"`requires_grad` of a parameter of {self.name} was changed between forward and "
                "backward. Change it after backward."
            )
        of_inputs = (of_x,) if self.num_inputs == 1 else (of_x, of_context)
        return (x,), (*of_inputs, *of_parameters)

    def _call(self, name: str, *args: Any) -> Any:
        run: Compiled = getattr(self._code, name)

        # The first for the case that it runs as it is. Transforms allow no pair in force.
        with unshared(), nullcontext() if torch.is_grad_enabled() else without_pairs():
            return run(self.step.parts, *args)


def steps_of(
    named: Iterable[tuple[str, InvertibleModule]],
    settings: CompileSettings,
    *,
    has_context: bool,
    whole: Callable[[InvertibleModule], bool],
) -> Iterator[Step | tuple[str, InvertibleModule]]:
    """Yield the steps of a chain, and the modules between them that run by themselves.

    Args:
        named: the modules with their names.
        settings: the settings of the compiler.
        has_context: whether the chain is given a context.
        whole: whether a module must not become a part of a step.
    """
    waiting: list[tuple[str, InvertibleModule]] = []
    said: set[str] = set()

    def step() -> Iterator[Step]:
        if waiting:
            yield Step(waiting, settings, said, has_context=has_context)
            waiting.clear()

    for name, module in named:
        if whole(module):
            yield from step()
            yield name, module
            continue
        learns = _is_any(module.parameters())
        if waiting and (learns != _is_any(waiting[-1][1].parameters()) or _stands_alone(module)):
            yield from step()
        waiting.append((name, module))
        if _is_any(module.children()) or _stands_alone(module):
            yield from step()
    yield from step()


def _is_any(found: Iterator[object]) -> bool:
    return next(found, None) is not None


def _stands_alone(module: InvertibleModule) -> bool:
    return not module.inverts_in_backward
