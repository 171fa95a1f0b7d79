"""The base class of reparametrizations: each has a kind, a mode, a magnitude, and two ways to run.

A weight is made twice from the same numbers: in forward with a graph (`apply`), and in backward
without one (`remake`). Both must give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

__all__ = ["Application", "Drawn", "Magnitude", "Operands", "Reparametrization", "Reparametrized"]

Magnitude = float | Tensor | Callable[[int], float]
Operands = tuple[Tensor, ...]
_MODES = ("training", "always")


class Application:
    """One call that applied a reparametrization to a module tree; its draws go together."""

    def __init__(self) -> None:
        self.step = 0


class Reparametrization:
    """One step from the raw weight to the one that forward uses.

    Args:
        application: the call that applied it.
        mode: "training" for modules in training mode only, or "always".
    """

    kind: ClassVar[str]
    order: ClassVar[int]
    is_random: ClassVar[bool] = True
    changes_weight: ClassVar[bool] = False  # whether removing it leaves another raw weight
    drops_rows = False  # whether it may be applied to the rows of an embedding after the lookup

    def __init__(self, application: Application, mode: str) -> None:
        if mode not in _MODES:
            raise ValueError(
                f'`mode` is {mode!r}, but must be "training" (noise in training mode only) or '
                '"always" (in evaluation too).'
            )
        self.application = application
        self.mode = mode

    @property
    def has_schedule(self) -> bool:
        """Whether its magnitude depends on the step."""
        return False

    def magnitude(self, step: int) -> float:
        """Return the magnitude at a step; at 0 nothing is applied."""
        del step
        return 1.0

    def fit(self, module: nn.Module, key: str, name: str) -> None:
        """Adapt to the weight `key` of `module`, or raise if it cannot be applied to it."""
        del module, key, name

    def applied_to(self, module: nn.Module, key: str) -> None:
        """Register the parameters that it takes in addition to the weight."""
        del module, key

    def removed_from(self, module: nn.Module, key: str) -> None:
        """Leave the module with a plain weight."""
        del module, key

    def complete(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        """Return `state_dict` with the entries it lacks if it was saved before this was applied."""
        del name
        return state_dict

    def operands(self, module: nn.Module, name: str) -> Operands:
        """Return the parameters that it takes in addition to the weight."""
        del module, name
        return ()

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        """Return the reparametrized weight, with its graph."""
        raise NotImplementedError

    def apply_plainly(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        """Return the same by differentiable operators of torch, which keep their residuals."""
        return self.apply(weight, operands, drawn)

    def apply_to_rows(self, rows: Tensor, ids: Tensor, num_rows: int, drawn: Drawn) -> Tensor:
        """Return rows, looked up in the raw weight, as the reparametrized weight has them."""
        raise NotImplementedError

    def transpose_(self, gradient: Tensor, drawn: Drawn) -> Tensor:
        """Return the gradient of the weight from that of the result, without a graph, in place."""
        raise NotImplementedError

    def remake(self, weight: Tensor, operands: Operands, drawn: Drawn, *, is_own: bool) -> Tensor:
        """Return the same without a graph; with `is_own`, `weight` may be changed in place."""
        raise NotImplementedError


class Drawn(NamedTuple):
    """A reparametrization with the seed and the magnitude that one forward uses."""

    step: Reparametrization
    seed: int
    magnitude: float


def value_of(
    magnitude: Magnitude, step: int, name: str, *, least: float, most: float, needed: str
) -> float:
    """Return a magnitude as a number, or raise if it is not valid; `needed` is for the error."""
    value: Any = magnitude
    if type(value) is float and least <= value <= most and math.isfinite(value):
        return value  # without the checks of the other forms
    if callable(value) and not isinstance(value, Tensor):
        value = value(step)
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"`{name}` has shape {tuple(value.shape)}, but must be {needed}.")
        if value.requires_grad:
            raise ValueError(
                f"`{name}` is a {type(value).__name__} that requires a gradient, but a draw has no "
                f"gradient for it, so it would never be trained. Give `{name}.detach()`, which "
                "shares its memory, or a function from the step to a number."
            )
        value = value.item()
    is_number = isinstance(value, Real)  # includes numpy's numbers
    number = float(value) if is_number and value is not True else math.nan
    if not (math.isfinite(number) and least <= number <= most):
        raise ValueError(
            f"`{name}` is {value!r}, but must be {needed}: a number, a 0-dim tensor, or a function "
            "from the step to a number."
        )
    return number


def is_schedule(magnitude: Magnitude) -> bool:
    """Whether a magnitude is a function of the step."""
    return callable(magnitude) and not isinstance(magnitude, Tensor)


def shown(magnitude: Magnitude) -> str:
    """Return a magnitude as a report shows it."""
    if isinstance(magnitude, Tensor):
        return f"{magnitude.item():g}"
    if callable(magnitude):
        return getattr(magnitude, "__name__", type(magnitude).__name__)
    return f"{magnitude:g}"


class Reparametrized(Protocol):
    """A parameter under one of its names, with the steps that are applied to it."""

    key: str
    name: str
    handle: Tensor
    steps: list[Reparametrization]

    def read(self, module: nn.Module, raw: Tensor) -> Tensor:
        """Return the weight that the forward in progress uses."""
        ...

    def resolution(self, raw: Tensor, *, is_training: bool) -> tuple[Drawn, ...]:
        """Return the draws for the weight in the forward in progress."""
        ...
