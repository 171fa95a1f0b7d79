"""Layers that scale, shift and mix channels: ActNorm and the invertible 1x1 convolutions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from recoup._arguments import check_whole
from recoup._core.settings import without_autocast
from recoup._core.tensors import check_place
from recoup.invertible.contract import (
    InvertibleModule,
    at_each_position,
    check_channels,
    num_positions,
    per_channel,
)

_linalg: Any = torch.linalg  # torch does not type its functions

# Below this spread (relative to the mean) a channel counts as constant and keeps the scale 1:
# dividing by the rounding error of a constant would blow up the next batch.
_LEAST_SPREAD = 1e-6


class _OfChannels(InvertibleModule):
    """A layer that does the same at every position, for a fixed number of channels."""

    def __init__(
        self,
        num_channels: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole(num_channels=num_channels)
        check_place(device, dtype)
        self.num_channels = num_channels
        self._make(torch.empty(0, device=device, dtype=dtype))

    @abstractmethod
    def _make(self, like: Tensor) -> None:
        """Make the parameters, of the type and device of `like`."""


class ActNorm(_OfChannels):
    """Scale and shift each channel; the first training batch comes out with mean 0, variance 1.

    ``y = (x + bias) * exp(log_scale)``. The layer sets both once (its start), at the first forward
    in training mode, over the batches of all ranks when `torch.distributed` is initialised. The
    state dict records whether this has happened, so a resumed run does not start again; nor does a
    layer whose parameters are no longer zeros (averaged weights). Before the
    start, and so in evaluation of an untrained module, the layer is the identity.

    Autograd keeps the input; backward is one multiply.

    Args:
        num_channels: C, the size of dimension 1 of the input ``(N, C, ...)``.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Raises:
        ValueError: In forward, when the input has another number of channels, or when the
            first training batch is not finite.

    Example:
        >>> import torch
        >>> from recoup.invertible import ActNorm
        >>> layer = ActNorm(3)
        >>> y, log_det = layer(5 + 2 * torch.randn(64, 3, 8, 8))
        >>> bool(y.mean().abs() < 1e-4), log_det.shape
        (True, torch.Size([64]))

    Kingma and Dhariwal, "Glow", https://arxiv.org/abs/1807.03039, section 3.1.
    """

    def _make(self, like: Tensor) -> None:
        self.bias = nn.Parameter(like.new_zeros(self.num_channels))
        self.log_scale = nn.Parameter(like.new_zeros(self.num_channels))
        # A Python bool: a tensor would need a device sync in each forward, and a replay would have
        # to leave its value unchanged.
        self.started = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        check_channels(x, self.num_channels)
        if self.training and not self.started:
            # Averaged weights and older files bring the parameters alone.
            self.started = bool((self.bias != 0).any() | (self.log_scale != 0).any())
        if self.training and not self.started:
            self._start(x)
        y = (x + per_channel(self.bias, x)) * per_channel(self.log_scale.exp(), x)
        return y, at_each_position(self.log_scale.sum(), x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        check_channels(y, self.num_channels)
        x = y * per_channel((-self.log_scale).exp(), y) - per_channel(self.bias, y)
        return x, at_each_position(-self.log_scale.sum(), y)

    @torch.no_grad()
    def _start(self, x: Tensor) -> None:
        mean = _channel_mean(x)
        if mean is None:  # an empty batch has no statistics: wait for the next one
            return
        variance = _channel_mean((x - per_channel(mean, x)).square_())
        if variance is None or not bool((mean + variance).isfinite().all()):
            raise ValueError(
                "`x` has values that are not finite, so ActNorm cannot start from it. "
                "Check the first training batch for NaN and inf."
            )
        spread = variance.sqrt()
        spread = torch.where(spread > _LEAST_SPREAD * (1 + mean.abs()), spread, 1.0)
        self.bias.copy_(-mean)
        self.log_scale.copy_(-spread.log())
        self.started = True

    def get_extra_state(self) -> Tensor:
        """Return whether the start has happened, as a tensor, which is safe to unpickle."""
        return torch.tensor(self.started)

    def set_extra_state(self, state: Tensor) -> None:
        """Read from a state dict whether the start has happened."""
        self.started = bool(state)


class _Mixing(_OfChannels):
    """A layer that multiplies the channels with one matrix."""

    @abstractmethod
    def _matrix(self) -> tuple[Tensor, Tensor]:
        """Return the matrix ``(C, C)``, and the logarithm of its determinant's magnitude."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the channels of `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        matrix, log_det = self._matrix()
        return _mix(x, matrix), at_each_position(log_det, x).to(x.dtype)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        matrix, log_det = self._matrix()
        undone: Tensor = _linalg.inv(wide(matrix)).to(matrix.dtype)
        return _mix(y, undone), at_each_position(-log_det, y).to(y.dtype)


