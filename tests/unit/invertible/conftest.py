from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from recoup import invertible as inv
from tests.invertible_zoo import conv_net, net

linear = inv.LipschitzLinear
conv, images = partial(conv_net, norm=False), partial(torch.randn, 2)


def mixture(k, halves, *size, **options):
    """A coupling of mixtures of `k`, and what it takes: how much is given, and how much changed."""
    given, changed = halves
    network = (conv if size else net)(given, (3 * k + 2) * changed)
    channels = given if "split" in options else given + changed
    return inv.MixtureCoupling(network, num_components=k, **options), images(channels, *size)


BUILDERS = {
    "actnorm": lambda: (inv.ActNorm(3), images(3, 2, 2)),
    "conv1x1": lambda: (inv.InvertibleConv1x1(3), images(3, 2, 2)),
    "conv1x1-lu": lambda: (inv.InvertibleConv1x1LU(3), images(3, 2, 2)),
    "additive": lambda: (inv.AdditiveCoupling(conv(2, 2)), images(4, 2, 3)),
    "additive-two": lambda: (inv.AdditiveCoupling(conv(2, 1), conv(1, 2)), images(3, 2, 2)),
    "revnet": lambda: (inv.AdditiveCoupling(net(1, 2), net(2, 1), condition="second"), images(3)),
    "affine-two": lambda: (inv.AffineCoupling(conv(2, 2), conv(1, 4)), images(3, 2, 2)),
    "affine-second": lambda: (inv.AffineCoupling(net(1, 4), condition="second"), images(3)),
    "additive-board": lambda: (
        inv.AdditiveCoupling(conv(2, 2), conv(2, 2), split="checkerboard"), images(2, 2, 4)
    ),
    "mixture-board-second": lambda: mixture(
        4, (2, 2), 2, 2, condition="second", split="checkerboard"
    ),
    "affine-board": lambda: (inv.AffineCoupling(conv(1, 2), split="checkerboard"), images(1, 4, 2)),
    "mixture": lambda: mixture(4, (2, 2), 2, 3),
    "mixture-of-one": lambda: mixture(1, (2, 1)),
    "residual": lambda: (
        inv.InvertibleResidual(nn.Sequential(linear(3, 5), inv.LipSwish(), linear(5, 3))), images(3)
    ),
    "residual-images": lambda: (
        inv.InvertibleResidual(nn.Sequential(inv.LipschitzConv2d(2, 2, 3, padding=1), nn.ELU())),
        images(2, 2, 3),
    ),
    "flatten": lambda: (inv.Flatten((2, 1, 3)), images(2, 1, 3)),
    "squeeze-3": lambda: (inv.Squeeze(3), images(2, 3, 3)),
    "split-odd": lambda: (inv.Split(), images(3, 1, 2)),
    "permute": lambda: (inv.Permute([2, 0, 3, 1]), images(4, 2, 1)),
    "normalize": lambda: (inv.Normalize([0.5, -1.0], [2.0, -0.3]), images(2, 2, 3)),
    "logit": lambda: (inv.Logit(), torch.rand(2, 2, 2, 2)),
}  # fmt: skip


@pytest.fixture(params=BUILDERS)
def case(request):
    torch.manual_seed(7)
    layer, x = (each.double() for each in BUILDERS[request.param]())
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.7)
    if isinstance(layer, inv.ActNorm):
        layer.started = True
    return layer, x
