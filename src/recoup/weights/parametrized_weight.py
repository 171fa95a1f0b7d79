"""A parameter of a module under one of its names, with the reparametrizations applied to it."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup._core.call import Call, run_to_value
from recoup._core.compile import never_compiled
from recoup._core.lazy_values import Source, Value, as_value, read_anew
from recoup._core.rng import is_repeated, remembered
from recoup._core.saved_tensors import (
    Kept,
    grad_mode,
    is_transformed,
    reverse_at_once,
    version_of,
)
from recoup.errors import RecoupError
from recoup.weights.decisions import Decisions, may_run_again
from recoup.weights.forwards import Forward, Outside, frames, is_due, is_turned_on, resolve
from recoup.weights.graph_operators import new_handle
from recoup.weights.outside_forward import draws_outside
from recoup.weights.reparametrization import Application, Drawn, Operands, Reparametrization
from recoup.weights.waiting import WaitingDraws

__all__ = ["ParametrizedWeight"]


class _Computed(NamedTuple):
    """A weight that a forward computed, and the values that it was computed from."""

    weight: weakref.ref[Tensor]
    kept: Tensor | None  # the weight, where the forward keeps it alive (Rule 5 of `forwards`)
    stub: Tensor | None
    raw: Tensor
    version: int
    drawn: tuple[Drawn, ...]
    with_graph: bool


class ParametrizedWeight:
    """A parameter under one of its names: each use of a shared parameter has its own.

    Args:
        key: its name in the module that owns it.
        path: its qualified name, on which the draws of `same_draw(seed)` depend.
        name: its name in errors.
    """

    def __init__(self, key: str, path: str, name: str) -> None:
        self.key = key
        self.path = path
        self.name = name
        self.steps: list[Reparametrization] = []
        self._has_functions = False
        self.handle = new_handle(self)
        self._decisions = Decisions(_is_random)

    def add(self, step: Reparametrization) -> None:
        """Add a reparametrization; they run in their own order, not in that of the calls."""
        self.steps = sorted([*self.steps, step], key=lambda other: other.order)
        self._has_functions |= step.function is not None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "path": self.path,
            "name": self.name,
            "steps": self.steps,
            "has_functions": self._has_functions,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["key"], state["path"], state["name"])
        self.steps = state["steps"]
        self._has_functions = state.get("has_functions", False)

    @property
    def applications(self) -> tuple[Application, ...]:
        """The calls that applied its reparametrizations."""
        return tuple(dict.fromkeys(step.application for step in self.steps))

    @never_compiled
    def read(self, module: nn.Module, raw: Tensor) -> Tensor:
        """Return the weight that the forward or the step in progress uses; else the raw one."""
        joined: list[WaitingDraws] = []
        drawn = self.drawn(module, raw, partial(draws_outside, self, module, joined))
        if not drawn:
            return raw
        weight = self._computed(module, raw, drawn)
        for draws in joined:
            draws.wait_for(weight)
        if joined and isinstance(weight, Value):
            weight._recoup_source.stands_for = "the parameter"
        return weight

    @never_compiled
    def drawn(
        self, module: nn.Module, raw: Tensor, outside: Outside | None = None
    ) -> tuple[Drawn, ...]:
        """Return the draws for the weight in the forward in progress; none if it is raw.

        Args:
            module: the module that has the weight.
            raw: the parameter.
            outside: returns the draws of a step outside of forwards (see `resolve`).
        """
        around = frames()
        if around:
            top = around[-1]
            if isinstance(top, Forward) and top.reads_raw and top.owner is module:
                return ()
        return self.resolution(raw, is_training=module.training, outside=outside)

    def resolution(
        self, raw: Tensor, *, is_training: bool, outside: Outside | None = None
    ) -> tuple[Drawn, ...]:
        """Return the draws of the forward in progress, or those recorded if code runs again."""
        if not is_repeated() and not may_run_again():
            return resolve(self, is_training=is_training, outside=outside)
        random = [step for step in self.steps if step.is_random]
        is_usual = any(is_due(step, None, is_training=is_training) for step in random)
        is_open = is_usual or (bool(random) and is_turned_on())
        return remembered(
            lambda: self._decisions.decide(
                lambda: resolve(self, is_training=is_training, outside=outside),
                self.name,
                version_of(raw),
                is_open=is_open,
                is_usual=is_usual,
            )
        )

    def without_draws(self, module: nn.Module) -> Tensor:
        """Return the weight without what is drawn: the raw one, or normalized."""
        raw = cast("Tensor", module._parameters[self.key])
        drawn = tuple(Drawn(step, 0, 1.0) for step in self.steps if not step.is_random)
        return self._compute(module, raw, drawn, None) if drawn else raw

    def _computed(self, module: nn.Module, raw: Tensor, drawn: tuple[Drawn, ...]) -> Tensor:
        """Return the weight: the one that the forward has, if that is alive, or a new one."""
        outermost: Forward | None = None
        innermost: Forward | None = None
        for frame in frames():
            if isinstance(frame, Forward):
                innermost = frame
                outermost = outermost or frame
        if outermost is None or innermost is None:
            return self._compute(module, raw, drawn, None)
        with_graph, version = torch.is_grad_enabled(), version_of(raw)
        before: _Computed | None = outermost.computed.get(self)
        is_same = (
            before is not None
            and before.raw is raw
            and before.version == version
            and before.with_graph is with_graph
            and before.drawn == drawn
        )
        weight = before.weight() if before is not None and is_same else None
        if weight is not None:
            return read_anew(weight)
        stub = before.stub if before is not None and is_same else None
        weight = self._compute(module, raw, drawn, stub)
        if outermost.owner is None:
            outermost.wait_for(weight)
        is_run_again = is_same or isinstance(module, nn.RNNCellBase)
        needs_stub = stub is None and not is_run_again and outermost.owner is not module
        needs_stub = needs_stub and not is_transformed()  # there the weight is kept anyway
        if needs_stub and not (self._has_functions and _functions_of(drawn)):
            stub = _stub_of(weight)
        kept = weight if is_run_again else None
        outermost.computed[self] = _Computed(
            weakref.ref(weight), kept, stub, raw, version, drawn, with_graph
        )
        if innermost.owner is module:
            innermost.alive.append(weight)
        return weight

    def _compute(
        self, module: nn.Module, raw: Tensor, drawn: tuple[Drawn, ...], stub: Tensor | None
    ) -> Tensor:
        """Return a new weight; its gradients flow through `stub` if there is one."""
        if type(raw) not in (nn.Parameter, Tensor) and is_traceable_wrapper_subclass(raw):
            raise RecoupError(
                f"{self.name} is a {type(raw).__name__}, but {drawn[0].step.kind} needs a plain, "
                "whole tensor. If it is sharded, read it within the forward of its module, where "
                "FSDP2 has gathered it."
            )
        operands = tuple([each.step.operands(module, self.key) for each in drawn])
        if not torch.is_grad_enabled():
            return _without_graph(raw, operands, drawn)
        weight = raw
        if is_transformed():
            for each, given in zip(drawn, operands, strict=True):
                weight = each.step.apply_by_operators(weight, given, each)
            return weight
        if self._has_functions and _functions_of(drawn):
            return _in_region(self.name, raw, operands, drawn)
        if stub is None:
            for each, given in zip(drawn, operands, strict=True):
                weight = each.step.apply(weight, given, each)
                reverse_at_once(weight)
        else:
            with grad_mode(False):
                weight = _without_graph(raw, operands, drawn)
            weight = cast("Tensor", _WithNode.apply(stub, weight))
            reverse_at_once(weight)
        return as_value(weight, _Recomputed(self.name, raw, operands, drawn))


def _is_random(drawn: tuple[Drawn, ...]) -> bool:
    return any(each.step.is_random for each in drawn)


def _in_region(
    name: str, raw: Tensor, operands: tuple[Operands, ...], drawn: tuple[Drawn, ...]
) -> Tensor:
    """Return a weight of which a function of the user's is a step (NOTE [ Any function ])."""
    run = partial(_run_steps, drawn, operands, _functions_of(drawn))
    call = Call(f"the reparametrization of {name}", run, (raw,), {})
    weight = cast("Tensor", run_to_value(call))
    reverse_at_once(weight)
    return weight


