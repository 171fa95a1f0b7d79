"""The divergence of noisy weights from a prior, as variational inference counts it."""

from __future__ import annotations

import math
from functools import partial
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.call import Call, run_again
from recoup.weights.application import reparametrized
from recoup.weights.choosing import Where
from recoup.weights.noise import WeightNoise, root_mean_square


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
    counts by its absolute value, a schedule has its value at the present step, and a deviation of 0
    has an infinite divergence. A parameter with several names counts once, unless its uses have
    several deviations.

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
    _check("prior_mean", prior_mean, -math.inf, "a number")
    if prior_std is not None:
        _check("prior_std", prior_std, 0.0, "a number above 0, None for one that is fitted")
    elif isinstance(prior_mean, Tensor) or prior_mean != 0:
        raise ValueError(
            "`prior_mean` is given, but `prior_std` is None, for a prior whose mean and deviation "
            "are both fitted. Give both, or neither."
        )
    found: dict[tuple[Any, ...], tuple[WeightNoise, Tensor, Tensor | float]] = {}
    for each, weight in reparametrized(module, where, "where"):
        noise = next((step for step in weight.steps if isinstance(step, WeightNoise)), None)
        if noise is None:
            continue
        operands = [step.operands(each.owner, each.key) for step in weight.steps]
        learned = noise.operands(each.owner, each.key)
        parameters = (each.parameter, *(value for given in operands for value in given))
        number = noise.magnitude(noise.application.step)
        key = (*map(id, parameters), number, noise.relative)
        if key not in found:
            std = learned[0] if learned else number
            found[key] = (noise, weight.without_draws(each.owner), std)
    if not found:
        raise ValueError(
            f"No parameter of {type(module).__name__} that `where` {where!r} chooses has weight "
            "noise, so there is no divergence. Call recoup.weight_noise first."
        )
    calls = [
        Call("kl_divergence", _of_weight, (*each, prior_std, prior_mean), {})
        for each in found.values()
    ]
    parts = [cast("Tensor", run_again(call)) for call in calls]
    return torch.stack([part.to(parts[0].device) for part in parts]).sum()


def _check(name: str, value: Any, above: float, needed: str) -> None:
    """Raise if `value` is neither a number above a bound nor a 0-dim tensor."""
    is_number = isinstance(value, Real) and value is not True and above < float(value) < math.inf
    if not is_number and not (isinstance(value, Tensor) and value.dim() == 0):
        got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"`{name}` is {got}, but must be {needed}, or a 0-dim tensor.")


def _of_weight(
    noise: WeightNoise,
    mean: Tensor,
    std: Tensor | float,
    prior_std: float | Tensor | None,
    prior_mean: float | Tensor,
) -> Tensor:
    num = mean.numel()
    like = partial(
        torch.as_tensor, dtype=torch.promote_types(mean.dtype, torch.float32), device=mean.device
    )
    if num == 0:
        return like(0.0)
    std = like(std * root_mean_square(mean) if noise.relative else std)
    # One number stands for as many entries as it is broadcast to.
    log_std, variance = std.abs().log().mean(), std.square().mean()
    center = mean.mean(dtype=std.dtype) if prior_std is None else like(prior_mean)
    spread = (like(mean) - center).square().mean() + variance
    of_prior = spread if prior_std is None else like(prior_std).square()
    return num * (of_prior.log() / 2 - log_std + spread / (2 * of_prior) - 0.5)
