"""Scores that tell outliers from data like those that a flow was trained on.

The likelihood alone does not: a flow trained on photographs of things gives house numbers a higher
one than the things themselves (Nalisnick et al., https://arxiv.org/abs/1810.09136), since it
depends more on how smooth a picture is than on its content. The two scores here correct for that,
each in its own way; the larger, the less the data are like the training data. Take a threshold from
the scores of held-out data like those of training: their 99th percentile gives one false alarm in a
hundred.
"""

from __future__ import annotations

import zlib
from typing import cast

import torch
from torch import Tensor

from recoup._arguments import check_type
from recoup._core.tensors import check_tensors
from recoup.flows.flow import Flow


@torch.no_grad()
def typicality(
    flow: Flow, x: Tensor, reference_bits: Tensor, labels: Tensor | None = None
) -> Tensor:
    """Return how far data ``(N, ...)`` are from typical: ``(N,)``, in bits a value.

    Samples of a density in many dimensions have about the mean code length of that density. So
    data of much smaller code length are suspect too, though likelier than all training data. One
    sample may not be decisive where the mean over a group of the same origin is:
    ``abs(flow.bits_per_dim(group).mean() - reference_bits.mean())``.

    Args:
        flow: A trained flow, in evaluation mode.
        x: The data to judge, ``(N, *flow.shape)``.
        reference_bits: `Flow.bits_per_dim` ``(M,)`` of data like those of training, best held out.
        labels: Classes ``(N,)``, for a conditional flow.

    Returns:
        Distances of each code length from the mean of `reference_bits`.

    Raises:
        ValueError: When `reference_bits` is empty or of another shape.

    Example:
        >>> import torch
        >>> from recoup.flows import Flow, typicality
        >>> from recoup.invertible import Chain, Flip
        >>> flow = Flow(Chain(Flip()), shape=(64,))
        >>> known = flow.bits_per_dim(torch.randn(1000, 64))
        >>> scores = typicality(flow, torch.stack([torch.randn(64), torch.zeros(64)]), known)
        >>> bool(scores[1] > scores[0])  # the likeliest of all, and like no sample
        True

    Nalisnick et al., "Detecting out-of-distribution inputs to deep generative models using
    typicality", https://arxiv.org/abs/1906.02994.
    """
    check_type(Flow, "a Flow", flow=flow)
    check_tensors(reference_bits=reference_bits)
    if reference_bits.dim() != 1 or not len(reference_bits):
        raise ValueError(
            f"`reference_bits` has shape {tuple(reference_bits.shape)}, but must be (M,), M at "
            f"least 1: `flow.bits_per_dim` of data like those of training."
        )
    return (flow.bits_per_dim(x, labels) - reference_bits.mean()).abs()


@torch.no_grad()
def complexity_ratio(flow: Flow, x: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return how many bits a flow spends on pictures beyond a general coder: ``(N,)``.

    That is `Flow.bits_per_dim` less `coded_bits_per_dim`, a log-likelihood ratio in bits a value.
    Simple pictures are cheap for every coder; data are familiar to a flow where it beats a general
    coder.

    Args:
        flow: A trained flow of grey levels, in evaluation mode.
        x: Pictures ``(N, C, H, W)`` of levels.
        labels: Classes ``(N,)``, for a conditional flow.

    Raises:
        ValueError: When the flow is not one of pictures of at most 256 levels.

    Example:
        >>> import torch
        >>> from recoup.flows import Glow, complexity_ratio
        >>> flow = Glow((1, 8, 8), levels=17, num_steps=1, width=8).eval()
        >>> complexity_ratio(flow, torch.randint(17, (3, 1, 8, 8))).shape
        torch.Size([3])

    Serrà et al., "Input complexity and out-of-distribution detection with likelihood-based
    generative models", https://arxiv.org/abs/1909.11480.
    """
    check_type(Flow, "a Flow", flow=flow)
    if flow.levels is None or flow.levels > 256 or len(flow.shape) != 3:
        raise ValueError(
            f"`flow` is for data of shape {tuple(flow.shape)} with `levels` {flow.levels}, but "
            f"only pictures (C, H, W) of at most 256 levels can be coded to compare. Use "
            f"`typicality`."
        )
    bits = flow.bits_per_dim(x, labels)
    return bits - coded_bits_per_dim(x).to(bits)


def coded_bits_per_dim(x: Tensor) -> Tensor:
    """Return the losslessly compressed size of pictures, ``(N,)``, in bits a value, float64.

    The coder is that of PNG: each pixel less its prediction from its neighbours, then DEFLATE. Each
    of PNG's five filters is tried on the whole picture, and the shortest result counts.

    Args:
        x: Pictures ``(N, C, H, W)`` of whole numbers, 0 to 255, of any type.

    Raises:
        ValueError: When `x` has another shape, or holds other values.

    Example:
        >>> import torch
        >>> from recoup.flows import coded_bits_per_dim
        >>> flat, noise = torch.zeros(1, 16, 16), torch.randint(256, (1, 16, 16))
        >>> bits = coded_bits_per_dim(torch.stack([flat, noise]))
        >>> bool(bits[0] < 0.5 and bits[1] > 7.9)
        True

    PNG, https://www.w3.org/TR/png-3/, section 9.
    """
    check_tensors(x=x)
    if x.dim() != 4 or 0 in x.shape[1:]:
        raise ValueError(f"`x` has shape {tuple(x.shape)}, but must be (N, C, H, W).")
    pixels = x.to("cpu", torch.long)
    if len(x) and (bool((pixels != x.cpu()).any()) or not 0 <= pixels.min() <= pixels.max() < 256):
        raise ValueError("`x` must hold whole numbers, 0 to 255: the grey levels of pictures.")
    sizes = [
        min(_deflated(image) for image in forecasts.movedim(1, -1))
        for forecasts in _residuals(pixels).unbind(1)
    ]
    return torch.tensor(sizes, dtype=torch.float64) * 8 / x.shape[1:].numel()


def _residuals(x: Tensor) -> Tensor:
    """Return pixels ``(N, C, H, W)`` after each of PNG's five filters: ``(5, N, C, H, W)``."""
    padded = torch.nn.functional.pad(x, (1, 0, 1, 0))
    left, up, corner = padded[..., 1:, :-1], padded[..., :-1, 1:], padded[..., :-1, :-1]
    plane = left + up - corner
    near = torch.stack([left, up, corner])  # the first of equally near ones counts
    paeth = near.gather(0, (near - plane).abs().argmin(0, keepdim=True))[0]
    forecasts = torch.stack([torch.zeros_like(x), left, up, (left + up) // 2, paeth])
    return (x - forecasts) % 256


def _deflated(values: Tensor) -> int:
    """Return the number of bytes to which values below 256 are compressed."""
    numbers = cast("list[int]", values.flatten().tolist())
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)  # without zlib's own header
    return len(coder.compress(bytes(numbers)) + coder.flush())
