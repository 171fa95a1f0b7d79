"""Chains of invertible modules that are hard on whoever runs a module a second time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recoup import invertible
from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    Flip,
    InvertibleConv1x1,
    InvertibleConv1x1LU,
    InvertibleModule,
    Split,
)
from tests.zoo import leaf


def net(inputs: int, outputs: int, dropout: float = 0.0, *, norm: bool = False) -> nn.Module:
    middle = nn.BatchNorm1d(7) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout)
    return nn.Sequential(nn.Linear(inputs, 7), *middle, nn.Linear(7, outputs))


def conv_net(inputs: int, outputs: int, dropout: float = 0.0, *, norm: bool = True) -> nn.Module:
    middle = nn.BatchNorm2d(5) if norm else nn.Identity(), nn.Tanh(), nn.Dropout(dropout)
    ends = nn.Conv2d(inputs, 5, 3, padding=1), nn.Conv2d(5, outputs, 3, padding=1)
    return nn.Sequential(ends[0], *middle, ends[1])


class Says(nn.Module):
    """A network that says the same `values` everywhere, each in `num_channels` channels."""

    def __init__(self, *values: float, num_channels: int = 1) -> None:
        super().__init__()
        self.values, self.num_channels = torch.tensor(values), num_channels
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        values = self.values.to(x).repeat_interleave(self.num_channels)
        return values.view(1, -1, *(1,) * (x.dim() - 2)).expand(len(x), -1, *x.shape[2:])


class Scale(InvertibleModule):
    """Multiplication by a learned number, right in everything but what `wrong` replaces."""

    def __init__(self, **wrong: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([-1.5, 0.5, 2.0]))
        self.wrong = wrong

    def of(self, name: str, *right: Any) -> Any:
        return self.wrong[name](self, *right) if name in self.wrong else right

    def log_det(self, x: Tensor) -> Tensor:
        (found,) = self.of("log_det", self.w.abs().log())
        return found.sum().expand(len(x))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.of("forward", x * self.w, self.log_det(x))

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.of("inverse", y / self.w, -self.log_det(y))


class Direct(InvertibleModule):
    """A user's module that calls its networks without `evaluate`."""

    def __init__(self, dropout: float = 0.0, *, both: bool = False) -> None:
        super().__init__()
        self.f = net(3, 6, dropout)
        self.g = net(3, 3, dropout) if both else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, dim=1)
        shift, scale = self.f(a).chunk(2, dim=1)
        b = b * scale.tanh().exp() + shift
        a = a if self.g is None else a + self.g(b)
        return torch.cat([b, a], dim=1), scale.tanh().sum(1)

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        b, a = y.chunk(2, dim=1)
        a = a if self.g is None else a - self.g(b)
        shift, scale = self.f(a).chunk(2, dim=1)
        return torch.cat([a, (b - shift) * (-scale.tanh()).exp()], dim=1), -scale.tanh().sum(1)


class BuiltInPlace(InvertibleModule):
    """Builds its output in place; versions and addresses of forward and inverse differ."""

    def __init__(self, num_changes: int) -> None:
        super().__init__()
        self.weight, self.num_changes = nn.Parameter(torch.rand(3) + 0.5), num_changes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        y[:, 3:] *= self.weight
        for _ in range(self.num_changes):
            y.add_(0.1)
        return y, self.weight.log().sum().expand(len(x))

    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (y - 0.1 * self.num_changes).chunk(2, dim=1)
        return torch.cat([a, b / self.weight], dim=1), -self.weight.log().sum().expand(len(y))


def couplings(dropout: float) -> list[InvertibleModule]:
    return [
        AdditiveCoupling(net(3, 3, dropout)),
        AffineCoupling(net(3, 6, dropout), condition="second"),
        AdditiveCoupling(net(3, 3, dropout), net(3, 3, dropout)),
        Flip(),
        AdditiveCoupling(net(3, 3, dropout), net(3, 3, dropout), condition="second"),
        AffineCoupling(net(3, 6, dropout)),
    ]


def with_norms() -> list[InvertibleModule]:
    norms = partial(net, 3, norm=True)
    pairs = [
        (AffineCoupling(norms(6, 0.3)), AdditiveCoupling(norms(3), norms(3))) for _ in range(3)
    ]
    return [module for pair in pairs for module in pair]


def glow(*, split: bool) -> list[InvertibleModule]:
    modules: list[InvertibleModule] = [invertible.Squeeze()]
    channels = 8
    for level in range(2):
        for _ in range(2):
            mixing = InvertibleConv1x1 if level else InvertibleConv1x1LU
            modules += [ActNorm(channels), mixing(channels)]
            modules += [AffineCoupling(conv_net(channels // 2, channels, 0.2))]
        if split:
            modules.append(Split())
            channels //= 2
    return modules


def shared_couplings() -> list[InvertibleModule]:
    network = net(3, 3, 0.4, norm=True)
    coupling = AdditiveCoupling(net(3, 3, 0.4))
    return [AdditiveCoupling(network), coupling, Flip(), AdditiveCoupling(network), coupling]


def twice_in_one() -> list[InvertibleModule]:
    network = net(3, 3, norm=True)
    return [AdditiveCoupling(network, network) for _ in range(3)]


def stiff(
    depth: int, scale: float = 3.0, kind: type[AdditiveCoupling] = AdditiveCoupling, **options: Any
) -> list[InvertibleModule]:
    """Couplings of 16 values; with networks of this scale, inverses lose their way."""
    torch.manual_seed(0)
    parts = [(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2 * depth)]
    networks = [nn.Sequential(*each) for each in parts]
    for parameter in nn.ModuleList(networks).parameters():
        parameter.data *= scale
    return [kind(*pair, **options) for pair in zip(networks[::2], networks[1::2], strict=True)]


INVERTIBLE: dict[str, Callable[[], tuple[list[InvertibleModule], Tensor]]] = {
    "couplings": lambda: (couplings(0.0), leaf(4, 6)), "norms": lambda: (with_norms(), leaf(4, 6)),
    "dropout": lambda: (couplings(0.5), leaf(4, 6)),
    "input without gradient": lambda: (couplings(0.3), leaf(4, 6).detach()),
    "glow": lambda: (glow(split=False), leaf(3, 2, 4, 4)),
    "multi-scale": lambda: (glow(split=True), leaf(3, 2, 4, 4)),
    "shared across depth": lambda: (shared_couplings(), leaf(4, 6)),
    "shared within a coupling": lambda: (twice_in_one(), leaf(4, 6)),
    "networks without parameters": lambda: (
        [AdditiveCoupling(nn.Sigmoid(), nn.Identity()) for _ in range(4)], leaf(4, 6)
    ),
    "direct": lambda: ([Direct(both=True) for _ in range(4)], leaf(4, 6)),
    "built in place": lambda: ([BuiltInPlace(i % 3) for i in range(30)], leaf(300, 6)),
    "dequantized": lambda: (
        [invertible.Dequantize(17), invertible.Logit(), *couplings(0.3)],
        torch.randint(17, (4, 6)).double(),
    ),
    "one": lambda: ([AffineCoupling(net(3, 6, 0.2))], leaf(4, 6)),
}  # fmt: skip


def invertible_chain_of(name: str) -> tuple[list[InvertibleModule], Tensor]:
    torch.manual_seed(3)
    modules, x = INVERTIBLE[name]()
    for module in modules:
        module.double()
    return modules, x
