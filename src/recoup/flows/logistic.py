"""The logistic distribution, the base of NICE."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.distributions.utils import broadcast_all
from torch.nn import functional

from recoup._arguments import check_flag, check_real

__all__ = ["Logistic"]

_constraints: Any = constraints  # torch does not type its constraints


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
        if not isinstance(scale, Tensor) and not scale > 0:
            raise ValueError(f"`scale` is {scale}, but must be above 0.")
        if validate_args is not None:
            check_flag(validate_args=validate_args)
        self.loc, self.scale = broadcast_all(loc, scale)
        super().__init__(self.loc.size(), validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """The mean, which is `loc`."""
        return self.loc

    @property
    def mode(self) -> Tensor:
        """The likeliest value, which is `loc`."""
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
        self._check(value)
        u = (value - self.loc) / self.scale
        return functional.logsigmoid(u) + functional.logsigmoid(-u) - self.scale.log()

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability that a draw is below `value`."""
        self._check(value)
        return torch.sigmoid((value - self.loc) / self.scale)

    def icdf(self, value: Tensor) -> Tensor:
        """Return the number below which a draw lies with probability `value`."""
        return self.loc + self.scale * torch.logit(value)

    def entropy(self) -> Tensor:
        """Return the entropy in nats, ``log(scale) + 2``."""
        return self.scale.log() + 2

    def _check(self, value: Tensor) -> None:
        if self._validate_args:
            self._validate_sample(value)
