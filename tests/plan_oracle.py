"""A planned step beside the plain one: small models, a step, and what holds of it under a plan."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

import recoup
from tests.alive import allocated_bytes
from tests.neighbours.planned import result_of
from tests.oracle import assert_same_tensors


class Residual(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Made(nn.Module):
    """A model of named parts, whose forward is a function of the model and its input."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.of_parts = forward
        for name, part in parts.items():
            setattr(self, name, nn.ModuleList(part) if isinstance(part, list) else part)

    def forward(self, *args, **kwargs):
        return self.of_parts(self, *args, **kwargs)


def in_a_row(modules, x):
    for module in modules:
        x = module(x)
    return x


def stack(num_blocks=6, kind=Residual):
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(num_blocks)))


def dense(num_blocks=6, width=64):
    return stack(num_blocks, lambda: nn.Sequential(nn.Linear(width, width), nn.GELU()))


def square(y):
    return y.square().mean()


def step_of(model, *args, loss=square, **kwargs):
    """A step that holds the output of the model while backward runs, as a loop does."""

    def step():
        output = model(*args, **kwargs)
        loss(output).backward()

    return step


def measured_bytes(step):
    return recoup.measure(step, device="cpu", repeats=0).peak_bytes


def allocated(model, step):
    """The most bytes of a step that begins without gradients, by the allocator's own events."""
    return peak_of(model, step, lambda step: allocated_bytes(step)[0])


def peak_of(model, step, peak=measured_bytes):
    """The most bytes of a step that begins without gradients; buffers are put back."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.zero_grad()
    found = peak(step)
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return found


def assert_as_plain(plan, step, wanted=None, rtol=0.0, peak=peak_of):
    """Check that a planned step leaves what the plain one does, in its budget; return its peak."""
    model = plan.model
    if wanted is None:
        wanted = result_of(model, step)
    with nullcontext() if plan.is_applied else plan.applied():
        found = result_of(model, step)
        peak_bytes = peak(model, step)
    assert_same_tensors(found, wanted, rtol)
    assert peak_bytes <= plan.budget_bytes
    return peak_bytes


def between(frontier, share):
    """The budget at a share of the way from the least bytes to those of the plain step."""
    most = frontier.points[-1].peak_bytes
    return int(frontier.least_bytes + share * (most - frontier.least_bytes))


def names_of(plan):
    return [row.name for row in plan.blocks]


def ways_of(plan):
    return {row.way for row in plan.blocks}
