"""Variational noise: Gaussian noise on a weight, new in each forward."""

from __future__ import annotations

from torch import Tensor, nn

from recoup.weights import draws
from recoup.weights.application import apply_to
from recoup.weights.matching import Where
from recoup.weights.reparametrization import (
    Application,
    Drawn,
    Magnitude,
    Operands,
    Reparametrization,
)

__all__ = ["WeightNoise", "weight_noise"]


def weight_noise(
    module: nn.Module, pattern: Where = "weight", std: Magnitude = 0.01, *, mode: str = "training"
) -> nn.Module:
    """Add Gaussian noise to weights in each forward, and keep nothing for it but a seed.

    Kept: 8 bytes a weight; neither the noise nor the noisy weight, whichever operator saves it.
    Backward pays one draw a weight. The parameters remain the same objects under the same names;
    evaluation uses the raw weight.

    Args:
        module: the module, or a tree of modules. One forward of it has one draw.
        pattern: chooses parameters: a regular expression for the whole of their qualified names, a
            type of modules (its weights), a function ``(name, parameter, module) -> bool``, or a
            list of these. Frozen parameters, and those without floating-point numbers, are chosen
            by a function or by their name in full only; `applied` names what is left out.
        std: the standard deviation of the noise, in the units of the weight. A number, a 0-dim
            tensor, or a function from the step (forwards in training so far) to a number.
        mode: "training", or "always" to draw in evaluation too.

    Returns:
        `module` itself.

    Raises:
        ValueError: when no parameter matches, one has weight noise already, or an argument is out
            of its range.
        ChangedError: in backward, when a raw weight has changed in place since forward.

    Example:
        >>> import recoup, torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> layer = recoup.weight_noise(layer, std=lambda step: 0.0 if step < 20_000 else 0.0025)
        >>> layer.eval()(torch.ones(1, 4)).shape
        torch.Size([1, 4])

    Source: Graves, "Practical variational inference for neural networks" (2011);
    https://github.com/rwth-i6/returnn/issues/1518.
    """
    application = Application()
    return apply_to(module, pattern, lambda: WeightNoise(application, std, mode))


class WeightNoise(Reparametrization):
    """Weight noise: adds Gaussian noise to a weight."""

    kind = "weight_noise"
    order = 2
    argument = "std"
    is_additive = True

    def __init__(self, application: Application, std: Magnitude, mode: str) -> None:
        super().__init__(application, mode)
        self.std = std
        self.magnitude(application.step)

    def compute(
        self, weight: Tensor, operands: Operands, drawn: Drawn, *, in_place: bool = False
    ) -> Tensor:
        add_noise = draws.noised_ if in_place and weight.is_contiguous() else draws.noised
        return add_noise(weight, drawn.seed, drawn.magnitude)

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        if weight.is_contiguous():  # or the sum would not be
            noise = draws.noise_beside(weight, drawn.seed, drawn.magnitude)
            if noise is not None:
                return weight + noise  # keeps nothing, and costs less than a function of our own
        return super().apply(weight, operands, drawn)