class InvertibleConv1x1(_Mixing):
    """Mix the channels with one learned matrix, the same at every position.

    The matrix starts as a random rotation from torch's default generator. Its log-determinant,
    and in `inverse` its inverse, is computed in each call, O(C^3).

    Autograd keeps the input and a factorisation of the matrix; backward is two 1x1 convolutions.
    Under autocast the layer stays in the type of its input: mixing in half precision could not
    be undone.

    Args:
        num_channels: C, the size of dimension 1 of the input ``(N, C, ...)``.
        device: Device of the matrix.
        dtype: Floating-point type of the matrix.

    Raises:
        ValueError: In forward and inverse, when the input has another shape.

    Example:
        >>> import torch
        >>> from recoup.invertible import InvertibleConv1x1
        >>> layer = InvertibleConv1x1(4)
        >>> x = torch.ones(2, 4, 3, 3)
        >>> y, log_det = layer(x)
        >>> torch.allclose(layer.inverse(y)[0], x, atol=1e-5)
        True

    Kingma and Dhariwal, "Glow", https://arxiv.org/abs/1807.03039, section 3.2.
    """

    def _make(self, like: Tensor) -> None:
        self.weight = nn.Parameter(_rotation(self.num_channels, like))

    def _matrix(self) -> tuple[Tensor, Tensor]:
        return self.weight, _linalg.slogdet(wide(self.weight)).logabsdet


class InvertibleConv1x1LU(_Mixing):
    """Mix the channels with one learned matrix, stored as its LU factors.

    ``W = P L (U + diag(sign * exp(log_s)))``: P (a permutation) and sign are fixed, L has a unit
    diagonal, U is strictly upper triangular. The log-determinant is ``sum(log_s)``, O(C), and no
    step of training can make the matrix singular. It starts as a random rotation.

    Autograd keeps the input and the factors; backward is two 1x1 convolutions.

    Args:
        num_channels: C, the size of dimension 1 of the input ``(N, C, ...)``.
        device: Device of the factors.
        dtype: Floating-point type of the factors.

    Raises:
        ValueError: In forward and inverse, when the input has another shape.

    Example:
        >>> import torch
        >>> from recoup.invertible import InvertibleConv1x1LU
        >>> weight = InvertibleConv1x1LU(4).weight()
        >>> torch.allclose(weight @ weight.T, torch.eye(4), atol=1e-5)
        True

    Kingma and Dhariwal, "Glow", https://arxiv.org/abs/1807.03039, section 3.2.
    """

    permutation: Tensor
    sign: Tensor

    def _make(self, like: Tensor) -> None:
        factors: tuple[Tensor, ...] = _linalg.lu(_rotation(self.num_channels, like))
        permutation, lower, upper = (factor.contiguous() for factor in factors)
        diagonal = upper.diagonal()
        self.register_buffer("permutation", permutation)
        self.register_buffer("sign", diagonal.sign())
        self.lower = nn.Parameter(lower.tril(-1))
        self.upper = nn.Parameter(upper.triu(1))
        self.log_s = nn.Parameter(diagonal.abs().log())

    def weight(self) -> Tensor:
        """Return the product of the factors: the matrix of shape ``(C, C)``."""
        diagonal = torch.diag_embed(self.sign * self.log_s.exp())
        one = torch.eye(self.num_channels, device=self.lower.device, dtype=self.lower.dtype)
        with without_autocast(self.lower.device.type):
            return self.permutation @ (self.lower.tril(-1) + one) @ (self.upper.triu(1) + diagonal)

    def _matrix(self) -> tuple[Tensor, Tensor]:
        return self.weight(), self.log_s.sum()


def _channel_mean(x: Tensor) -> Tensor | None:
    """Average `x` over all but dimension 1 and over all ranks; None if there are no values."""
    sums = x.sum([dim for dim in range(x.dim()) if dim != 1])
    count = torch.full_like(sums[:1], x.shape[0] * num_positions(x))
    sums = torch.cat([sums, count])
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(sums)
    return sums[:-1] / sums[-1] if bool(sums[-1] > 0) else None


def _rotation(num_channels: int, like: Tensor) -> Tensor:
    """Draw a rotation matrix, uniform over rotations, in float32 on the CPU, then moved."""
    size = (num_channels, num_channels)
    rotation = nn.init.orthogonal_(torch.empty(size, dtype=torch.float32, device="cpu"))
    if float(_linalg.det(rotation)) < 0:
        rotation[:, 0] *= -1
    return rotation.to(like)


def wide(matrix: Tensor) -> Tensor:
    """Cast a half-precision matrix to single precision: half precision has no factorisations."""
    return matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix


def _mix(x: Tensor, weight: Tensor) -> Tensor:
    check_channels(x, weight.shape[0])
    # One product of matrices: for so few channels a convolution takes two to three times as long
    # on a CPU, and on CUDA it would round to TF32, which cannot be inverted. With the channels
    # last, which the result is from then on, the convolutions of couplings are faster, too.
    with without_autocast(x.device.type):
        return functional.linear(x.movedim(1, -1), weight).movedim(-1, 1)
