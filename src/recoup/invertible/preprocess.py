"""What brings data into the range in which a flow starts: Normalize, Logit, and dequantization."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from recoup._arguments import check_real, check_type, check_whole
from recoup._core.compile import is_watched, uncompiled
from recoup._core.devices import own_generator
from recoup._core.rng import draw_seed
from recoup._core.tensors import check_tensors
from recoup.invertible.chain import Chain, HasChain
from recoup.invertible.contract import (
    InvertibleModule,
    at_each_position,
    check_channels,
    check_has_channels,
    per_channel,
    per_sample,
)


class Normalize(InvertibleModule):
    """Subtract a fixed mean and divide by a fixed standard deviation, per channel or for all.

    Both are buffers in the state dict. Autograd keeps these two and nothing else.

    Args:
        mean: One number, or C numbers for an input of shape ``(N, C, ...)``.
        std: One number or C numbers, not 0.

    Raises:
        ValueError: When `std` holds a 0 or either is not finite, when the two are of different
            lengths above 1, or when the input has another number of channels.

    Example:
        >>> import torch
        >>> from recoup.invertible import Normalize
        >>> y, log_det = Normalize(0.5, 2.0)(torch.ones(1, 3))
        >>> y.tolist()
        [[0.25, 0.25, 0.25]]
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        means, stds = _numbers("mean", mean), _numbers("std", std)
        if not bool(means.isfinite().all() and stds.isfinite().all() and (stds != 0).all()):
            raise ValueError(
                f"`mean` is {means.tolist()} and `std` is {stds.tolist()}, but all must be finite "
                f"and no `std` may be 0. For a constant channel use a `std` of 1."
            )
        if means.numel() != stds.numel() and 1 not in (means.numel(), stds.numel()):
            raise ValueError(
                f"`mean` has {means.numel()} and `std` {stds.numel()} numbers; give one number, "
                f"or one a channel, for each."
            )
        size = max(means.numel(), stds.numel())
        self.register_buffer("mean", means.expand(size).clone())
        self.register_buffer("std", stds.expand(size).clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        self._check(x)
        return (x - per_channel(self.mean, x)) / per_channel(self.std, x), -self._log_std(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        self._check(y)
        x = torch.addcmul(per_channel(self.mean, y), y, per_channel(self.std, y))
        return x, self._log_std(y)

    def _check(self, x: Tensor) -> None:
        if self.mean.numel() == 1:
            check_has_channels(x, 0, "Normalize", "Reshape it.")
        else:
            check_channels(x, self.mean.numel())

    def _log_std(self, x: Tensor) -> Tensor:
        repeats = x.shape[1] // self.std.numel()
        return at_each_position(self.std.abs().log().sum() * repeats, x)


class Logit(InvertibleModule):
    """Map the unit interval to all real numbers: ``logit(alpha + (1 - 2 * alpha) * x)``.

    `alpha` keeps the images of 0 and 1 finite. Autograd keeps the shrunk input and the output.

    Args:
        alpha: How far the ends are moved in, at least 0 and below 0.5. With 0 the data must not
            contain 0 or 1.

    Raises:
        ValueError: When `alpha` is out of range.

    Example:
        >>> import torch
        >>> from recoup.invertible import Logit
        >>> y, log_det = Logit()(torch.tensor([[0.0, 0.5, 1.0]]))
        >>> [round(v, 3) for v in y[0].tolist()]
        [-2.944, 0.0, 2.944]

    Dinh et al., "Density estimation using Real NVP", https://arxiv.org/abs/1605.08803,
    section 4.1, here symmetric.
    """

    def __init__(self, alpha: float = 0.05) -> None:
        super().__init__()
        check_real(alpha=alpha)
        if not 0 <= alpha < 0.5:
            raise ValueError(f"`alpha` is {alpha}, but must be at least 0 and below 0.5.")
        self.alpha = alpha

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map `x` of shape ``(N, ...)``, in the unit interval; returns ``(y, log_det)``."""
        check_tensors(x=x)
        y = torch.logit(self.alpha + (1 - 2 * self.alpha) * x)
        return y, self._log_det(y)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, ...)``; returns ``(x, log_det)``."""
        check_tensors(y=y)
        x = (torch.sigmoid(y) - self.alpha) / (1 - 2 * self.alpha)
        return x, -self._log_det(y)

    def _log_det(self, y: Tensor) -> Tensor:
        # -log(s) - log(1 - s) with s = sigmoid(y), but from y: s rounds to 1 when y is large.
        slopes = 2 * functional.softplus(y) - y
        return per_sample(slopes + math.log(1 - 2 * self.alpha))


class Dequantize(InvertibleModule):
    """Add uniform noise to whole numbers and scale to the unit interval: ``(x + u) / levels``.

    A density over real numbers then bounds the probability of discrete data:
    ``E[log p(y) + log_det] <= log P(x)``. `inverse` rounds down, which recovers the data exactly.

    The noise follows from one seed a call, an int64 from torch's default CPU generator, so that a
    replay of the layer needs 8 bytes. Its values are the middles of equal cells of a fine grid:
    noise of full resolution would sometimes be rounded up to the next level. Autograd keeps
    nothing.

    The first batch in training and the first in evaluation are checked, once for each type of
    data: images in [0, 1] would be taken for the levels 0 and 1, and train a meaningless density.

    Args:
        levels: The number of grey levels, at least 2; the data are 0 to ``levels - 1``.

    Raises:
        ValueError: When `levels` is not a whole number above 1; in forward, when the data are
            complex, or when a batch that is checked holds numbers that are not levels (except NaN,
            which shows in the loss).

    Example:
        >>> import torch
        >>> from recoup.invertible import Dequantize
        >>> layer = Dequantize(17)
        >>> y, log_det = layer(torch.tensor([[0, 16, 3]]))
        >>> layer.inverse(y)[0].tolist()
        [[0.0, 16.0, 3.0]]

    Theis et al., "A note on the evaluation of generative models",
    https://arxiv.org/abs/1511.01844, section 3.1.
    """

    def __init__(self, levels: int) -> None:
        super().__init__()
        check_whole(2, levels=levels)
        self.levels = operator.index(levels)
        self._checked_kinds: frozenset[tuple[bool, torch.dtype]] = frozenset()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantise `x` ``(N, ...)`` of whole numbers, of any type; returns ``(y, log_det)``."""
        self._check_first_batches(x)
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        y = (x + self._noise(x, dtype)) / self.levels
        return y, self._log_det(y)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Round `y` of shape ``(N, ...)`` down to a level; returns ``(x, log_det)``, x floating."""
        check_tensors(y=y)
        x = (y * self.levels).floor().clamp(0, self.levels - 1)
        return x, -self._log_det(y)

    def _check_first_batches(self, x: Tensor) -> None:
        """Raise unless `x` holds levels, if none of its mode and dtype was checked before."""
        check_tensors(x=x)
        kind = (self.training, x.dtype)
        if kind in self._checked_kinds or x.numel() == 0 or x.is_meta:
            return
        check = uncompiled(check_data) if is_watched() else check_data
        check(x, self.levels)
        self._checked_kinds |= {kind}

    def _noise(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        # Half a cell is four times the rounding error at the highest level, which is more than
        # the addition, the division and the inverse can lose together.
        cells = max(1, int(0.125 / (torch.finfo(dtype).eps * self.levels)))
        generator = own_generator(x.device, draw_seed())
        cell = torch.randint(cells, x.shape, generator=generator, device=generator.device)
        return cell.to(x.device, dtype).add_(0.5).div_(cells)

    def _log_det(self, y: Tensor) -> Tensor:
        return y.new_full((y.shape[0],), -math.prod(y.shape[1:]) * math.log(self.levels))


class VariationalDequantize(HasChain, Dequantize):
    """Add learned noise to whole numbers and scale to the unit interval: ``(x + u) / levels``.

    The noise is ``u = sigmoid(chain(eps, image))`` with standard normal eps, where the image is
    scaled to ``[-0.5, 0.5]``. Its log-density is subtracted, so that ``E[log p(y) + log_det]``
    bounds ``log P(x)`` from below for any noise, and noise that suits the density gives a tighter
    bound than uniform noise. The chain is trained with the flow, by the same loss.

    The noise is squeezed into an interval that ends a few rounding errors inside of 0 and 1, so
    that none is rounded to the next level. The bound accounts for the narrower interval, at 2e-4
    bits a value for 256 levels in float32; clamping the noise would break it. `inverse` rounds
    down, which recovers the data exactly, and inverts the chain for its log-determinant.

    The `memory` of the chain decides what autograd keeps and what backward pays. In a `Chain` in
    constant memory the layer is recomputed from the levels: the sum has too few digits to recover
    the noise from it.

    Args:
        levels: The number of grey levels, at least 2; the data are 0 to ``levels - 1``.
        chain: Maps noise of the data's shape to noise of the same shape, so a Squeeze must be
            undone in it and a Split is not allowed. Networks that take a context get the image
            ``(N, C, ...)``.

    Raises:
        ValueError: When `levels` is not a whole number above 1, when the chain changes the shape,
            or when the data are not levels, as in `Dequantize`.

    Example:
        >>> import torch
        >>> from recoup.flows import ConvNetwork
        >>> from recoup.invertible import AffineCoupling, Chain, VariationalDequantize
        >>> network = ConvNetwork(1, 2, width=8, num_context=1)
        >>> layer = VariationalDequantize(17, Chain(AffineCoupling(network, split="checkerboard")))
        >>> x = torch.full((3, 1, 4, 4), 16)
        >>> y, log_det = layer(x)
        >>> torch.equal(layer.inverse(y)[0], x.float()), log_det.shape
        (True, torch.Size([3]))

    Ho et al., "Flow++", https://arxiv.org/abs/1902.00275, section 3.1.
    """

    inverts_in_backward = False

    def __init__(self, levels: int, chain: Chain) -> None:
        super().__init__(levels)
        check_type(Chain, "a Chain", chain=chain)
        self.chain = chain

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantise `x` ``(N, ...)`` of whole numbers, of any type; returns ``(y, log_det)``."""
        self._check_first_batches(x)
        x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
        generator = own_generator(x.device, draw_seed())
        drawn = torch.randn(x.shape, generator=generator, device=generator.device, dtype=x.dtype)
        eps = drawn.to(x.device)
        z, log_det = self.chain(eps, *self._context(x))
        if not isinstance(z, Tensor) or z.shape != x.shape:
            shapes = z.shape if isinstance(z, Tensor) else [part.shape for part in z]
            raise ValueError(
                f"The chain of VariationalDequantize made noise of shape {shapes} for data of "
                f"shape {tuple(x.shape)}. Undo a Squeeze at its end, and use no Split."
            )
        margin = self._margin(x.dtype)
        y = (x + margin + (1 - 2 * margin) * torch.sigmoid(z)) / self.levels
        return y, self._entropy(eps, z, margin) + log_det + self._log_det(y)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Round `y` of shape ``(N, ...)`` down to a level; returns ``(x, log_det)``, x floating.

        The log-determinant is minus infinity where `forward` cannot produce such noise.
        """
        x, _ = super().inverse(y)
        margin = self._margin(y.dtype)
        unit = (y * self.levels - x - margin) / (1 - 2 * margin)
        tiny = torch.finfo(y.dtype).eps
        z = torch.logit(unit.clamp(tiny, 1 - tiny))
        eps, log_det = self.chain.inverse(z, *self._context(x))
        total = log_det - self._entropy(eps, z, margin) - self._log_det(y)
        is_inside = ((unit > 0) & (unit < 1)).flatten(1).all(1)
        return x, total.where(is_inside, -math.inf)

    def _context(self, x: Tensor) -> tuple[Tensor, ...]:
        return ((x + 0.5) / self.levels - 0.5,) if self.chain.takes_context else ()

    def _margin(self, dtype: torch.dtype) -> float:
        # The addition, the division and the inverse each lose half a rounding error of `levels`.
        return min(0.25, 2 * self.levels * torch.finfo(dtype).eps)

    def _entropy(self, eps: Tensor, z: Tensor, margin: float) -> Tensor:
        """Return minus the noise's log-density ``(N,)``, without the chain's log-determinant."""
        normal = 0.5 * eps.square() + 0.5 * math.log(2 * math.pi)
        slopes = z - 2 * functional.softplus(z)  # log of the sigmoid's derivative
        return per_sample(normal + slopes + math.log1p(-2 * margin))


def _numbers(name: str, given: Any) -> Tensor:
    """The numbers of `mean` or `std` as a tensor; one that is no number is an error."""
    if isinstance(given, Tensor):
        given = cast("Any", given.tolist())
    values = cast("Sequence[Any]", given if isinstance(given, list | tuple) else [given])
    if not values:
        raise ValueError(f"`{name}` is empty, but must hold a number, or one for each channel.")
    for each in values:
        check_real(**{name: each})
    return torch.tensor([float(each) for each in values], dtype=torch.get_default_dtype())


@torch.no_grad()
def check_data(x: Tensor, levels: int, name: str = "x") -> None:
    """Raise ValueError unless the values of `x`, in errors `name`, are levels, or NaN."""
    if x.is_complex():
        raise ValueError(
            f"`{name}` is of type {x.dtype}, but grey levels are real. Give the real part, or the "
            "real and the imaginary part as two channels."
        )
    numbers = x[~x.isnan()] if x.is_floating_point() else x.flatten()
    if not numbers.numel():
        return
    low, high = float(numbers.min()), float(numbers.max())
    is_whole = not x.is_floating_point() or bool((numbers == numbers.floor()).all())
    if is_whole and low >= 0 and high <= levels - 1:
        return
    raise ValueError(
        f"`{name}` has values from {low:g} to {high:g}"
        f"{'' if is_whole else ', not all of them whole'}, but with `levels` {levels} the data are "
        f"whole grey levels, 0 to {levels - 1}. For images in [0, 1] give "
        f"`(x * {levels - 1}).round()`; for continuous data leave `levels` out."
    )
