"""What every reparametrization of a weight has: a kind, a mode, a magnitude, and two ways to run.

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
        """Return how strong it is at a step; 0 is not at all."""
        del step
        return 1.0

    def fit(self, module: nn.Module, key: str, name: str) -> None:
        """Take the weight `key` of `module` into account, or raise if that is impossible."""
        del module, key, name

    def applied_to(self, module: nn.Module, key: str) -> None:
        """Give the module the parameters that this takes beside the weight."""
        del module, key

    def removed_from(self, module: nn.Module, key: str) -> None:
        """Leave the module with a plain weight."""
        del module, key

    def complete(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        """Return `state_dict` with what it lacks if it was saved before this was applied."""
        del name
        return state_dict

    def operands(self, module: nn.Module, name: str) -> Operands:
        """Return the parameters that it takes beside the weight."""
        del module, name
        return ()

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        """Return the reparametrized weight, with its graph."""
        raise NotImplementedError

    def apply_plainly(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        """Return the same by differentiable operators of torch alone, which keep what they do."""
        return self.apply(weight, operands, drawn)

    def apply_to_rows(self, rows: Tensor, ids: Tensor, num_rows: int, drawn: Drawn) -> Tensor:
        """Return the rows that were looked up in the raw weight as the weight would have them."""
        raise NotImplementedError

    def transpose_(self, gradient: Tensor, drawn: Drawn) -> Tensor:
        """Return the gradient of the weight from that of the result, without a graph, in place."""
        raise NotImplementedError

    def remake(self, weight: Tensor, operands: Operands, drawn: Drawn, *, is_own: bool) -> Tensor:
        """Return the same without a graph; a weight that is our own may be changed in place."""
        raise NotImplementedError


class Drawn(NamedTuple):
    """A reparametrization with the seed and the magnitude that one forward uses."""

    step: Reparametrization
    seed: int
    magnitude: float


def value_of(
    magnitude: Magnitude, step: int, name: str, *, least: float, most: float, needed: str
) -> float:
    """Return a magnitude as a number, or raise if it is not what is `needed`."""
    value: Any = magnitude
    if type(value) is float and least <= value <= most and math.isfinite(value):
        return value  # spared what the other forms need
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
    is_number = isinstance(value, Real)  # numpy's are among them
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
        """Return what is done to the weight in the forward in progress."""
        ...