def _run_steps(
    drawn: tuple[Drawn, ...],
    operands: tuple[Operands, ...],
    functions: list[Any],
    weight: Tensor,
) -> Tensor:
    del functions  # they are among the arguments for the guard, which looks at what these read
    for each, given in zip(drawn, operands, strict=True):
        weight = each.step.apply(weight, given, each)
    return weight


def _functions_of(drawn: tuple[Drawn, ...]) -> list[Any]:
    return [each.step.function for each in drawn if each.step.function is not None]


def _without_graph(
    weight: Tensor, operands: tuple[Operands, ...], drawn: tuple[Drawn, ...]
) -> Tensor:
    is_new = False
    for each, given in zip(drawn, operands, strict=True):
        weight = each.step.compute(weight, given, each, in_place=is_new)
        is_new = True
    return weight


class _Recomputed(Source):
    """A reparametrized weight, which is computed again from the raw one and seeds."""

    __slots__ = ("_drawn", "_operands", "_raw")

    way = "regenerate"

    def __init__(
        self, name: str, raw: Tensor, operands: tuple[Operands, ...], drawn: tuple[Drawn, ...]
    ) -> None:
        super().__init__(name)
        self._raw = Kept(raw, name, None)
        kept = f"An operand of {name}"
        self._operands = [
            tuple([Kept(each, kept, None) for each in given]) if given else () for given in operands
        ]
        self._drawn = drawn

    def make(self) -> None:
        operands = tuple(
            [tuple([kept.get() for kept in given]) if given else () for given in self._operands]
        )
        with torch.no_grad():
            self.give(_without_graph(self._raw.get(), operands, self._drawn))


def _stub_of(weight: Tensor) -> Tensor | None:
    """Return a tensor without memory through which gradients reach the node of `weight`."""
    if not weight.requires_grad:
        return None
    stub = cast("Tensor", _WithNode.apply(weight, weight.new_empty(()).expand(weight.shape)))
    reverse_at_once(stub)
    return stub


class _WithNode(torch.autograd.Function):
    """A value whose gradient flows to the node of another tensor."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        del ctx, source
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None
