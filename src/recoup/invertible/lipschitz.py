"""Layers with a bounded Lipschitz constant, for the networks of invertible residual blocks."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup._arguments import check_flag, check_whole
from recoup._core.saved_tensors import grad_mode
from recoup._core.settings import without_autocast
from recoup._core.tensors import check_place
from recoup.invertible.contract import check_within

_linalg: Any = torch.linalg  # torch does not type its functions
_fft: Any = torch.fft

# Number of frequencies that are evaluated along a side of a kernel (3, 5, ...), for each entry
# beyond the first. Between two of them the norm may rise by 1 / cos(pi / 16), so 2 % a side.
_FREQUENCIES = 8


# The normalised weights of a call, by their layer and whether they have a gradient.
_Weights = dict[tuple[nn.Module, bool], Tensor]
_weights: ContextVar[_Weights | None] = ContextVar("_weights", default=None)


@contextmanager
def one_weight_a_call() -> Generator[None]:
    """Compute the normalised weight of each layer once in the context, however often it runs."""
    token = _weights.set({})
    try:
        yield
    finally:
        _weights.reset(token)


class _Lipschitz(nn.Module):
    """A layer that multiplies by ``weight * min(1, coefficient / norm)``."""

    weight: Tensor
    coefficient: float

    def normalized_weight(self) -> Tensor:
        """Return the normalised weight, of the shape of `weight`."""
        weights, key = _weights.get(), (self, torch.is_grad_enabled())
        if weights is not None and key in weights:
            return weights[key]
        weight = self.weight
        with without_autocast(weight.device.type):
            norm = self._norm(weight if weight.dtype is torch.float64 else weight.float())
            # Dividing by the larger of the two also covers a weight of zeros.
            scale = self.coefficient / norm.clamp(min=self.coefficient)
            normalized = weight * scale.to(weight.dtype)
        if weights is not None:
            weights[key] = normalized
        return normalized

    def _norm(self, weight: Tensor) -> Tensor:
        """Return the norm of what the layer does with `weight`, or a bound on it."""
        return _linalg.matrix_norm(weight, ord=2)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, coefficient={self.coefficient:g}"


class LipschitzLinear(_Lipschitz, nn.Linear):
    """A linear layer whose Lipschitz constant is at most `coefficient`, after every step.

    The layer multiplies by ``weight * min(1, coefficient / norm)``, where ``norm`` is the largest
    singular value of `weight`, computed exactly in each call: no running estimate lags behind after
    a large step, and there is no state besides the parameters, which are named as in `nn.Linear`.
    The gradient includes that of the norm.

    Autograd keeps what `nn.Linear` keeps, the product and the singular vectors. A call costs
    O(min(in, out)^2 max(in, out)): half a millisecond at 64 x 64, 30 at 512 x 512. One call of an
    `InvertibleResidual` pays this once. Autocast does not round the weight.

    Args:
        in_features: Size of the last dimension of the input ``(..., in_features)``.
        out_features: Size of the last dimension of the output.
        bias: Whether to add a learned bias.
        coefficient: The bound, above 0 and below 1.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Raises:
        ValueError: When `coefficient` is out of its range.

    Example:
        >>> import torch
        >>> from recoup.invertible import LipschitzLinear
        >>> layer = LipschitzLinear(2, 2, coefficient=0.5)
        >>> _ = torch.nn.init.constant_(layer.weight, 100.0)
        >>> layer.normalized_weight()
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]], grad_fn=<MulBackward0>)

    Gouk et al., "Regularisation of neural networks by enforcing Lipschitz continuity",
    https://arxiv.org/abs/1804.04368; Behrmann et al., "Invertible residual networks",
    https://arxiv.org/abs/1811.00995, section 2.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        coefficient: float = 0.9,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_whole(in_features=in_features, out_features=out_features)
        check_flag(bias=bias)
        check_within(0, 1, 0.9, coefficient=coefficient)
        check_place(device, dtype)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.coefficient = coefficient

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``."""
        return functional.linear(input, self.normalized_weight(), self.bias)


class LipschitzConv2d(_Lipschitz, nn.Conv2d):
    """A convolution whose Lipschitz constant is at most `coefficient`, after every step.

    The layer convolves with ``weight * min(1, coefficient / norm)``. The convolution with zero
    padding, for any image size, is a part of the convolution of an unbounded image, whose norm is
    the largest singular value of the kernel's Fourier transform at any frequency. That value is
    computed exactly on a grid of frequencies, and raised by the most that a transform of this
    degree can rise between two of them: so `norm` is an upper bound, up to 4 % too high for a 3x3
    kernel. (The largest singular value of the reshaped kernel is no bound: it may be too low by a
    factor of 3.) There is no state besides the parameters, which are named as in `nn.Conv2d`. The
    gradient includes that of the norm.

    Autograd keeps what `nn.Conv2d` keeps, the product and one transform of the kernel. A call
    computes the singular values of 144 matrices for a 3x3 kernel: 2 ms at 12 channels in or out, 30
    at 64; of one matrix for a 1x1 kernel. One call of an `InvertibleResidual` pays this once.
    Autocast does not round the kernel.

    Args:
        in_channels: Channels of the input ``(N, in_channels, H, W)``.
        out_channels: Channels of the output.
        kernel_size: Side of the kernel.
        padding: As in `nn.Conv2d`, with zeros.
        bias: Whether to add a learned bias.
        coefficient: The bound, above 0 and below 1.
        device: Device of the parameters.
        dtype: Floating-point type of the parameters.

    Raises:
        ValueError: When `coefficient` is out of its range.

    Example:
        >>> import torch
        >>> from recoup.invertible import LipschitzConv2d
        >>> layer = LipschitzConv2d(4, 8, 3, padding=1, coefficient=0.9)
        >>> _ = torch.nn.init.constant_(layer.weight, 100.0)
        >>> x = torch.randn(1, 4, 8, 8)
        >>> bool((layer(x) - layer(0 * x)).norm() <= 0.9 * x.norm())
        True

    Sedghi et al., "The singular values of convolutional layers", https://arxiv.org/abs/1805.10408;
    Behrmann et al., "Invertible residual networks", https://arxiv.org/abs/1811.00995, section 2.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *,
        padding: str | int | tuple[int, int] = 0,
        bias: bool = True,
        coefficient: float = 0.9,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_whole(in_channels=in_channels, out_channels=out_channels)
        check_whole(**_of_sides("kernel_size", kernel_size))
        if padding not in ("same", "valid"):
            check_whole(0, **_of_sides("padding", padding))
        check_flag(bias=bias)
        check_within(0, 1, 0.9, coefficient=coefficient)
        check_place(device, dtype)
        super().__init__(
            in_channels, out_channels, kernel_size, padding=padding, bias=bias, device=device,
            dtype=dtype,
        )  # fmt: skip
        self.coefficient = coefficient

    def forward(self, input: Tensor) -> Tensor:
        """Map ``(N, in_channels, H, W)`` to ``(N, out_channels, H', W')`` as `nn.Conv2d` does."""
        return self._conv_forward(input, self.normalized_weight(), self.bias)

    def _norm(self, weight: Tensor) -> Tensor:
        """Bound the norm of the convolution with `weight`, for any image."""
        kernel = (self.kernel_size[0], self.kernel_size[1])
        grid = [max(1, _FREQUENCIES * (size - 1)) for size in kernel]
        # A real kernel has the same norm at opposite frequencies, so half of them are enough.
        transform: Tensor = _fft.rfftn(weight, s=grid, dim=(2, 3))
        blocks = transform.flatten(2).permute(2, 0, 1)
        with grad_mode(False):
            values: Tensor = _linalg.svdvals(blocks)
            worst = values[:, 0].argmax().reshape(1)
        rise = math.prod(
            1 / math.cos(math.pi * (size - 1) / (2 * num))
            for size, num in zip(kernel, grid, strict=True)
        )
        return _linalg.matrix_norm(blocks.index_select(0, worst), ord=2).squeeze(0) * rise


