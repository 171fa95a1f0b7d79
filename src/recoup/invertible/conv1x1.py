"""Invertible 1x1 convolutions: one learned mixing of the channels at every position."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from recoup._arguments import check_type, check_whole
from recoup._core.settings import without_autocast
from recoup._core.tensors import check_place
from recoup.invertible.contract import InvertibleModule
from recoup.invertible.shapes import check_channels, num_positions

__all__ = ["InvertibleConv1x1", "InvertibleConv1x1LU"]

_linalg: Any = torch.linalg  # torch does not type its functions


class InvertibleConv1x1(InvertibleModule):
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
        self.weight = nn.Parameter(_rotation(num_channels).to(device=device, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the channels of `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        log_abs_det: Tensor = _linalg.slogdet(_wide(self.weight))[1]
        return _mix(x, self.weight), self._at_each(log_abs_det, x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        # One factorisation for both; `inv` and `slogdet` would each compute their own.
        weight = _wide(self.weight)
        factors, pivots = _linalg.lu_factor(weight)
        undone: Tensor = _linalg.lu_solve(
            factors, pivots, torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        )
        log_abs_det: Tensor = factors.diagonal().abs().log().sum()
        return _mix(y, undone.to(self.weight.dtype)), self._at_each(-log_abs_det, y)

    def _at_each(self, log_abs_det: Tensor, x: Tensor) -> Tensor:
        return (log_abs_det * num_positions(x)).to(self.weight.dtype).expand(x.shape[0])

    def extra_repr(self) -> str:
        """Show the number of channels."""
        return str(self.num_channels)


class InvertibleConv1x1LU(InvertibleModule):
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
        >>> from recoup.invertible import InvertibleConv1x1, InvertibleConv1x1LU
        >>> plain = InvertibleConv1x1(4)
        >>> layer = InvertibleConv1x1LU.from_plain(plain)
        >>> torch.allclose(layer.weight(), plain.weight, atol=1e-5)
        True

    Kingma and Dhariwal, "Glow", https://arxiv.org/abs/1807.03039, section 3.2.
    """

    permutation: Tensor
    sign: Tensor

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
        weight = _rotation(num_channels).to(device=device, dtype=dtype)
        self.register_buffer("permutation", torch.empty_like(weight))
        self.register_buffer("sign", torch.empty_like(weight[0]))
        self.lower = nn.Parameter(torch.empty_like(weight))
        self.upper = nn.Parameter(torch.empty_like(weight))
        self.log_s = nn.Parameter(torch.empty_like(weight[0]))
        self._factorise(weight)

    @classmethod
    def from_plain(cls, plain: InvertibleConv1x1) -> Self:
        """Factorise the matrix of `plain`; the result computes the same function."""
        check_type(InvertibleConv1x1, "an InvertibleConv1x1", plain=plain)
        weight = plain.weight.detach()
        layer = cls(plain.num_channels, device=weight.device, dtype=weight.dtype)
        layer._factorise(weight)
        return layer

    def weight(self) -> Tensor:
        """Return the product of the factors: the matrix of shape ``(C, C)``."""
        lower, upper = self._triangles()
        return self.permutation @ (lower @ upper)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the channels of `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        with without_autocast(x.device.type):
            weight = self.weight()
        return _mix(x, weight), self._log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        lower, upper = self._triangles()
        undone: Tensor = _linalg.solve_triangular(
            _wide(lower), _wide(self.permutation).T, upper=False, unitriangular=True
        )
        undone = _linalg.solve_triangular(_wide(upper), undone, upper=True)
        return _mix(y, undone.to(upper.dtype)), -self._log_det(y)

    def _triangles(self) -> tuple[Tensor, Tensor]:
        diagonal = torch.diag_embed(self.sign * self.log_s.exp())
        one = torch.eye(self.num_channels, device=self.lower.device, dtype=self.lower.dtype)
        return self.lower.tril(-1) + one, self.upper.triu(1) + diagonal

    def _log_det(self, x: Tensor) -> Tensor:
        return (self.log_s.sum() * num_positions(x)).expand(x.shape[0])

    @torch.no_grad()
    def _factorise(self, weight: Tensor) -> None:
        factors: tuple[Tensor, Tensor, Tensor] = _linalg.lu(weight)
        permutation, lower, upper = factors
        diagonal = upper.diagonal()
        self.permutation.copy_(permutation)
        self.sign.copy_(diagonal.sign())
        self.lower.copy_(lower.tril(-1))
        self.upper.copy_(upper.triu(1))
        self.log_s.copy_(diagonal.abs().log())

    def extra_repr(self) -> str:
        """Show the number of channels."""
        return str(self.num_channels)


def _rotation(num_channels: int) -> Tensor:
    """Draw a rotation matrix, uniform over rotations, in float32 on the CPU."""
    factors: tuple[Tensor, Tensor] = _linalg.qr(
        torch.randn(num_channels, num_channels, dtype=torch.float32, device="cpu")
    )
    # Without the signs of the diagonal, QR's own convention would leak into the distribution.
    rotation = factors[0] * factors[1].diagonal().sign()
    if float(_linalg.det(rotation)) < 0:
        rotation[:, 0] *= -1
    return rotation.contiguous()  # QR transposes it, and some optimizers flatten with a view


def _wide(matrix: Tensor) -> Tensor:
    """Cast a half-precision matrix to single precision: half precision has no factorisations."""
    return matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix


def _mix(x: Tensor, weight: Tensor) -> Tensor:
    check_channels(x, weight.shape[0])
    if torch.is_autocast_enabled(x.device.type):
        with without_autocast(x.device.type):
            return _product(x, weight)
    return _product(x, weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    # One product of matrices: for so few channels a convolution takes two to three times as long
    # on a CPU, and on CUDA it would round to TF32, which cannot be inverted. With the channels
    # last, which the result is from then on, the convolutions of couplings are faster, too.
    return functional.linear(x.movedim(1, -1), weight).movedim(-1, 1)
