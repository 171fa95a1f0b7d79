"""Layers that move values and change none of them: Flatten, Squeeze, Split, Permute and Flip."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recoup._arguments import check_whole
from recoup.invertible.contract import InvertibleModule, check_channels, sizes_of, zero_log_det


class Flatten(InvertibleModule):
    """Turn samples of any shape into vectors: ``(N, *shape)`` becomes ``(N, D)``.

    The order is that of memory: the last dimension runs fastest. Autograd keeps nothing.

    Args:
        shape: Shape of one sample, without the batch; `inverse` needs it.

    Raises:
        ValueError: When a size of `shape` is below 1, or the input has another shape.

    Example:
        >>> import torch
        >>> from recoup.invertible import Flatten
        >>> y, log_det = Flatten((1, 2, 2))(torch.arange(4.0).view(1, 1, 2, 2))
        >>> y.tolist()
        [[0.0, 1.0, 2.0, 3.0]]
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = sizes_of(shape)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Flatten `x` of shape ``(N, *shape)``; returns ``(y, log_det)``."""
        self._check("x", x, self.shape)
        return x.reshape(x.shape[0], self.shape.numel()), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, D)``; returns ``(x, log_det)``."""
        self._check("y", y, (self.shape.numel(),))
        return y.reshape(y.shape[0], *self.shape), zero_log_det(y)

    def _check(self, name: str, value: Tensor, shape: Sequence[int]) -> None:
        if tuple(value.shape[1:]) != tuple(shape):
            raise ValueError(
                f"`{name}` has shape {tuple(value.shape)}, but Flatten for `shape` "
                f"{tuple(self.shape)} needs (N, {', '.join(map(str, shape))}). Build the layer "
                f"with the `shape` of one sample."
            )


