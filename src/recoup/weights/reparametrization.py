"""The base class of reparametrizations: each states its formula once, in `compute`.

NOTE [ One formula ]

Rule 1. A weight is computed twice from the same numbers: in forward, and again in backward, where
        nothing needs a graph. Both call `compute`, so both have the same bits.
Rule 2. What a random draw does to an entry of a weight depends on no other entry: it scales it, or
        adds to it. So the gradient of the weight is that of the result, scaled likewise: `compute`
        is its own transpose, and has derivatives of any order.
Rule 3. In a transform of torch.func such an autograd function does not work. There, the scales or
        the summands are a tensor: `compute` of ones, or of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from recoup._core.saved_tensors import untransformed

__all__ = ["Application", "Drawn", "Magnitude", "Operands", "Reparametrization", "Reparametrized"]

Magnitude = float | Tensor | Callable[[int], float]
Operands = tuple[Tensor, ...]
_MODES = ("training", "always")


class Application:
    """One call that applied a reparametrization to a module tree; its draws go together.

    Attributes:
        step: the number of forwards in training so far.
        left_out: the parameters that were matched and left out, by name, and why.
    """

    def __init__(self) -> None:
        self.step = 0
        self.left_out: dict[str, str] = {}


class Reparametrization:
    """One step from the raw weight to the one that forward uses.

    Args:
        application: the call that applied it.
        mode: "training" for modules in training mode only, or "always".
    """

    kind: ClassVar[str]
    order: ClassVar[int]
    argument: ClassVar[str] = ""  # the name of its magnitude, if it has one
    most: ClassVar[float] = math.inf  # the largest magnitude
    is_random: ClassVar[bool] = True
    is_additive: ClassVar[bool] = False  # whether a draw is added to a weight, or scales it
    changes_weight: ClassVar[bool] = False  # whether removing it leaves another raw weight
    function: Callable[..., Tensor] | None = None  # of the user's, which autograd differentiates
    adds_parameters = False  # beside the weight
    drops_rows = False  # whether it may be applied to the rows of an embedding after the lookup

    def __init__(self, application: Application, mode: str) -> None:
        if mode not in _MODES:
            raise ValueError(
                f'`mode` is {mode!r}, but must be "training" (noise in training mode only) or '
                '"always" (in evaluation too).'
            )
        self.application = application
        self.mode = mode

    def __repr__(self) -> str:
        mode = "" if self.mode == "training" else f', mode="{self.mode}"'
        value = _shown(getattr(self, self.argument))
        return f"{self.kind}({self.argument}={value}{self.extra_repr()}{mode})"

    def extra_repr(self) -> str:
        """Return the other arguments as `applied` shows them."""
        return ""

    @property
    def has_schedule(self) -> bool:
        """Whether its magnitude depends on the step."""
        magnitude: Any = getattr(self, self.argument, None)
        return callable(magnitude) and not isinstance(magnitude, Tensor)

    def magnitude(self, step: int) -> float:
        """Return the magnitude at a step, or raise if it is not valid; at 0 nothing is applied."""
        if not self.argument:
            return 1.0
        return self._number_of(getattr(self, self.argument), step)

    def check_magnitude(self, value: Magnitude) -> None:
        """Raise if `value` could not be the magnitude now."""
        self._number_of(value, self.application.step)

    def _number_of(self, value: Any, step: int) -> float:
        if type(value) is float and 0.0 <= value <= self.most and math.isfinite(value):
            return value  # without the checks of the other forms
        needed = "0 or more" if self.most == math.inf else f"from 0 to {self.most:g}"
        if callable(value) and not isinstance(value, Tensor):
            value = cast("Callable[[int], Any]", value)(step)
        return _number(value, self.argument, needed, self.most)

    def is_same_as(self, other: Reparametrization) -> bool:
        """Whether a weight that has `other` cannot have this one, too."""
        return other.kind == self.kind

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
        """Return the parameters that it takes in addition to the weight; one kind takes any."""
        del module, name
        return ()

    def compute(
        self, weight: Tensor, operands: Operands, drawn: Drawn, *, in_place: bool = False
    ) -> Tensor:
        """Return the reparametrized weight; with `in_place`, `weight` may be overwritten."""
        raise NotImplementedError

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        """Return the reparametrized weight with its graph, which keeps nothing but the seed."""
        del operands
        return cast("Tensor", _Drawn.apply(weight, drawn))

    def apply_by_operators(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        """Return the same by differentiable operators of torch, which keep their residuals."""
        del operands
        with untransformed():
            made = torch.zeros if self.is_additive else torch.ones
            draw = made(weight.shape, dtype=weight.dtype, device=weight.device)
            draw = self.compute(draw, (), drawn, in_place=True)
        return weight + draw if self.is_additive else weight * draw

    def apply_to_rows(self, rows: Tensor, ids: Tensor, num_rows: int, drawn: Drawn) -> Tensor:
        """Return rows, looked up in the raw weight, as the reparametrized weight has them."""
        raise NotImplementedError

    def transpose(self, gradient: Tensor, drawn: Drawn, *, in_place: bool = False) -> Tensor:
        """Return the gradient of the weight from that of the result (See Rule 2)."""
        if self.is_additive:
            return gradient
        return self.compute(gradient, (), drawn, in_place=in_place)


class Drawn(NamedTuple):
    """A reparametrization with the seed and the magnitude that one forward uses."""

    step: Reparametrization
    seed: int
    magnitude: float


class _Drawn(torch.autograd.Function):
    """A weight under a random draw, which is its own derivative up to a constant (See Rule 2)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, drawn: Drawn) -> Tensor:
        ctx.drawn = drawn
        return drawn.step.compute(weight, (), drawn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        drawn: Drawn = ctx.drawn
        if torch.is_grad_enabled() and not drawn.step.is_additive:
            return cast("Tensor", _Drawn.apply(gradients[0], drawn)), None
        return drawn.step.transpose(gradients[0], drawn), None


def _number(value: Any, name: str, needed: str, most: float) -> float:
    """Return a magnitude as a number, or raise if it is not one from 0 to `most`."""
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
    if not (math.isfinite(number) and 0.0 <= number <= most):
        raise ValueError(
            f"`{name}` is {value!r}, but must be {needed}: a number, a 0-dim tensor, or a function "
            "from the step to a number."
        )
    return number


def _shown(magnitude: Magnitude) -> str:
    if isinstance(magnitude, Tensor):
        return f"{magnitude.item():g}"
    if callable(magnitude):
        return getattr(magnitude, "__name__", type(magnitude).__name__)
    return f"{magnitude:g}"


class Reparametrized(Protocol):
    """A parameter under one of its names, with the steps that are applied to it."""

    key: str
    path: str
    name: str
    handle: Tensor
    steps: list[Reparametrization]

    def read(self, module: nn.Module, raw: Tensor) -> Tensor:
        """Return the weight that the forward in progress uses."""
        ...

    def resolution(self, raw: Tensor, *, is_training: bool) -> tuple[Drawn, ...]:
        """Return the draws for the weight in the forward in progress."""
        ...
