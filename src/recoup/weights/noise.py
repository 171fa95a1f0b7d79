"""Variational noise: Gaussian noise on a weight, new in each forward, and its divergence.

A deviation that is a number has a formula of its own. One that is a parameter is differentiated by
autograd, in a region that draws again (Rule 3 of NOTE [ One formula ]). The sum has the type of the
weight, whatever type a deviation has.
"""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recoup._arguments import is_real, shown
from recoup._core.call import Call, run_again
from recoup._core.saved_tensors import is_transformed, untransformed
from recoup.weights import draws
from recoup.weights.application import apply_to
from recoup.weights.choosing import ANY_WEIGHT, Where, reparametrized
from recoup.weights.reparametrization import (
    Application,
    Drawn,
    Magnitude,
    Operands,
    Reparametrization,
)


def weight_noise(
    module: nn.Module,
    pattern: Where = ANY_WEIGHT,
    std: Magnitude | nn.Parameter = 0.01,
    *,
    mode: str = "training",
    learned: str | None = None,
    tied: str = "own",
) -> nn.Module:
    """Add Gaussian noise to weights in each forward, and keep nothing for it but a seed.

    Kept: 8 bytes a weight; neither the noise nor the noisy weight, whichever operator saves it.
    Backward pays one draw a weight. The parameters remain the same objects under the same names;
    evaluation uses the raw weight.

    A deviation that is trained is a parameter `weight_std` beside `weight`: add it to existing
    optimizers, and wrap in DistributedDataParallel afterwards. A `state_dict` has it too.

    Args:
        module: the module, or a tree of modules. A forward of it is a step, which has one draw.
        pattern: chooses parameters, as `pattern` of `weight_dropout` does; by default, all weights.
        std: the standard deviation of the noise, in the units of the weight. A number, a 0-dim
            tensor, or a function from the number of steps in training so far (see `set_step`) to a
            number. Or an `nn.Parameter` of any shape that can be broadcast to each weight, which is
            then trained.
        mode: "training", or "always" to draw in evaluation too.
        learned: trains the deviation, from the number `std` on: one for each "tensor", each "row"
            (index of the first axis), or each entry of a "weight".
        tied: "own" gives each name of a tied parameter a draw of its own; with "same" those that
            `pattern` chooses share one.

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
    make = partial(WeightNoise, Application(), std, mode, learned)
    return apply_to(module, pattern, make, tied=tied)


_LEARNED = ("tensor", "row", "weight")


class WeightNoise(Reparametrization):
    """Weight noise: adds Gaussian noise to a weight."""

    kind = "weight_noise"
    order = 2
    argument = "std"
    is_additive = True

    def __init__(
        self,
        application: Application,
        std: Magnitude | nn.Parameter,
        mode: str,
        learned: str | None,
    ) -> None:
        super().__init__(application, mode)
        if learned is not None and (learned not in _LEARNED or not isinstance(std, Real)):
            raise ValueError(
                f"`learned` is {learned!r} and `std` is {std!r}, but `learned` must be one of "
                f"{_LEARNED} (what has a deviation of its own that is trained from the number "
                "`std` on), or None for one that is not trained, or is a Parameter itself."
            )
        self._std = std if isinstance(std, nn.Parameter) else self.checked(std)
        self._learned, self._key = learned, ""
        if learned is not None or isinstance(std, nn.Parameter):
            self.suffix = "_std"
            self.by_autograd = self.by_operators = self.adds_parameters = True
        else:
            self.rate = self._std

    def shown(self) -> str:
        return f"std={self._key}_std" if self.suffix else super().shown()

    def checked(self, value: Any) -> Magnitude:
        if self.suffix and not isinstance(value, Real):
            raise ValueError(
                f"`std` is {value!r}, but the deviation is learned, as `{self._key}_std`, so it "
                "can be set to a number only. For another kind call recoup.weights.remove first."
            )
        return super().checked(value)

    def set_rate(self, module: nn.Module, key: str, rate: Magnitude) -> None:
        if self.suffix:
            with torch.no_grad():
                self.operands(module, key)[0].fill_(float(cast("float", rate)))
        else:
            self.rate = rate

    def fit(self, module: nn.Module, key: str, name: str) -> None:
        """Make the deviation that is learned, or raise if the weight cannot have the one given."""
        self._key = key
        weight = cast("Tensor", module._parameters[key])
        if isinstance(self._std, nn.Parameter):
            std = self._std
            shape = () if is_lazy(std) else tuple(std.shape)
            sizes = zip(reversed(shape), reversed(weight.shape), strict=False)
            is_number = not is_lazy(std) and std.is_floating_point() and std.dim() <= weight.dim()
            if not is_number or any(mine not in (1, theirs) for mine, theirs in sizes):
                raise ValueError(
                    f"`std` is a Parameter of {std.dtype} and shape {shape}, but must have "
                    "floating-point numbers and a shape that can be broadcast to that of "
                    f"`{name}`, {tuple(weight.shape)}. Or let `pattern` leave this weight out."
                )
        elif self._learned is not None:
            shape = tuple(weight.shape) if self._learned == "weight" else ()
            if self._learned == "row" and weight.dim():
                shape = (weight.shape[0], *(1 for _ in weight.shape[1:]))
            std = float(cast("float", self._std))
            made = torch.full(shape, std, dtype=weight.dtype, device=weight.device)
            self._std = nn.Parameter(made)

    def first_value(self, weight: Tensor) -> nn.Parameter:
        return cast("nn.Parameter", self._std)

    def compute(self, weight: Tensor, own: Operands, drawn: Drawn, is_new: bool = False) -> Tensor:
        if not self.suffix:
            return draws.noised(weight, drawn.seed, drawn.magnitude, in_place=is_new)
        with untransformed():  # or a transform of torch.func would take it for random
            zeros = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
            noise = draws.noised(zeros, drawn.seed, 1.0, in_place=True)
        return weight + (noise * own[0]).to(weight.dtype)

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        is_simple = not (self.by_operators or is_transformed())
        if is_simple and weight.is_contiguous():  # or the sum would not be
            noise = draws.noise_beside(weight, drawn.seed, drawn.magnitude)
            if noise is not None:
                return weight + noise  # keeps nothing, and costs less than a function of our own
        return super().apply(weight, operands, drawn)


# -- the divergence from a prior -------------------------------------------------------------------


def kl_divergence(
    module: nn.Module,
    where: Where = ".*",
    *,
    prior_std: float | Tensor | None,
    prior_mean: float | Tensor = 0.0,
) -> Tensor:
    """Return the divergence of noisy weights from their prior, in nats, to be added to a loss.

    A weight ``w`` with noise of deviation ``s`` is a normal distribution. The sum over the entries
    of all weights with noise of ``KL(N(w, s^2) || N(prior_mean, prior_std^2))``, divided by the
    number of samples in the training set, belongs to the mean loss of a batch. It is
    differentiable for the weights, for deviations that are learned, and for a prior that is a
    tensor. Nothing is drawn, and the mode of `module` does not matter.

    A weight with a norm counts as normalized; dropout and functions are left out. A deviation
    counts by its absolute value, a schedule by that at the present step; one of 0 has an infinite
    divergence. A parameter with several names counts once, unless its uses have several deviations.

    Kept: a few numbers a weight; the divergence of weights in half precision is computed in
    float32. Backward computes the divergence again, and makes the gradient of each weight.

    Args:
        module: a module, or a tree of modules.
        where: chooses parameters, as `pattern` of `weight_noise` does.
        prior_std: the deviation of the prior: a number above 0, or a 0-dim tensor. None for the
            prior that fits best: each weight has the mean and the variance for which its
            divergence is least.
        prior_mean: the mean of the prior: a number, or a 0-dim tensor.

    Returns:
        A 0-dim tensor.

    Raises:
        ValueError: when no chosen parameter has weight noise, or an argument is out of its range.

    Example:
        >>> import recoup, torch
        >>> layer = recoup.weight_noise(torch.nn.Linear(4, 3), std=0.1, learned="row")
        >>> loss = recoup.weights.kl_divergence(layer, prior_std=1.0) / 1000
        >>> loss.backward()
        >>> layer.weight_std.grad.shape
        torch.Size([3, 1])

    Source: Graves, "Practical variational inference for neural networks" (2011), equations 15 to
    18; Kingma and Welling, https://arxiv.org/abs/1312.6114, appendix B.
    """
    _check_prior("prior_mean", prior_mean, -math.inf, "a number")
    if prior_std is not None:
        _check_prior("prior_std", prior_std, 0.0, "a number above 0, None for one that is fitted")
    elif isinstance(prior_mean, Tensor) or prior_mean != 0:
        raise ValueError(
            "`prior_mean` is given, but `prior_std` is None, for a prior whose mean and deviation "
            "are both fitted. Give both, or neither."
        )
    found: dict[tuple[Any, ...], tuple[Tensor, Tensor | float]] = {}
    for each, weight in reparametrized(module, where, "where"):
        noise = next((step for step in weight.steps if isinstance(step, WeightNoise)), None)
        if noise is None:
            continue
        operands = [step.operands(each.owner, each.key) for step in weight.steps]
        learned = noise.operands(each.owner, each.key)
        parameters = (each.parameter, *(value for given in operands for value in given))
        number = noise.magnitude(noise.application.step)
        key = (*map(id, parameters), number)
        if key not in found:
            std = learned[0] if learned else number
            found[key] = (weight.without_draws(each.owner), std)
    if not found:
        raise ValueError(
            f"No parameter of {type(module).__name__} that `where` {where!r} chooses has weight "
            "noise, so there is no divergence. Call recoup.weight_noise first."
        )
    given = [(*each, prior_std, prior_mean) for each in found.values()]
    calls = [Call("kl_divergence", _divergence_of, each, {}) for each in given]
    parts = [cast("Tensor", run_again(call)) for call in calls]
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()


def _check_prior(name: str, value: Any, above: float, needed: str) -> None:
    """Raise if `value` is neither a number above a bound nor a 0-dim tensor."""
    is_number = is_real(value) and above < float(value) < math.inf
    if not is_number and not (isinstance(value, Tensor) and value.dim() == 0):
        got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
        raise ValueError(f"`{name}` is {got}, but must be {needed}, or a 0-dim tensor.")


def _divergence_of(
    mean: Tensor, std: Tensor | float, prior_std: float | Tensor | None, prior_mean: float | Tensor
) -> Tensor:
    num = mean.numel()
    dtype = torch.promote_types(mean.dtype, torch.float32)
    like = partial(torch.as_tensor, dtype=dtype, device=mean.device)
    if num == 0:
        return like(0.0)
    std = like(std)
    # One number stands for as many entries as it is broadcast to.
    log_std, variance = std.abs().log().mean(), std.square().mean()
    center = mean.mean(dtype=std.dtype) if prior_std is None else like(prior_mean)
    spread = (like(mean) - center).square().mean() + variance
    of_prior = spread if prior_std is None else like(prior_std).square()
    return num * (of_prior.log() / 2 - log_std + spread / (2 * of_prior) - 0.5)
