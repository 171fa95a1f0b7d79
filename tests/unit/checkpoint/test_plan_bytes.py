"""The bytes that a plan promises: by the allocator, feasible, and for which batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from tests.alive import allocated_bytes


def square(y):
    return y.square().mean()


def step_bytes(model, x) -> int:
    """The peak of a step with empty gradients, by the allocator."""
    model.zero_grad()

    def step() -> None:
        y = model(x)
        square(y).backward()

    peak, _ = allocated_bytes(step)
    model.zero_grad()
    return peak


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.out = nn.Linear(32, 32)

    def forward(self, x):
        return x + self.out(self.lstm(x)[0])


class Depthwise(nn.Module):
    """The block of a ConvNeXt."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = self.conv(x).permute(0, 2, 3, 1)
        return x + self.down(nn.functional.gelu(self.up(y))).permute(0, 3, 1, 2)


def dropouts():
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(20)]
    return nn.Sequential(*layers), torch.randn(8, 16)


def lstms():
    return nn.Sequential(*[Recurrent() for _ in range(4)]), torch.randn(8, 16, 32)


def depthwise():
    return nn.Sequential(*[Depthwise() for _ in range(4)]), torch.randn(4, 16, 16, 16)


@pytest.mark.parametrize("build", [lstms, depthwise, dropouts])
def test_a_planned_peak_is_within_the_budget_by_the_allocator(build):
    """F6: temporaries within kernels and random states are in the bytes of a plan."""
    torch.manual_seed(0)
    model, x = build()
    whole = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert whole.most_bytes == pytest.approx(step_bytes(model, x), rel=0.05)
    for part in (0.0, 0.5):
        budget = int(whole.least_bytes + part * (whole.most_bytes - whole.least_bytes))
        plan = recoup.plan(model, x, budget=budget, loss=square)
        with plan.applied():
            peak = step_bytes(model, x)
        assert peak <= budget
        assert plan.rehearsed_peak_bytes == peak
