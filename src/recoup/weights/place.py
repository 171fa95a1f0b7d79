"""A parameter of a module, with the reparametrizations that are applied to it."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup._core.compile import never_compiled
from recoup._core.lazy_values import Source, as_value, read_anew
from recoup._core.rng import is_repeated, remembered
from recoup._core.saved_tensors import Kept, grad_mode, is_transformed, reverse_at_once, version_of
from recoup.errors import RecoupError
from recoup.weights.decisions import Decisions, may_run_again
from recoup.weights.forwards import Forward, Made, drawn_for, frames, is_turned_on
from recoup.weights.graph import new_handle
from recoup.weights.outside import look_at_read
from recoup.weights.reparametrization import Application, Drawn, Operands, Reparametrization

__all__ = ["Place"]

Resolution = tuple[Drawn, ...]


class Place:
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
        self.handle = new_handle(self)
        self._decisions = Decisions(_draws)

    def add(self, step: Reparametrization) -> None:
        """Add a reparametrization; they run in their own order, not in that of the calls."""
        self.steps = sorted([*self.steps, step], key=lambda other: other.order)

    def __getstate__(self) -> dict[str, Any]:
        return {"key": self.key, "path": self.path, "name": self.name, "steps": self.steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["key"], state["path"], state["name"])
        self.steps = state["steps"]

    @property
    def applications(self) -> tuple[Application, ...]:
        """The calls that applied its reparametrizations."""
        return tuple(dict.fromkeys(step.application for step in self.steps))

    @never_compiled
    def read(self, module: nn.Module, raw: Tensor) -> Tensor:
        """Return the weight that the forward in progress uses; the raw one outside of any."""
        drawn = self.drawn(module, raw)
        if len(drawn) < len(self.steps):
            look_at_read(self, module)
        return self._made(module, raw, drawn) if drawn else raw

    @never_compiled
    def drawn(self, module: nn.Module, raw: Tensor) -> Resolution:
        """Return the draws for the weight in the forward in progress; none if it is raw."""
        around = frames()
        if around:
            top = around[-1]
            if isinstance(top, Forward) and top.reads_raw and top.owner is module:
                return ()
        elif not self._decisions and not is_repeated():
            return ()
        return self.resolution(raw, is_training=module.training)

    def resolution(self, raw: Tensor, *, is_training: bool) -> Resolution:
        """Return the draws of the forward in progress, or those recorded if code runs again."""
        if not is_repeated() and not may_run_again():
            return self._resolve(is_training=is_training)
        resolve = partial(self._resolve, is_training=is_training)
        random = [step for step in self.steps if step.is_random]
        is_usual = any(is_training or step.mode == "always" for step in random)
        is_open = is_usual or (bool(random) and is_turned_on())
        return remembered(
            lambda: self._decisions.decide(
                resolve, self.name, version_of(raw), is_open=is_open, is_usual=is_usual
            )
        )

    def _resolve(self, *, is_training: bool) -> Resolution:
        found: list[Drawn] = []
        for step in self.steps:
            drawn = drawn_for(step, self, self.path, is_training=is_training)
            if drawn is not None:
                found.append(drawn)
        return tuple(found)

    def _made(self, module: nn.Module, raw: Tensor, drawn: Resolution) -> Tensor:
        around = [frame for frame in frames() if isinstance(frame, Forward)]
        if not around:
            return self._make(module, raw, drawn, None)
        made = around[0].made.get(self)
        with_graph = torch.is_grad_enabled()
        is_same = (
            made is not None
            and made.raw is raw
            and made.version == version_of(raw)
            and made.with_graph is with_graph
            and made.drawn == drawn
        )
        weight = made.weight() if made is not None and is_same else None
        if weight is not None:
            return read_anew(weight)
        stub = made.stub if made is not None and is_same else None
        weight = self._make(module, raw, drawn, stub)
        is_run_again = is_same or isinstance(module, nn.RNNCellBase)  # See Rule 5 of forwards
        if stub is None and not is_run_again and around[0].owner is not module:
            stub = _stub_of(weight)
        held = weight if is_run_again else None
        around[0].made[self] = Made(
            weakref.ref(weight), held, stub, raw, version_of(raw), drawn, with_graph
        )
        if around[-1].owner is module:
            around[-1].held.append(weight)
        return weight

    def _make(
        self, module: nn.Module, raw: Tensor, drawn: Resolution, stub: Tensor | None
    ) -> Tensor:
        if type(raw) not in (nn.Parameter, Tensor) and is_traceable_wrapper_subclass(raw):
            raise RecoupError(
                f"{self.name} is a {type(raw).__name__}, and {drawn[0].step.kind} draws for plain "
                "tensors: let FSDP2 gather it (read it within the forward of its module)."
            )
        operands = [each.step.operands(module, self.key) for each in drawn]
        if not torch.is_grad_enabled():
            return _remade(raw, operands, drawn)
        if is_transformed():
            weight = raw
            for each, taken in zip(drawn, operands, strict=True):
                weight = each.step.apply_plainly(weight, taken, each)
            return weight
        if stub is None:
            weight = raw
            for each, taken in zip(drawn, operands, strict=True):
                weight = each.step.apply(weight, taken, each)
                reverse_at_once(weight)
        else:
            with grad_mode(False):
                weight = _remade(raw, operands, drawn)
            weight = cast("Tensor", _MadeAgain.apply(stub, weight))
            reverse_at_once(weight)
        return as_value(weight, _Weight(self.name, raw, operands, drawn))


def _stub_of(weight: Tensor) -> Tensor | None:
    """Return a tensor without memory through which gradients reach the node of `weight`."""
    if not weight.requires_grad:
        return None
    stub = cast("Tensor", _Stub.apply(weight))
    reverse_at_once(stub)
    return stub


class _Stub(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        del ctx
        return weight.new_empty(()).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]


class _MadeAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stub: Tensor, weight: Tensor) -> Tensor:
        del ctx, stub
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None


def _draws(resolution: Resolution) -> bool:
    return any(each.step.is_random for each in resolution)


class _Weight(Source):
    """A reparametrized weight, made from the raw one and seeds."""

    __slots__ = ("_drawn", "_operands", "_raw")

    way = "regenerate"

    def __init__(self, name: str, raw: Tensor, operands: list[Operands], drawn: Resolution) -> None:
        super().__init__(name)
        self._raw = Kept(raw, name, None)
        self._operands = [
            tuple(Kept(value, f"An operand of {name}", None) for value in taken)
            for taken in operands
        ]
        self._drawn = drawn

    def make(self) -> None:
        operands = [tuple(kept.get() for kept in taken) for taken in self._operands]
        with torch.no_grad():
            self.give(_remade(self._raw.get(), operands, self._drawn))


def _remade(weight: Tensor, operands: list[Operands], drawn: Resolution) -> Tensor:
    is_own = False
    for each, taken in zip(drawn, operands, strict=True):
        weight = each.step.remake(weight, taken, each, is_own=is_own)
        is_own = True
    return weight
