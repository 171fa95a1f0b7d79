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
import weakref
from collections.abc import Callable, Collection
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from recoup._core.saved_tensors import untransformed
from recoup.weights.clock import Clock, Counter

__all__ = [
    "Application",
    "Covering",
    "Drawn",
    "Magnitude",
    "Operands",
    "Record",
    "Reparametrization",
    "Reparametrized",
    "is_table",
]

Magnitude = float | Tensor | Callable[[int], float]
Operands = tuple[Tensor, ...]
_MODES = ("training", "always")


class Application:
    """One call that applied a reparametrization to a module tree; its draws go together.

    Args:
        clock: what counts the steps; None for the forwards in training.

    Attributes:
        num_forwards: the number of forwards in training so far, or the last step of the clock.
        counter: what counts the steps instead, if there is a clock.
        left_out: the parameters that were matched and left out, by name, and why.
        steps_in_progress: the draws of steps outside of its forwards, by thread (see `waiting`).
        forwards: the draws of its forwards that may wait for a backward.
        num_forwards_to_note: how many of them are noted before some are forgotten.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.num_forwards = 0
        self.counter: Counter | None = None
        self.left_out: dict[str, str] = {}
        self.steps_in_progress: dict[int, weakref.ref[Any]] = {}
        self.forwards: list[weakref.ref[Any]] = []
        self.num_forwards_to_note = 32
        if clock is not None:
            self.follow(Counter(clock))

    def __getstate__(self) -> dict[str, Any]:
        return {"step": self.step, "left_out": self.left_out}  # without the clock

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()
        self.num_forwards = state["step"]
        self.left_out = state["left_out"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Application:
        copied = memo[id(self)] = Application()
        copied.num_forwards, copied.counter = self.num_forwards, self.counter
        copied.left_out = dict(self.left_out)
        return copied

    @property
    def step(self) -> int:
        """The number of steps so far, of the clock or of forwards in training."""
        if self.counter is not None:
            self.num_forwards = self.counter.read(self.num_forwards)
        return self.num_forwards

    @step.setter
    def step(self, step: int) -> None:
        if self.counter is not None:
            raise ValueError(
                f"`step` cannot be set to {step}, because it is read off a clock: it is "
                f"{self.counter.place}. Set that, or give another clock to recoup.weights.update."
            )
        self.num_forwards = step

    def follow(self, counter: Counter) -> None:
        """Read the step off a clock from now on."""
        self.counter = counter


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
    is_learned = False  # whether a parameter stands for its magnitude
    adds_parameters = False  # beside the weight
    breaks_graph = False  # whether a compiled graph breaks where it reads such a weight
    records: Collection[Record] = ()  # that note which draws forwards give
    draws_by_row = False  # whether rows of an embedding may be drawn alone (see `row_draws`)

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
        return f"{self.kind}({self.argument}={self.shown()}{self.extra_repr()}{mode})"

    def shown(self) -> str:
        """Return the magnitude as `applied` shows it."""
        return _shown(getattr(self, self.argument))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "records"}

    def extra_repr(self) -> str:
        """Return the other arguments as `applied` shows them."""
        return ""

    def magnitude(self, step: int) -> float:
        """Return the magnitude at a step, or raise if it is not valid; at 0 nothing is applied."""
        if self.is_learned or not self.argument:
            return 1.0
        return self._number_of(getattr(self, self.argument), step)

    def check_magnitude(self, value: Magnitude) -> None:
        """Raise if `value` could not be the magnitude now."""
        self._number_of(value, self.application.step)

    def set_magnitude(self, module: nn.Module, key: str, value: Magnitude) -> None:
        """Set the magnitude for the weight `key` of `module`."""
        del module, key
        setattr(self, self.argument, value)

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

    def added(self, key: str) -> tuple[str, ...]:
        """Return the names of the parameters that it registers beside the weight `key`."""
        del key
        return ()

    def applied_to(self, module: nn.Module, key: str) -> None:
        """Register the parameters that it takes in addition to the weight."""
        del module, key

    def removed_from(self, module: nn.Module, key: str) -> None:
        """Leave the module with a plain weight."""
        del module, key

    def complete(
        self, module: nn.Module, key: str, state_dict: dict[str, Any], name: str
    ) -> dict[str, Any]:
        """Return `state_dict` with the entries it lacks if it was saved before this was applied.

        Args:
            module: the module that loads it.
            key: the name of the weight there.
            state_dict: of the module or of a tree that contains it.
            name: the name of the weight in `state_dict`.
        """
        del module, key, name
        return state_dict

    @property
    def axis(self) -> int:
        """The axis of a norm, which a compiled graph computes by itself."""
        return -1

    def operands(self, module: nn.Module, name: str) -> Operands:
        """Return the parameters that it takes in addition to the weight."""
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

    def num_drawn_by_row(self, num_columns: int) -> int:
        """Return how many numbers are drawn for a row of an embedding."""
        return num_columns

    def compute_rows(
        self, weight: Tensor, ids: Tensor | None, drawn: Drawn, *, in_place: bool = False
    ) -> Tensor:
        """Return the rows `ids` of the reparametrized weight of an embedding (all if None).

        Args:
            weight: these rows of the raw weight, a matrix.
            ids: their numbers.
            drawn: the draw.
            in_place: whether `weight` may be overwritten.
        """
        raise NotImplementedError

    def apply_to_rows(self, rows: Tensor, ids: Tensor, drawn: Drawn) -> Tensor:
        """Return rows `ids`, looked up in the raw weight, as the reparametrized weight has them.

        Kept: the seed and, where a draw scales, `ids`, which the lookup has saved.
        """
        return cast("Tensor", _DrawnRows.apply(rows, ids, drawn))

    def transpose(self, gradient: Tensor, drawn: Drawn, *, in_place: bool = False) -> Tensor:
        """Return the gradient of the weight from that of the result (See Rule 2)."""
        if self.is_additive:
            return gradient
        return self.compute(gradient, (), drawn, in_place=in_place)


def is_table(module: nn.Module, key: str) -> bool:
    """Whether a parameter is the table in which an embedding looks up rows."""
    weight = module._parameters[key]
    is_matrix = weight is not None and weight.dim() == 2
    return isinstance(module, nn.Embedding) and key == "weight" and is_matrix


class Drawn(NamedTuple):
    """A reparametrization with the seed and the magnitude that one forward uses."""

    step: Reparametrization
    seed: int
    magnitude: float


class Record:
    """The seeds and magnitudes that forwards gave to a reparametrization."""

    def __init__(self) -> None:
        self.draws: set[tuple[int, float]] = set()


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


class _DrawnRows(torch.autograd.Function):
    """Rows of an embedding under a random draw, its own derivative likewise."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, drawn: Drawn) -> Tensor:
        ctx.drawn = drawn
        if not drawn.step.is_additive:
            ctx.save_for_backward(ids)
        return _computed_rows(rows, ids, drawn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        drawn: Drawn = ctx.drawn
        if drawn.step.is_additive:
            return gradients[0], None, None
        (ids,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return cast("Tensor", _DrawnRows.apply(gradients[0], ids, drawn)), None, None
        return _computed_rows(gradients[0], ids, drawn), None, None


def _computed_rows(rows: Tensor, ids: Tensor, drawn: Drawn) -> Tensor:
    matrix = rows.reshape(ids.numel(), rows.shape[-1])
    return drawn.step.compute_rows(matrix, ids.reshape(-1), drawn).view(rows.shape)


def _number(value: Any, name: str, needed: str, most: float) -> float:
    """Return a magnitude as a number, or raise if it is not one from 0 to `most`."""
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise ValueError(f"`{name}` has shape {tuple(value.shape)}, but must be {needed}.")
        if value.requires_grad:
            way = " To train it, give `nn.Parameter(std)` to recoup.weight_noise."
            way = way if name == "std" else ""
            raise ValueError(
                f"`{name}` is a {type(value).__name__} that requires a gradient, but a draw has no "
                f"gradient for it, so it would never be trained. Give `{name}.detach()`, which "
                f"shares its memory, or a function from the step to a number.{way}"
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


class Covering(Protocol):
    """The reparametrizations that a forward of a module is in force for."""

    handle: Tensor
    applications: tuple[Application, ...]
    draws: bool
    draws_always: bool
