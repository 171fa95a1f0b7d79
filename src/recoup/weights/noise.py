"""Variational noise: Gaussian noise on a weight, new in each forward.

NOTE [ A deviation that is a parameter ]

Rule 1. The noise is linear in its deviation: a unit, drawn from the seed, times the deviation. The
        gradient of the deviation is the gradient of the weight times that unit, summed to its
        shape. So each of these two functions is the derivative of the other, and both draw.
Rule 2. The root mean square of a relative noise is computed from the weight wherever that is made.
        A gradient of the deviation needs it, too, when the weight is gone: the number is kept.
Rule 3. The sum has the type of the weight, whatever type a deviation has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from recoup._core.saved_tensors import untransformed
from recoup.weights import draws, row_draws
from recoup.weights.application import apply_to
from recoup.weights.clock import Clock
from recoup.weights.deviations import Deviations
from recoup.weights.matching import Where
from recoup.weights.reparametrization import (
    Application,
    Drawn,
    Magnitude,
    Operands,
    Reparametrization,
    is_table,
)

__all__ = ["WeightNoise", "root_mean_square", "weight_noise"]


def weight_noise(
    module: nn.Module,
    pattern: Where = "weight",
    std: Magnitude | nn.Parameter = 0.01,
    *,
    mode: str = "training",
    learned: str | None = None,
    relative: bool = False,
    clock: Clock | None = None,
    tied: str = "own",
) -> nn.Module:
    """Add Gaussian noise to weights in each forward, and keep nothing for it but a seed.

    Kept: 8 bytes a weight (12 if `relative`); neither the noise nor the noisy weight, whichever
    operator saves it. Backward pays one draw a weight, and another for the gradient of a deviation
    that is trained. The parameters remain the same objects under the same names; evaluation uses
    the raw weight.

    A deviation that is trained is a parameter `weight_std` beside `weight`: add it to existing
    optimizers, and wrap in DistributedDataParallel afterwards. A `state_dict` has it too; one
    without it can be loaded, and leaves it as it is.

    Args:
        module: the module, or a tree of modules. One forward of it has one draw.
        pattern: chooses parameters: a regular expression for the whole of their qualified names, a
            type of modules (its weights), a function ``(name, parameter, module) -> bool``, or a
            list of these. Frozen parameters, and those without floating-point numbers, are chosen
            by a function or by their name in full only; `applied` names what is left out.
        std: the standard deviation of the noise, in the units of the weight. A number, a 0-dim
            tensor, or a function from the step to a number. Or an `nn.Parameter` of any shape that
            can be broadcast to each weight, which is then trained.
        mode: "training", or "always" to draw in evaluation too.
        learned: trains the deviation, from the number `std` on: one for each "tensor", each "row"
            (index of the first axis), each entry of a "weight", or one for all of the "model", the
            weights that this call chooses.
        relative: whether `std` is in units of the root mean square of the weight that the noise is
            added to (after norm and dropout), which counts as a constant for gradients.
        clock: what tells the step of a function `std`: an optimizer, whose steps are counted and
            saved with its state, a learning-rate scheduler, or a function without arguments. By
            default it is the number of forwards in training so far.
        tied: "own" gives each name of a tied parameter a draw of its own; with "same" they share
            one, also with names to which another call with "same" applies.

    Returns:
        `module` itself.

    Raises:
        ValueError: when no parameter matches, one has weight noise already, or an argument is out
            of its range or, as a parameter, has a shape that does not fit.
        ChangedError: in backward, when a raw weight or its deviation has changed in place since
            forward.

    Example:
        >>> import recoup, torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> layer = recoup.weight_noise(layer, std=lambda step: 0.0 if step < 20_000 else 0.0025)
        >>> layer.eval()(torch.ones(1, 4)).shape
        torch.Size([1, 4])
        >>> layer = recoup.weight_noise(torch.nn.Linear(4, 3), std=0.1, learned="row")
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> layer.weight_std.grad.shape
        torch.Size([3, 1])

    Source: Graves, "Practical variational inference for neural networks" (2011);
    https://github.com/rwth-i6/returnn/issues/1518.
    """
    application = Application(clock)
    deviations = Deviations(std, learned)
    if type(cast("Any", relative)) is not bool:
        raise ValueError(f"`relative` is {relative!r}, but must be True or False.")
    return apply_to(
        module,
        pattern,
        lambda: WeightNoise(application, deviations, mode, relative=relative),
        tied=tied,
    )


class WeightNoise(Reparametrization):
    """Weight noise: adds Gaussian noise to a weight."""

    kind = "weight_noise"
    order = 2
    argument = "std"
    is_additive = True
    relative = False

    def __init__(
        self, application: Application, deviations: Deviations, mode: str, *, relative: bool
    ) -> None:
        super().__init__(application, mode)
        self.relative = relative
        self.is_learned = self.breaks_graph = deviations.is_learned
        self._key = ""
        self._deviations: Deviations | None = deviations  # until it is applied
        self.std: Any = None if isinstance(deviations.std, nn.Parameter) else deviations.std
        if self.std is not None or not self.is_learned:
            self._number_of(self.std, application.step)

    @property
    def adds_parameters(self) -> bool:
        return self.is_learned

    def shown(self) -> str:
        return f"{self._key}_std" if self.is_learned else super().shown()

    def extra_repr(self) -> str:
        return ", relative=True" if self.relative else ""

    def check_magnitude(self, value: Magnitude) -> None:
        if self.is_learned and not isinstance(value, Real):
            got = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"`std` is {got}, but the deviation is learned, as `{self._key}_std`, so it "
                "can be set to a number only. For another kind call recoup.weights.remove first."
            )
        super().check_magnitude(cast("float", value))

    def set_magnitude(self, module: nn.Module, key: str, value: Magnitude) -> None:
        if not self.is_learned:
            super().set_magnitude(module, key, value)
            return
        (std,) = self.operands(module, key)
        with torch.no_grad():
            std.fill_(float(cast("float", value)))

    def fit(self, module: nn.Module, key: str, name: str) -> None:
        """Raise if the weight cannot have a deviation that is a parameter."""
        self._key = key
        self.draws_by_row = is_table(module, key) and not self.is_learned and not self.relative
        if not self.is_learned or self._deviations is None:
            return
        if hasattr(module, f"{key}_std"):
            raise ValueError(
                f"`{name}_std` exists already, which is what the deviation of `{name}` would be "
                "called. Rename it, or let `pattern` leave this weight out."
            )
        self._deviations.check(cast("Tensor", module._parameters[key]), name)

    def added(self, key: str) -> tuple[str, ...]:
        return (f"{key}_std",) if self.is_learned else ()

    def applied_to(self, module: nn.Module, key: str) -> None:
        weight, deviations = module._parameters[key], self._deviations
        self._deviations = None
        if self.is_learned and weight is not None and deviations is not None:
            module.register_parameter(f"{key}_std", deviations.parameter_for(weight))

    def removed_from(self, module: nn.Module, key: str) -> None:
        if self.is_learned:
            del module._parameters[f"{key}_std"]

    def complete(
        self, module: nn.Module, key: str, state_dict: dict[str, Any], name: str
    ) -> dict[str, Any]:
        if not self.is_learned or name not in state_dict or f"{name}_std" in state_dict:
            return state_dict
        (std,) = self.operands(module, key)
        return {**state_dict, f"{name}_std": std.detach()}

    def operands(self, module: nn.Module, name: str) -> Operands:
        return (getattr(module, f"{name}_std"),) if self.is_learned else ()

    def std_now(self, module: nn.Module, key: str) -> Tensor | float:
        """Return the deviation now, before it is made relative to the weight.

        Args:
            module: the module that has the weight.
            key: the name of the weight there.
        """
        operands = self.operands(module, key)
        return operands[0] if operands else self.magnitude(self.application.step)

    def deviation(self, weight: Tensor, std: Tensor | float) -> Tensor | float:
        """Return a deviation of a shape that can be broadcast to the weight."""
        return root_mean_square(weight) * std if self.relative else std

    def compute(
        self, weight: Tensor, operands: Operands, drawn: Drawn, *, in_place: bool = False
    ) -> Tensor:
        if operands or self.relative:
            std = operands[0] if operands else drawn.magnitude
            return self._unit(weight, drawn).draw().mul_(std).add_(weight)
        if self.draws_by_row:
            return self.compute_rows(weight, None, drawn, in_place=in_place)
        add_noise = draws.noised_ if in_place and weight.is_contiguous() else draws.noised
        return add_noise(weight, drawn.seed, drawn.magnitude)

    def compute_rows(
        self, weight: Tensor, ids: Tensor | None, drawn: Drawn, *, in_place: bool = False
    ) -> Tensor:
        return row_draws.noised(weight, drawn.seed, drawn.magnitude, ids, in_place=in_place)

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        if operands:
            unit = self._unit(weight, drawn)
            return cast("Tensor", _Noised.apply(weight, operands[0], unit))
        is_simple = not self.relative and not self.draws_by_row
        if is_simple and weight.is_contiguous():  # or the sum would not be
            noise = draws.noise_beside(weight, drawn.seed, drawn.magnitude)
            if noise is not None:
                return weight + noise  # keeps nothing, and costs less than a function of our own
        return super().apply(weight, operands, drawn)

    def apply_by_operators(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        if not operands and not self.relative:
            return super().apply_by_operators(weight, operands, drawn)
        with untransformed():
            unit = _Unit(weight.shape, weight.dtype, weight.device, drawn.seed, None).draw()
        if self.relative:
            unit = unit * root_mean_square(weight)
        return weight + (unit * (operands[0] if operands else drawn.magnitude)).to(weight.dtype)

    def _unit(self, weight: Tensor, drawn: Drawn) -> _Unit:
        scale = root_mean_square(weight) if self.relative else None
        return _Unit(weight.shape, weight.dtype, weight.device, drawn.seed, scale)


def root_mean_square(weight: Tensor) -> Tensor:
    """Return the root mean square of a weight, a constant for gradients."""
    kind = torch.promote_types(weight.dtype, torch.float32)
    within_rows = tuple(range(1, weight.dim()))
    # Of 25 million numbers at once, torch's norm is off by a part in a thousand.
    norm = cast("Callable[..., Tensor]", torch.linalg.vector_norm)
    length = norm(norm(weight.detach(), dim=within_rows, dtype=kind))
    return length / math.sqrt(max(1, weight.numel()))


class _Unit(NamedTuple):
    """The noise of a weight at a deviation of 1: the same numbers whenever it is drawn."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    seed: int
    scale: Tensor | None  # the root mean square (See Rule 2)

    def draw(self) -> Tensor:
        """Return a new contiguous tensor."""
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        noise = draws.noised_(zeros, self.seed, 1.0)
        return noise if self.scale is None else noise.mul_(self.scale)


