"""Networks that draw no random numbers, whose runs need not be watched.

Whether a network may draw must follow from the network itself, never from its earlier runs: a
resumed training does not know those, and has to draw the same numbers.
"""

from __future__ import annotations

from torch import nn

__all__ = ["QUIET", "draws_nothing"]

# Modules of torch whose forward computes from input, parameters and buffers alone.
QUIET: frozenset[type[nn.Module]] = frozenset((
    nn.Sequential, nn.Identity, nn.Flatten, nn.Unflatten, nn.Linear, nn.Bilinear, nn.Embedding,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid,
    nn.Hardswish, nn.Softmax, nn.LogSoftmax, nn.GLU, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle,
))  # fmt: skip
_DROPS: frozenset[type[nn.Module]] = frozenset((
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
))  # fmt: skip


def draws_nothing(module: nn.Module) -> bool:
    """Whether each module in `module` is known to draw nothing in its current mode."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    kind = type(module)
    if kind in _DROPS:
        return not module.training or own.get("p") == 0
    # A subclass may do anything, except a sequence that does not override forward, and a class that
    # itself (not through a base class) declares that only the modules within may draw.
    if (
        kind not in QUIET
        and kind.forward is not nn.Sequential.forward
        and not vars(kind).get("draws_only_in_modules", False)
    ):
        return False
    for child in module._modules.values():  # a loop: this runs at every evaluation of a network
        if child is not None and not draws_nothing(child):
            return False
    return True
