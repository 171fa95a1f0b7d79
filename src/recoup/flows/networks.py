"""The networks inside couplings."""

from __future__ import annotations

from torch import nn

__all__ = ["ConvNetwork"]


class ConvNetwork(nn.Sequential):
    """Three convolutions, 3x3, 1x1, 3x3, with ReLU between: the network of Glow's couplings.

    The last convolution starts at zero, so that a coupling over it starts as the identity.

    Args:
        in_channels: Channels of the input ``(N, in_channels, H, W)``.
        out_channels: Channels of the output; height and width stay.
        width: Channels in between.
        dropout: Probability with which a value in between is dropped, 0 for none.

    Example:
        >>> import torch
        >>> from recoup.flows import ConvNetwork
        >>> ConvNetwork(2, 4, width=8)(torch.zeros(1, 2, 5, 5)).shape
        torch.Size([1, 4, 5, 5])

    Kingma and Dhariwal, "Glow", https://arxiv.org/abs/1807.03039, section 4.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, width: int, dropout: float = 0.0
    ) -> None:
        last = nn.Conv2d(width, out_channels, 3, padding=1)
        nn.init.zeros_(last.weight)
        if last.bias is not None:
            nn.init.zeros_(last.bias)
        layers: list[nn.Module] = [
            nn.Conv2d(in_channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
            nn.ReLU(),
            last,
        ]
        if dropout:
            layers.insert(-1, nn.Dropout(dropout))
        super().__init__(*layers)
