from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    Flatten,
    InvertibleConv1x1,
    InvertibleConv1x1LU,
    InvertibleModule,
    InvertibleResidual,
    LipschitzConv2d,
    LipschitzLinear,
    LipSwish,
    Logit,
    MixtureCoupling,
    Normalize,
    Permute,
    Split,
    Squeeze,
)
from tests.invertible_zoo import net


def conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, outputs, 3, padding=1)
    )


def images(*size: int) -> Tensor:
    return torch.randn(2, *size)


def mixture(k: int, halves: tuple[int, int], *size: int, **options: Any) -> Any:
    """A coupling of mixtures of `k`, and what it takes: how much is given, and how much changed."""
    given, changed = halves
    network = (conv if size else net)(given, (3 * k + 2) * changed)
    channels = given if "split" in options else given + changed
    return MixtureCoupling(network, num_components=k, **options), images(channels, *size)


BUILDERS: dict[str, Callable[[], tuple[InvertibleModule, Tensor]]] = {
    "actnorm": lambda: (ActNorm(3), images(3, 2, 2)),
    "conv1x1": lambda: (InvertibleConv1x1(3), images(3, 2, 2)),
    "conv1x1-lu": lambda: (InvertibleConv1x1LU(3), images(3, 2, 2)),
    "additive": lambda: (AdditiveCoupling(conv(2, 2)), images(4, 2, 3)),
    "additive-two": lambda: (AdditiveCoupling(conv(2, 1), conv(1, 2)), images(3, 2, 2)),
    "revnet": lambda: (AdditiveCoupling(net(1, 2), net(2, 1), condition="second"), images(3)),
    "affine-two": lambda: (AffineCoupling(conv(2, 2), conv(1, 4)), images(3, 2, 2)),
    "affine-second": lambda: (AffineCoupling(net(1, 4), condition="second"), images(3)),
    "additive-board": lambda: (
        AdditiveCoupling(conv(2, 2), conv(2, 2), split="checkerboard"), images(2, 2, 4)
    ),
    "mixture-board-second": lambda: mixture(
        4, (2, 2), 2, 2, condition="second", split="checkerboard"
    ),
    "affine-board": lambda: (AffineCoupling(conv(1, 2), split="checkerboard"), images(1, 4, 2)),
    "mixture": lambda: mixture(4, (2, 2), 2, 3),
    "mixture-of-one": lambda: mixture(1, (2, 1)),
    "residual": lambda: (
        InvertibleResidual(nn.Sequential(LipschitzLinear(3, 5), LipSwish(), LipschitzLinear(5, 3))),
        images(3),
    ),
    "residual-images": lambda: (
        InvertibleResidual(nn.Sequential(LipschitzConv2d(2, 2, 3, padding=1), nn.ELU())),
        images(2, 2, 3),
    ),
    "flatten": lambda: (Flatten((2, 1, 3)), images(2, 1, 3)),
    "squeeze-3": lambda: (Squeeze(3), images(2, 3, 3)),
    "split-odd": lambda: (Split(), images(3, 1, 2)),
    "permute": lambda: (Permute([2, 0, 3, 1]), images(4, 2, 1)),
    "normalize": lambda: (Normalize([0.5, -1.0], [2.0, -0.3]), images(2, 2, 3)),
    "logit": lambda: (Logit(), torch.rand(2, 2, 2, 2)),
}  # fmt: skip


@pytest.fixture(params=BUILDERS)
def case(request: pytest.FixtureRequest) -> tuple[InvertibleModule, Tensor]:
    """A layer whose parameters are random and of both signs, in double precision, and an input."""
    torch.manual_seed(7)
    layer, x = BUILDERS[request.param]()
    layer, x = layer.double(), x.double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.7)
    if isinstance(layer, ActNorm):
        layer.started = True
    return layer, x
