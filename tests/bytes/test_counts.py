"""How often everything runs: what schedules promise, counted in calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.invertible import AdditiveCoupling, AffineCoupling, Chain, InvertibleModule
from recoup.schedules import Cost, binomial, constant, log, optimal, revolve, simulate, sqrt


class Counted(nn.Module):
    """Counts in a list: a number would be put back as it was."""

    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    def num_calls(self):
        return len(self.calls)


class Counts(Counted):
    """A stage that counts its calls."""

    def forward(self, x):
        self.calls.append("forward")
        return torch.tanh(x)


@pytest.mark.parametrize(
    "schedule",
    [
        *(make(n) for make in (sqrt, log) for n in (1, 2, 3, 10, 100)),
        *(make(n, slots) for make in (binomial, revolve) for n, slots in ((1, 1), (7, 3), (40, 5))),
        constant(["keep", "recompute", "recompute", "keep", "recompute"]),
        optimal([Cost(1.0, 1, 1 + 3 * (i % 3)) for i in range(12)], 22),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.num_stages}",
)
def test_execution_is_what_was_simulated(schedule):
    stages = [Counts() for _ in range(schedule.num_stages)]
    recoup.Sequential(*stages, memory=schedule)(torch.randn(2, requires_grad=True)).sum().backward()
    counted = tuple(stage.num_calls for stage in stages)
    assert counted == simulate(schedule).forwards_per_stage


class CountingNet(Counted):
    def __init__(self, outputs=3):
        super().__init__()
        self.linear = nn.Linear(3, outputs)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        self.calls.append("forward")
        return self.dropout(self.linear(x).tanh())


def nets_of(model):
    return [module for module in model.modules() if isinstance(module, CountingNet)]


@pytest.mark.parametrize("loss", ["all", "y", "log_det"])
def test_every_network_runs_once_forward_and_once_in_backward(loss):
    modules = []
    for _ in range(4):
        modules.append(AdditiveCoupling(CountingNet(), CountingNet()))
        modules.append(AffineCoupling(CountingNet(6)))
    model = Chain(*modules, memory="constant")
    y, log_det = model(torch.randn(4, 6, requires_grad=True))
    assert [net.num_calls for net in nets_of(model)] == [1] * 12
    value = {"all": y.sum() + log_det.sum(), "y": y.sin().sum(), "log_det": log_det.sum()}[loss]
    value.backward()
    assert [net.num_calls for net in nets_of(model)] == [2] * 12


class CountingFlip(InvertibleModule):
    def __init__(self):
        super().__init__()
        self.inverses = []

    def forward(self, x):
        return x.flip(1).sin().asin(), x.new_zeros(len(x))

    def inverse(self, y):
        self.inverses.append("inverse")
        return y.flip(1), y.new_zeros(len(y))


def test_inverses_are_what_was_simulated():
    ways = ["invert", "keep", "invert", "invert", "recompute", "invert"]
    modules = [CountingFlip() for _ in ways]
    model = Chain(*modules, memory=constant(ways))
    model(torch.rand(2, 4, requires_grad=True))[0].sum().backward()
    inverses = [len(module.inverses) for module in modules]
    assert inverses == [int(way == "invert") for way in ways]
    assert sum(inverses) == simulate(constant(ways)).num_inverses
