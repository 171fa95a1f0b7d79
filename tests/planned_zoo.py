"""Models that a plan must know how to deal with: each with arguments and a loss."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "Case", "is_plain", "of_transformers", "transformers_or_skip"]


class Case(NamedTuple):
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any] | None  # None if the model returns its loss
    num_blocks: int | None = None  # that a plan finds


def transformers_or_skip() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def is_plain(model: nn.Module) -> bool:
    """Whether all modules have the forwards and the classes that they were made with."""
    return all(
        {"forward", "_recoup_forward"}.isdisjoint(vars(module))
        and "_Followed" not in [kind.__name__ for kind in type(module).__mro__]
        for module in model.modules()
    )


class Bottleneck(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.skip = nn.Conv2d(width, width, 1, stride) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(True))
        self.layer1 = nn.Sequential(Bottleneck(16), Bottleneck(16))
        self.layer2 = nn.Sequential(Bottleneck(16, 2), Bottleneck(16))
        self.layer3 = nn.Sequential(Bottleneck(16, 2), Bottleneck(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.head(x.mean((2, 3)))


class DoubleConv(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(given, made, 3, 1, 1), nn.GroupNorm(4, made), nn.SiLU(),
            nn.Conv2d(made, made, 3, 1, 1), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
        y = self.body(x)
        return {"y": y if scale is None else y * scale, "nothing": None, "mean": [y.mean()]}


class UNet(nn.Module):
    """Skips across, keyword arguments, nested outputs with None, two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.down3 = DoubleConv(3, 8), DoubleConv(8, 16), DoubleConv(16, 16)
        self.up2, self.up1 = DoubleConv(32, 16), DoubleConv(24, 8)
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one = self.down1(x, scale=self.scale)
        two = self.down2(F.max_pool2d(one["y"], 2))
        three = self.down3(F.max_pool2d(two["y"], 2), scale=self.scale)
        up = F.interpolate(three["y"], scale_factor=2)
        up = self.up2(torch.cat([up, two["y"]], 1))
        up = self.up1(torch.cat([F.interpolate(up["y"], scale_factor=2), one["y"]], 1))
        return {"image": self.head(up["y"]), "beside": three["mean"][0] + up["mean"][0]}


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Shared(nn.Module):
    """One block called six times (as ALBERT does), with a frozen one before."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.frozen = Expert(width).requires_grad_(False)
        self.blocks = nn.ModuleList([Expert(width), Expert(width)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        for _ in range(3):
            for block in self.blocks:
                x = x + block(x)
        return x


def _sequential() -> nn.Module:
    links = pairwise([48, 64, 16, 80, 32, 48, 48, 48])
    return nn.Sequential(*(
        nn.Sequential(nn.Linear(given, made), nn.Tanh(), nn.Linear(made, made), nn.GELU())
        for given, made in links
    ))  # fmt: skip


def _of(build, x, loss, num_blocks):
    def made() -> Case:
        torch.manual_seed(0)
        return Case(build(), (x(),), {}, loss, num_blocks)

    return made


def of_transformers(config, kind, inputs, *, num_blocks=None, loss=None, **sizes):
    def made() -> Case:
        t = transformers_or_skip()
        torch.manual_seed(0)
        kwargs = inputs()
        model = getattr(t, kind)(getattr(t, config)(**sizes)).train()
        return Case(model, (), kwargs, loss, num_blocks)

    return made


def _text(length: int = 32, num_labels: int = 32) -> dict[str, Tensor]:
    tokens = torch.randint(100, (2, length))
    return {"input_ids": tokens, "labels": tokens[:, :num_labels].contiguous()}


MODELS: dict[str, Callable[[], Case]] = {
    "sequential": _of(
        _sequential, lambda: torch.randn(64, 48), lambda y: y.square().sum(), 7
    ),
    "resnet": _of(
        ResNet, lambda: torch.randn(4, 3, 16, 16), lambda y: y.logsumexp(-1).sum(), 6
    ),
    "unet": _of(
        UNet, lambda: torch.randn(2, 3, 16, 16),
        lambda y: [y["image"].square().mean(), y["beside"]], 5,
    ),
    "shared": _of(Shared, lambda: torch.randn(64, 32), lambda y: y.square().mean(), 2),
    "gpt2": of_transformers(
        "GPT2Config", "GPT2LMHeadModel", _text, num_blocks=6,
        n_layer=6, n_embd=64, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0,
    ),
    "t5": of_transformers(
        "T5Config", "T5ForConditionalGeneration", lambda: _text(24, 16), num_blocks=6,
        num_layers=3, num_decoder_layers=3, d_model=64, d_ff=128, d_kv=16, num_heads=4,
        vocab_size=100, decoder_start_token_id=0,
    ),
}  # fmt: skip
