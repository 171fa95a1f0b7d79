"""What is replaced, or is in another mode, before backward: a second run has what was there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

import recoup
from tests.oracle import assert_same_tensor

pytestmark = pytest.mark.filterwarnings("ignore:The first step of a Model under its plan took")


class Counting(nn.Module):
    """Scales by a mean that it updates in training, where it draws, too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0) + torch.rand(6), 0.1)
        return x * self.mean


def block():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Counting(), nn.Dropout(0.5), nn.Tanh())


class Model(nn.Module):
    """Blocks that run in some way."""

    def __init__(self, way):
        super().__init__()
        self.way, blocks = way, [block() for _ in range(4)]
        is_chain = way in ("sqrt", "log")
        self.blocks = recoup.Sequential(*blocks, memory=way) if is_chain else nn.ModuleList(blocks)

    def forward(self, x):
        if isinstance(self.blocks, recoup.Sequential):
            return self.blocks(x)
        for each in self.blocks:
            x = recoup.checkpoint(each, x) if self.way == "checkpoint" else each(x)
        return x


def replace(model, kind):
    for module in model.modules():
        for name, value in [*getattr(module, kind).items()]:
            setattr(module, name, type(value)(2 * value.detach()) if value is not None else None)


CHANGES = {
    "evaluation": lambda model: model.eval(),
    "training": lambda model: model.train(),
    "buffers": partial(replace, kind="_buffers"),
    "parameters": partial(replace, kind="_parameters"),
    "functional_call": None,
}


def left_by_a_step(way, what):
    torch.manual_seed(0)
    model, x = Model(way).double(), torch.randn(8, 6, dtype=torch.double, requires_grad=True)
    model.train(what != "training")
    if way == "plan":
        recoup.plan(model, x, budget=recoup.plan(model, x).least_bytes).apply()
    first = [*model.named_parameters(), *model.named_buffers()]
    found = {name: 1.5 * value.detach() for name, value in first if value.is_floating_point()}
    for name, _ in model.named_parameters():
        found[name].requires_grad_()
    torch.manual_seed(1)
    if CHANGES[what] is None:
        y = functional_call(model, found, (x,))
    else:
        y = model(x)
        CHANGES[what](model)
    y.square().sum().backward()
    last = [*model.named_parameters(), *model.named_buffers()]
    tensors = [x, *(value for _, value in (*first, *last)), *found.values()]
    return [torch.get_rng_state(), *tensors, *(each.grad for each in tensors)]


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("way", ["checkpoint", "sqrt", "log", "plan"])
def test_a_second_run_has_what_the_first_had(way, what):
    wanted, got = (left_by_a_step(each, what) for each in ("plain", way))
    for place, (expected, found) in enumerate(zip(wanted, got, strict=True)):
        assert_same_tensor(str(place), found, expected)


class Registering(nn.Module):
    """Registers its first buffer in a later step, and counts in it from then on."""

    def __init__(self, first):
        super().__init__()
        self.layer, self.first, self.step = nn.Linear(6, 6), first, 0

    def forward(self, x):
        mean = x.detach().mean(0)
        if "mean" in self._buffers:
            self.mean = 0.9 * self.mean + mean
        elif self.step >= self.first:
            self.register_buffer("mean", mean)
        return self.layer(x).sin()


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(
    "call", [recoup.checkpoint, lambda model, x: recoup.Sequential(model, memory="sqrt")(x)]
)
def test_a_buffer_that_is_registered_late_counts_once(call, first):
    plain, ours = Registering(first), Registering(first)
    x = torch.randn(3, 6)
    for step in range(4):
        plain.step = ours.step = step
        plain(x).sum().backward()
        call(ours, x).sum().backward()
        assert step < first or torch.equal(ours.mean, plain.mean)
