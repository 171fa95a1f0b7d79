"""The latents of a flow: their distribution, and one tensor or, where its chain splits, a tuple."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, constraints
from torch.distributions.utils import broadcast_all
from torch.nn import functional

from recoup._arguments import check_flag, check_real, shown
from recoup._core.devices import with_seed
from recoup.invertible.contract import check_within

_constraints: Any = constraints  # torch does not type its constraints

Latents = Any  # a tensor, or a tuple of them where the chain splits: pyright cannot say which


class Base(nn.Module):
    """A `torch.distributions.Distribution` that moves with the module it is part of.

    A distribution holds plain tensors, which ``flow.to("cuda")`` would not move. So this module
    builds it for each use, from its parameters on the device and in the type of the module. One
    that cannot be built from its own parameters (a mixture, `Independent`) is used unchanged, on
    the device where it was made.

    Args:
        distribution: The distribution of single numbers, or of the part of one sample's latent
            that its batch and event shape cover from the right; None for a standard normal one.

    Raises:
        ValueError: When a parameter of the distribution requires a gradient.

    Example:
        >>> import torch
        >>> from recoup.flows.latents import Base
        >>> from torch.distributions import Uniform
        >>> Base(Uniform(0.0, 2.0)).double().log_prob(torch.ones(1, 4, dtype=torch.float64))
        tensor([-2.7726], dtype=torch.float64)
    """

    like: Tensor

    def __init__(self, distribution: Distribution | None = None) -> None:
        super().__init__()
        self.register_buffer("like", torch.empty(0), persistent=False)  # for device and dtype
        self._given = distribution
        self._values: dict[str, Tensor] = {}
        for name in () if distribution is None else distribution.arg_constraints:
            value: object = vars(distribution).get(name)
            if isinstance(value, Tensor):
                self._values[name] = value
                if value.requires_grad:
                    raise ValueError(
                        f"`{name}` of the base {type(distribution).__name__} requires a gradient, "
                        "but a base is not trained. End the chain with an ActNorm, which learns a "
                        "shift and a scale of the latents."
                    )
        try:
            self.distribution()
        except TypeError:  # it needs arguments other than its parameters
            self._values = {}

    def distribution(self) -> Distribution:
        """Build the distribution from its parameters, on the device of the module."""
        like = self.like
        # Validation would synchronise at each use, and raise where minus infinity is correct.
        if self._given is None:
            return Normal(like.new_zeros(()), like.new_ones(()), validate_args=False)
        if not self._values:
            return self._given
        values = {
            name: value.to(
                like.device, like.dtype if value.is_floating_point() else None, non_blocking=True
            )
            for name, value in self._values.items()
        }
        kind: Any = type(self._given)
        return kind(**values, validate_args=False)

    def log_prob(self, z: Tensor) -> Tensor:
        """Return the log-density ``(N,)`` of latents ``(N, ...)``, summed over one sample."""
        if self._given is None:  # four operations instead of eleven, and only `z` is kept
            squares = z.square().flatten(1).sum(1)
            return -0.5 * squares - 0.5 * math.log(2 * math.pi) * z.shape[1:].numel()
        log_prob = self.distribution().log_prob(z)
        return log_prob.flatten(1).sum(1) if log_prob.dim() > 1 else log_prob

    def sample(
        self, shape: Sequence[int], temperature: float, generator: torch.Generator | None
    ) -> Tensor:
        """Draw latents of `shape` ``(N, ...)``, with `temperature` times the spread."""
        base = self.distribution()
        loc: Tensor | None = getattr(base, "loc", None)
        is_factor = 0 <= temperature <= sys.float_info.max
        if not is_factor or (temperature != 1 and loc is None):
            raise ValueError(
                f"`temperature` is {shown(temperature)}, but must be at least 0 and finite, and 1 "
                f"for a base without a `loc`, as {type(base).__name__} is. Use 1, or a "
                "location-scale base."
            )
        own = len(base.batch_shape) + len(base.event_shape)
        size = torch.Size(shape[: len(shape) - own])
        if generator is None:
            z = base.sample(size)
        else:  # distributions take no generator, so it seeds the default ones for the draw
            seed = torch.randint(2**62, (), generator=generator, device=generator.device)
            z = with_seed(lambda: base.sample(size), int(seed))
        if temperature == 1 or loc is None:
            return z
        return loc + float(temperature) * (z - loc)


def as_latents(parts: Sequence[Tensor]) -> Latents:
    """Return parts in the form that a chain's inverse takes."""
    return parts[0] if len(parts) == 1 else tuple(parts)