class _Noised(torch.autograd.Function):
    """A weight, or zero for None, and its noise: a unit times the deviation (See Rule 1)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor | None, std: Tensor, unit: _Unit) -> Tensor:
        ctx.like_std, ctx.unit = (std.shape, std.dtype), unit
        noise = unit.draw().mul_(std)  # See Rule 4
        return noise if weight is None else noise.add_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_weight, of_std = ctx.needs_input_grad[:2]
        (gradient,) = gradients
        summed = None
        if of_std:
            summed = cast("Tensor", _Summed.apply(gradient, *ctx.like_std, ctx.unit))
        return gradient if of_weight else None, summed, None


class _Summed(torch.autograd.Function):
    """A gradient times the unit of a noise, summed to the shape of the deviation."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, shape: torch.Size, dtype: torch.dtype, unit: _Unit
    ) -> Tensor:
        ctx.unit = unit
        noise = unit.draw().to(torch.promote_types(dtype, unit.dtype))
        if gradient.layout is torch.strided:
            return noise.mul_(gradient).sum_to_size(shape).to(dtype)
        product = gradient * noise  # of an embedding that has sparse gradients
        return (product if shape == unit.shape else product.to_dense().sum_to_size(shape)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return cast("Tensor", _Noised.apply(None, gradients[0], ctx.unit)), None, None, None