class LipSwish(nn.Module):
    """The activation ``x * sigmoid(beta * x) / 1.1``, smooth with a Lipschitz constant below 1.

    ``beta = softplus(raw_beta)`` is one learned number; no value of it raises the constant. Unlike
    that of ELU, the second derivative does not vanish on half of the line, so that the gradient of
    a log-determinant does not either. Autograd keeps three tensors of the input's size.

    Example:
        >>> import torch
        >>> from recoup.invertible import LipSwish
        >>> LipSwish()(torch.tensor([-1.0, 0.0, 1.0])).shape
        torch.Size([3])

    Chen et al., "Residual flows for invertible generative modeling",
    https://arxiv.org/abs/1906.02735, section 3.3.
    """

    def __init__(self) -> None:
        super().__init__()
        # its softplus is 1: the usual Swish
        self.raw_beta = nn.Parameter(torch.full((1,), math.log(math.expm1(1.0))))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to `x` of any shape."""
        return x * torch.sigmoid(x * functional.softplus(self.raw_beta)) / 1.1


def _of_sides(name: str, given: Any) -> dict[str, Any]:
    """Return the one or two numbers of a tuple by their names, anything else by the one name."""
    if not isinstance(given, tuple) or len(cast("tuple[Any, ...]", given)) not in (1, 2):
        return {name: given}
    return {f"{name}[{at}]": each for at, each in enumerate(cast("tuple[Any, ...]", given))}