class Logistic(Distribution):
    """The logistic distribution, with density ``exp(-u) / (scale * (1 + exp(-u))**2)``.

    ``u = (value - loc) / scale``. Its tails are heavier than those of the normal distribution: the
    log-density falls linearly, so the gradient of no outlier explodes; it is computed without
    overflow for every finite value.

    Autograd keeps for `log_prob` the standardised value and two more tensors of its size.

    Args:
        loc: The mean.
        scale: The scale, above 0; the standard deviation is ``scale * pi / sqrt(3)``.
        validate_args: Whether to check parameters and values, as in torch's distributions.

    Raises:
        ValueError: When `scale` is not above 0.

    Example:
        >>> import torch
        >>> from recoup.flows import Logistic
        >>> Logistic(0.0, 1.0).log_prob(torch.tensor([0.0, 1e30])).tolist()
        [-1.3862943649291992, -1.0000000150474662e+30]

    Dinh et al., "NICE", https://arxiv.org/abs/1410.8516, section 3.4.
    """

    # Attributes, as in torch's own distributions, over properties of the base class.
    arg_constraints: ClassVar[dict[str, Any]] = {  # pyright: ignore[reportIncompatibleMethodOverride]
        "loc": _constraints.real,
        "scale": _constraints.positive,
    }
    support = _constraints.real  # pyright: ignore[reportIncompatibleMethodOverride]
    has_rsample = True

    def __init__(
        self, loc: Tensor | float, scale: Tensor | float, validate_args: bool | None = None
    ) -> None:
        self.loc: Tensor
        self.scale: Tensor
        for name, value in (("loc", loc), ("scale", scale)):
            if not isinstance(value, Tensor):
                check_real(**{name: value})
            elif bool(value.isnan().any()):
                raise ValueError(f"`{name}` has NaN in it.")
        if not isinstance(scale, Tensor):
            check_within(0, math.inf, 1.0, scale=scale)
        if validate_args is not None:
            check_flag(validate_args=validate_args)
        self.loc, self.scale = broadcast_all(loc, scale)
        super().__init__(self.loc.size(), validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """The mean, which is `loc`."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The variance, ``(scale * pi)**2 / 3``."""
        return (self.scale * math.pi).square() / 3

    def expand(self, batch_shape: Any, _instance: Any = None) -> Logistic:
        """Return the same distribution with its parameters expanded to `batch_shape`."""
        own: Any = self  # torch does not type the next call
        new = own._get_checked_instance(Logistic, _instance)
        new.loc, new.scale = self.loc.expand(batch_shape), self.scale.expand(batch_shape)
        Distribution.__init__(new, torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw values ``(*sample_shape, *batch_shape)``, differentiable in `loc` and `scale`."""
        shape = self._extended_shape(torch.Size(sample_shape))
        u = torch.rand(shape, dtype=self.loc.dtype, device=self.loc.device)
        # A draw of 0 would give minus infinity; 1 is never drawn.
        return self.icdf(u.clamp(min=torch.finfo(u.dtype).eps / 4))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of `value`, finite for every finite value."""
        if self._validate_args:
            self._validate_sample(value)
        u = (value - self.loc) / self.scale
        return functional.logsigmoid(u) + functional.logsigmoid(-u) - self.scale.log()

    def icdf(self, value: Tensor) -> Tensor:
        """Return the number below which a draw lies with probability `value`."""
        return self.loc + self.scale * torch.logit(value)