class Squeeze(InvertibleModule):
    """Turn each patch of ``factor x factor`` pixels into ``factor * factor`` channels.

    ``(N, C, H, W)`` becomes ``(N, C * factor**2, H / factor, W / factor)``: space to depth. The
    channels of one patch are neighbours, row by row. Autograd keeps nothing.

    Args:
        factor: Side of a patch in pixels.

    Raises:
        ValueError: When `factor` is below 1, when a height or width is not a multiple of it, or,
            in inverse, when the channels are not a multiple of its square.

    Example:
        >>> import torch
        >>> from recoup.invertible import Squeeze
        >>> y, log_det = Squeeze()(torch.arange(16.0).view(1, 1, 4, 4))
        >>> y[0, :, 0, 0].tolist()
        [0.0, 1.0, 4.0, 5.0]

    Dinh et al., "Density estimation using Real NVP", https://arxiv.org/abs/1605.08803,
    section 3.6.
    """

    def __init__(self, factor: int = 2) -> None:
        super().__init__()
        check_whole(factor=factor)
        self.factor = factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Squeeze `x` of shape ``(N, C, H, W)``; returns ``(y, log_det)``."""
        if x.dim() != 4 or x.shape[2] % self.factor or x.shape[3] % self.factor:
            raise ValueError(
                f"`x` has shape {tuple(x.shape)}, but Squeeze with `factor` {self.factor} needs "
                f"(N, C, H, W) with H and W multiples of {self.factor}. Crop or pad the images, "
                f"or use fewer levels."
            )
        n, c, h, w = x.shape
        f = self.factor
        # Written out, as `pixel_unshuffle` does not reshape an empty batch.
        patches = x.reshape(n, c, h // f, f, w // f, f).permute(0, 1, 3, 5, 2, 4)
        return patches.reshape(n, c * f * f, h // f, w // f), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, H, W)``; returns ``(x, log_det)``."""
        if y.dim() != 4 or y.shape[1] % self.factor**2:
            raise ValueError(
                f"`y` has shape {tuple(y.shape)}, but the inverse of Squeeze with `factor` "
                f"{self.factor} needs (N, C, H, W) with C a multiple of {self.factor**2}."
            )
        n, c, h, w = y.shape
        f = self.factor
        patches = y.reshape(n, c // (f * f), f, f, h, w).permute(0, 1, 4, 2, 5, 3)
        return patches.reshape(n, c // (f * f), h * f, w * f), zero_log_det(y)


class Split(InvertibleModule):
    """Cut the channels in two: one part goes on, the other is a latent from here on.

    In a `Chain` the part that goes on is the input of the next stage, and the other part appears
    in the chain's output: the latents in the order in which they were split off, the last one at
    the end. If the number of channels is odd, the part that goes on gets the extra one. Autograd
    keeps nothing.

    Raises:
        ValueError: When the input has fewer than 2 channels.

    Example:
        >>> import torch
        >>> from recoup.invertible import Split
        >>> (h, z), log_det = Split()(torch.zeros(5, 4, 2, 2))
        >>> h.shape, z.shape
        (torch.Size([5, 2, 2, 2]), torch.Size([5, 2, 2, 2]))

    Dinh et al., "Density estimation using Real NVP", https://arxiv.org/abs/1605.08803,
    section 3.6.
    """

    num_early = 1

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Cut `x` of shape ``(N, C, ...)``; returns ``((h, z), log_det)``."""
        _check_has_channels(x, 2, "Split", "Squeeze first, or use fewer levels.")
        h, z = x.tensor_split(2, dim=1)
        # A latent lives as long as the loss. A view would keep the storage of x that long.
        return (h, z.clone()), zero_log_det(x)

    def inverse(self, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Concatenate ``(h, z)``; returns ``(x, log_det)``."""
        x = torch.cat(y, dim=1)
        return x, zero_log_det(x)


class Permute(InvertibleModule):
    """Reorder the channels: channel i of the output is channel ``permutation[i]`` of the input.

    The order is fixed, a buffer in the state dict. Autograd keeps only the order.

    Args:
        permutation: The order as numbers from 0 to C - 1, or C itself for a random order from
            torch's default generator.

    Raises:
        ValueError: When `permutation` misses or repeats a number, or when the input has another
            number of channels.

    Example:
        >>> import torch
        >>> from recoup.invertible import Permute
        >>> y, log_det = Permute([2, 0, 1])(torch.tensor([[10.0, 20.0, 30.0]]))
        >>> y.tolist()
        [[30.0, 10.0, 20.0]]
    """

    permutation: Tensor

    def __init__(self, permutation: int | Sequence[int]) -> None:
        super().__init__()
        for each in permutation if isinstance(permutation, list | tuple) else (permutation,):
            check_whole(0, permutation=each)
        if isinstance(permutation, int):
            order = torch.randperm(permutation)
        else:
            order = torch.tensor(list(permutation), dtype=torch.int64)
        if order.sort().values.tolist() != list(range(order.numel())):
            raise ValueError(
                f"`permutation` is {order.tolist()}, but must hold each number from 0 to "
                f"{order.numel() - 1} once. Give the number of channels for a random order."
            )
        self.register_buffer("permutation", order)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reorder `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        check_channels(x, self.permutation.numel())
        return x.index_select(1, self.permutation), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        check_channels(y, self.permutation.numel())
        return y.index_select(1, self.permutation.argsort()), zero_log_det(y)


class Flip(InvertibleModule):
    """Reverse the order of the channels, so that the next coupling changes the other half.

    Autograd keeps nothing.

    Example:
        >>> import torch
        >>> from recoup.invertible import Flip
        >>> y, log_det = Flip()(torch.tensor([[1.0, 2.0, 3.0]]))
        >>> y.tolist()
        [[3.0, 2.0, 1.0]]
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Reverse `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        _check_has_channels(x, 1, "Flip", "Reshape it.")
        return x.flip(1), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` by reversing once more; returns ``(x, log_det)``."""
        return self.forward(y)


def _check_has_channels(x: Tensor, least: int, layer: str, way_out: str) -> None:
    if x.dim() < 2 or x.shape[1] < least:
        raise ValueError(
            f"`x` has shape {tuple(x.shape)}, but {layer} needs (N, C, ...) with C of at least "
            f"{least}. {way_out}"
        )
