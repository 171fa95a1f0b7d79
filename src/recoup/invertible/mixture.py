"""MixtureCoupling: transform one part by the distribution function of a mixture of logistics."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup._arguments import check_whole
from recoup._core.saved_tensors import grad_mode
from recoup.errors import NotInvertibleError
from recoup.invertible.contract import per_sample
from recoup.invertible.coupling import Condition, Coupling, Partition

_MOST_STEPS = 200  # of the search; a dozen is usual, and bisection alone needs 60


class MixtureCoupling(Coupling):
    """Bend, scale and shift one part of the values by what a network computes from the other.

    ``y1 = x1, y2 = h(x2) * exp(log_scale) + shift`` with
    ``h(x) = (1 - least_slope) * logit(F(x)) + least_slope * x`` and F the distribution function of
    a mixture of `num_components` logistics, whose weights, means and scales the network sets for
    each value. Unlike an affine map, one such layer can pull several modes apart. All log-scales
    are ``bound * tanh(raw / bound)``, and the means are those of the network plus equally
    spaced numbers from -1 to 1, so that components which start alike do not stay alike.

    `h` has no inverse in closed form: `inverse` brackets it and searches by Newton's steps and
    bisection, to the precision of the type. In a wide gap of the mixture logit(F) is flat, and its
    inverse would be lost in rounding; `least_slope` keeps the slope of `h` above it. The paper has
    no such term, and 0.01 of it changes densities little.

    Autograd keeps what the network keeps, the input, and up to sixteen tensors of
    `num_components` times the size of the changed part. In constant memory backward searches too,
    at the cost of ten to twenty forwards of the mixture, without the network.

    Args:
        network: Maps the conditioning part to ``3 * num_components + 2`` times the channels of the
            other part. The first half of C channels has ``(C + 1) // 2``, the second ``C // 2``.
        num_components: Number of logistics in each mixture.
        condition: Which part the network sees, "first" or "second".
        split: "channels", or "checkerboard" for images: see `Coupling`.

    Attributes:
        bound: The largest absolute log-scale of a component, and of the affine map; 3.
        least_slope: Share of the identity in `h`; 0.01.

    Raises:
        ValueError: When an argument is out of range, when the input cannot be split, or when the
            network returns another shape than needed.
        NotInvertibleError: In inverse, when the search does not converge.

    Example:
        >>> import torch
        >>> from recoup.invertible import MixtureCoupling
        >>> layer = MixtureCoupling(torch.nn.Linear(2, 28), num_components=4)
        >>> y, log_det = layer(torch.ones(1, 4))
        >>> torch.allclose(layer.inverse(y)[0], torch.ones(1, 4), atol=1e-5), log_det.shape
        (True, torch.Size([1]))

    Ho et al., "Flow++", https://arxiv.org/abs/1902.00275, section 3.2.
    """

    bound: float = 3.0
    least_slope: float = 0.01

    def __init__(
        self,
        network: nn.Module,
        *,
        num_components: int = 8,
        condition: Condition = "first",
        split: Partition = "channels",
    ) -> None:
        super().__init__(network, None, condition, split)
        check_whole(num_components=num_components)
        self.num_components = num_components
        self._copies = 3 * num_components + 2

    def _of_output(self, output: Tensor) -> tuple[Tensor, ...]:
        k, size = self.num_components, output.shape
        blocks = output.reshape(size[0], self._copies, size[1] // self._copies, *size[2:])
        # One split: backward then concatenates the gradients; slices would pad each with zeros.
        parts = cast("tuple[Tensor, ...]", blocks.split((k, k, k, 1, 1), dim=1))
        logits, means, raw_scales, shift, raw_scale = parts
        apart = torch.linspace(-1, 1, k, dtype=means.dtype, device=means.device)
        apart = apart.view(-1, *(1,) * (len(size) - 1)) if k > 1 else 0.0
        rates = torch.exp(-self._bounded(raw_scales))
        log_scale = self._bounded(raw_scale.squeeze(1))
        return logits.log_softmax(1), means + apart, rates, shift.squeeze(1), log_scale

    def _change(self, x: Tensor, values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        *mixture, shift, log_scale = values
        bent, slope = _Bend(*mixture, least_slope=self.least_slope).value_and_slope(x)
        y = torch.addcmul(shift, bent, log_scale.exp())
        return y, per_sample(slope.log() + log_scale)

    def _change_back(self, y: Tensor, values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        *mixture, shift, log_scale = values
        bend = _Bend(*mixture, least_slope=self.least_slope)
        x = bend.inverse((y - shift) * (-log_scale).exp())
        slope = bend.value_and_slope(x)[1]
        return x, -per_sample(slope.log() + log_scale)

    def _bounded(self, raw: Tensor) -> Tensor:
        return self.bound * torch.tanh(raw / self.bound)


class _Bend(NamedTuple):
    """The function ``h(x) = (1 - e) * logit(F(x)) + e * x``, with a mixture F for each entry of x.

    Args:
        log_weights: Logarithms of the weights, ``(N, K, C, ...)`` for an x of ``(N, C, ...)``.
        means: Means of the components, of the same shape.
        rates: Inverse scales of the components, of the same shape.
        least_slope: e.
    """

    log_weights: Tensor
    means: Tensor
    rates: Tensor
    least_slope: float

    def value_and_slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``h(x)`` and ``h'(x)``, neither from a difference of large numbers."""
        u = (x.unsqueeze(1) - self.means) * self.rates
        below = self.log_weights + functional.logsigmoid(u)
        above = self.log_weights + functional.logsigmoid(-u)
        logit = below.logsumexp(1) - above.logsumexp(1)
        # (log F)' - (log(1 - F))': a mean of the components' own slopes, so all terms are positive.
        slopes = below.softmax(1) * torch.sigmoid(-u) + above.softmax(1) * torch.sigmoid(u)
        slope = (1 - self.least_slope) * (slopes * self.rates).sum(1) + self.least_slope
        return torch.lerp(logit, x, self.least_slope), slope

    def inverse(self, target: Tensor) -> Tensor:
        """Find the x with ``h(x) = target``."""
        with grad_mode(False):
            root = self._search(target)
        # A Newton step from the root makes it a function of `target` and the mixture, with the
        # correct first derivatives, and after a second step the correct second and third.
        has_graph = any(value.requires_grad for value in (target, *self[:3]))
        for _ in range(2 if has_graph and torch.is_grad_enabled() else 1):
            value, slope = self.value_and_slope(root)
            root = root - (value - target) / slope
        return root

    def _search(self, target: Tensor) -> Tensor:
        """Find the root in a bracket: Newton's steps, and bisection where they do not help."""
        eps = 4 * torch.finfo(target.dtype).eps
        # logit(F) lies between the least and the largest u of the components, so the root lies
        # between the least and the largest root of the components alone.
        share = 1 - self.least_slope
        alone = target.unsqueeze(1) + share * self.means * self.rates
        alone = alone / (share * self.rates + self.least_slope)
        # Targets that are not finite give NaN, as in any layer; zeros replace them in the search.
        is_finite = alone.isfinite().all(1)
        alone = alone.where(is_finite.unsqueeze(1), 0.0)
        low, high = alone.amin(1), alone.amax(1)
        x = (alone * self.log_weights.exp()).sum(1).clamp(low, high)
        step_before = high - low
        for _ in range(_MOST_STEPS):
            value, slope = self.value_and_slope(x)
            residual = value - target
            step = residual / slope
            near = eps * x.abs().clamp(min=1)
            done = (residual.abs() <= eps * target.abs().clamp(min=1)) | (step.abs() <= near)
            if bool((done | (high - low <= near) | ~is_finite).all()):
                return x.where(is_finite, torch.nan)
            low = torch.where(residual < 0, x, low)
            high = torch.where(residual < 0, high, x)
            newton = x - step
            # Bisect instead of a step that leaves the bracket or is not half the one before.
            helps = (newton > low) & (newton < high) & (2 * step.abs() <= step_before.abs())
            following = torch.where(helps, newton, (low + high) / 2)
            following = torch.where(done, x, following)
            step_before, x = following - x, following
        raise NotInvertibleError(
            f"The inverse of MixtureCoupling did not converge in {_MOST_STEPS} steps. Use a wider "
            f"floating-point type, or a larger `least_slope`."
        )
