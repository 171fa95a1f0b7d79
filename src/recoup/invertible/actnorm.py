"""ActNorm: a scale and a shift per channel, initialised from the first batch."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn

from recoup._arguments import check_whole
from recoup._core.tensor_arguments import check_place
from recoup.invertible.contract import InvertibleModule, check_channels, num_positions, per_channel

__all__ = ["ActNorm"]

# Below this spread (relative to the mean) a channel counts as constant and keeps the scale 1:
# dividing by the rounding error of a constant would blow up the next batch.
_LEAST_SPREAD = 1e-6


class ActNorm(InvertibleModule):
    """Scale and shift each channel; the first training batch comes out with mean 0, variance 1.

    ``y = (x + bias) * exp(log_scale)``. The layer sets both once (its start), at the first forward
    in training mode, over the batches of all ranks when `torch.distributed` is initialised. The
    state dict records whether this has happened, so a resumed run does not start again. Before the
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
        self.bias = nn.Parameter(torch.zeros(num_channels, device=device, dtype=dtype))
        self.log_scale = nn.Parameter(torch.zeros(num_channels, device=device, dtype=dtype))
        # A Python bool: a tensor would need a device sync in each forward, and a replay would have
        # to leave its value unchanged.
        self.started = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        check_channels(x, self.num_channels)
        if self.training and not self.started:
            self._start(x)
        y = (x + per_channel(self.bias, x)) * per_channel(self.log_scale.exp(), x)
        return y, self._log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        check_channels(y, self.num_channels)
        x = y * per_channel((-self.log_scale).exp(), y) - per_channel(self.bias, y)
        return x, -self._log_det(y)

    def _log_det(self, x: Tensor) -> Tensor:
        return (self.log_scale.sum() * num_positions(x)).expand(x.shape[0])

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

    def extra_repr(self) -> str:
        """Show the number of channels."""
        return str(self.num_channels)


def _channel_mean(x: Tensor) -> Tensor | None:
    """Average `x` over all but dimension 1 and over all ranks; None if there are no values."""
    sums = x.sum([dim for dim in range(x.dim()) if dim != 1])
    count = torch.full_like(sums[:1], x.shape[0] * num_positions(x))
    sums = torch.cat([sums, count])
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(sums)
    return sums[:-1] / sums[-1] if bool(sums[-1] > 0) else None
