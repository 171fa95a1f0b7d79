"""How often everything runs: what schedules promise, counted in calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.invertible import AdditiveCoupling, AffineCoupling, Chain, InvertibleModule
from recoup.schedules import Cost, constant, log, optimal, revolve, simulate, sqrt

# Slots and least number of forwards, the sweep included, of a uniform chain of so many stages:
# P + 1, with P = r L - C(c + r, c + 1) advances (Griewank and Walther 2000).
LEAST = {
    10: {1: 46, 2: 21, 3: 16, 4: 15, 5: 14, 9: 10},
    50: {1: 1226, 2: 286, 3: 181, 4: 145, 5: 123, 6: 115, 8: 96, 9: 90, 10: 89, 16: 83, 25: 74,
         49: 50},
    100: {1: 4951, 2: 846, 3: 491, 4: 375, 5: 317, 6: 281, 7: 256, 8: 246, 10: 223, 12: 196,
          13: 186, 14: 185, 20: 179, 32: 167, 50: 149, 99: 100},
    1000: {44: 1955},
}  # fmt: skip
ROWS = [(n, slots) for n, rows in LEAST.items() for slots in rows]


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


def calls(n, memory):
    """Calls of each of `n` stages in a step."""
    stages = [Counts() for _ in range(n)]
    x = torch.randn(2, requires_grad=True)
    recoup.Sequential(*stages, memory=memory)(x).sum().backward()
    want = torch.randn(2)
    assert x.grad.shape == want.shape
    return [stage.num_calls for stage in stages]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("n", "slots"), ROWS)
def test_binomial_is_the_optimum(n, slots):
    assert sum(calls(n, slots)) == LEAST[n][slots]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("n", "most"), [(1, 1), (2, 3), (9, 17), (100, 199), (1000, 1999)])
def test_sqrt_runs_each_stage_at_most_twice(n, most):
    counted = calls(n, "sqrt")
    assert sum(counted) <= most
    assert max(counted) <= 2
    assert counted[-1] == 1


@pytest.mark.parametrize(
    "schedule",
    [
        *(make(n) for make in (sqrt, log) for n in (1, 2, 3, 10, 57)),
        *(revolve(n, slots) for n in (1, 7, 40) for slots in (1, 3, 50)),
        constant(["keep", "recompute", "recompute", "keep", "recompute"]),
        optimal([Cost(1.0, 1, 1 + 3 * (i % 3)) for i in range(12)], 22),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.num_stages}",
)
def test_execution_is_what_was_simulated(schedule):
    assert tuple(calls(schedule.num_stages, schedule)) == simulate(schedule).forwards_per_stage


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
