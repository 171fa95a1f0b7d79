"""Models that a plan must know how to deal with: each with arguments and a loss."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.plan_oracle import Made

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
    def __init__(self, num, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num, num, 3, stride, 1, bias=False), nn.BatchNorm2d(num), nn.ReLU(True),
            nn.Conv2d(num, num, 3, 1, 1, bias=False), nn.BatchNorm2d(num),
        )  # fmt: skip
        self.skip = nn.Conv2d(num, num, 1, stride) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.skip(x))


def _resnet():
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(True))
    layers = {f"layer{n}": nn.Sequential(Bottleneck(16, n), Bottleneck(16)) for n in (1, 2)}
    layers["layer3"] = nn.Sequential(Bottleneck(16, 2), Bottleneck(16))
    return Made(
        lambda m, x: m.head(m.layer3(m.layer2(m.layer1(m.stem(x)))).mean((2, 3))),
        stem=stem, head=nn.Linear(16, 10), **layers,
    )  # fmt: skip


class DoubleConv(nn.Sequential):
    def __init__(self, given, made):
        first, second = nn.Conv2d(given, made, 3, 1, 1), nn.Conv2d(made, made, 3, 1, 1)
        super().__init__(first, nn.GroupNorm(4, made), nn.SiLU(), second, nn.SiLU())

    def forward(self, x, *, scale=1.0):
        y = super().forward(x)
        return {"y": y * scale, "nothing": None, "mean": [y.mean()]}


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


def _shared():
    """Two blocks called three times each (as ALBERT does), with a frozen one before."""

    def forward(model, x):
        x = model.frozen(x)
        for block in [*model.blocks] * 3:
            x = x + block(x)
        return x

    experts = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    return Made(forward, frozen=experts[0].requires_grad_(False), blocks=experts[1:])


def _sequential():
    return nn.Sequential(*(
        nn.Sequential(nn.Linear(given, made), nn.Tanh(), nn.Linear(made, made), nn.GELU())
        for given, made in pairwise([48, 64, 16, 80, 32, 48, 48, 48])
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


def _text(length=32, num_labels=32):
    tokens = torch.randint(100, (2, length))
    return {"input_ids": tokens, "labels": tokens[:, :num_labels].contiguous()}


MODELS: dict[str, Callable[[], Case]] = {
    "sequential": _of(
        _sequential, lambda: torch.randn(64, 48), lambda y: y.square().sum(), 7
    ),
    "resnet": _of(
        _resnet, lambda: torch.randn(4, 3, 16, 16), lambda y: y.logsumexp(-1).sum(), 6
    ),
    "unet": _of(
        UNet, lambda: torch.randn(2, 3, 16, 16),
        lambda y: [y["image"].square().mean(), y["beside"]], 5,
    ),
    "shared": _of(_shared, lambda: torch.randn(64, 32), lambda y: y.square().mean(), 2),
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
