"""Layers that move values and change none of them: Flatten, Squeeze, Split, Permute and Flip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from recoup._arguments import check_whole
from recoup.invertible.contract import (
    InvertibleModule,
    as_tuple,
    check_channels,
    check_has_channels,
    got,
    sizes_of,
    zero_log_det,
)


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
        self._check(x, self.shape)
        return x.reshape(x.shape[0], self.shape.numel()), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, D)``; returns ``(x, log_det)``."""
        self._check(y, (self.shape.numel(),), "y")
        return y.reshape(y.shape[0], *self.shape), zero_log_det(y)

    def _check(self, value: Any, shape: Sequence[int], name: str = "x") -> None:
        if not isinstance(value, Tensor) or tuple(value.shape[1:]) != tuple(shape):
            raise ValueError(
                f"{got(value, name)}, but Flatten for `shape` {tuple(self.shape)} needs "
                f"(N, {', '.join(map(str, shape))}). Build the layer with the `shape` of one "
                "sample."
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
        f = self.factor
        if not _is_image(x) or x.shape[2] % f or x.shape[3] % f:
            raise ValueError(
                f"{got(x)}, but Squeeze with `factor` {f} needs (N, C, H, W) with H and W "
                f"multiples of {f}. Crop or pad the images, or use fewer levels."
            )
        n, c, h, w = x.shape
        # Written out, as `pixel_unshuffle` does not reshape an empty batch.
        patches = x.reshape(n, c, h // f, f, w // f, f).permute(0, 1, 3, 5, 2, 4)
        return patches.reshape(n, c * f * f, h // f, w // f), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, H, W)``; returns ``(x, log_det)``."""
        f = self.factor
        if not _is_image(y) or y.shape[1] % f**2:
            raise ValueError(
                f"{got(y, 'y')}, but the inverse of Squeeze with `factor` {f} needs (N, C, H, W) "
                f"with C a multiple of {f**2}."
            )
        n, c, h, w = y.shape
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
        check_has_channels(x, 2, "Split", "Squeeze first, or use fewer levels.")
        h, z = x.tensor_split(2, dim=1)
        # A latent lives as long as the loss. A view would keep the storage of x that long.
        return (h, z.clone()), zero_log_det(x)

    def inverse(self, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Concatenate ``(h, z)``; returns ``(x, log_det)``."""
        parts = as_tuple(y)
        if len(parts) != 2:
            raise ValueError(f"`y` has {len(parts)} parts, but Split needs the pair (h, z).")
        x = torch.cat(parts, dim=1)
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
        if isinstance(permutation, list | tuple):
            check_whole(0, **{f"permutation[{at}]": each for at, each in enumerate(permutation)})
            order = torch.tensor(list(permutation), dtype=torch.int64)
        else:
            check_whole(permutation=permutation)
            order = torch.randperm(int(cast("int", permutation)))
        if not order.numel() or order.sort().values.tolist() != list(range(order.numel())):
            raise ValueError(
                f"`permutation` is {order.tolist()}, but must hold each number from 0 to its "
                "length - 1 once, and one at least. Give the number of channels for a random order."
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
        check_has_channels(x, 1, "Flip", "Reshape it.")
        return x.flip(1), zero_log_det(x)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` by reversing once more; returns ``(x, log_det)``."""
        return self.forward(y)


def _is_image(x: Any) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.dim() == 4
