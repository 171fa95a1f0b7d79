"""Buffers that code assigns, in the first step or in a later one, count once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recoup


class Counting(nn.Module):
    """A layer that counts in a buffer, from one of its steps on."""

    def __init__(self, count, first_step=0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("late", None)
        self.num_steps, self.count, self.first_step = 0, count, first_step

    def forward(self, x):
        if self.training and self.num_steps >= self.first_step:
            self.count(self, x.detach().mean(0))
        return self.linear(x).sin()


def assign(module, mean):
    module.mean = 0.9 * module.mean + mean


def write(module, mean):
    module.mean.mul_(0.9).add_(mean)


def assign_first(module, mean):
    module.late = mean if module.late is None else 0.9 * module.late + mean


def register(module, mean):
    if "new" in module._buffers:
        module.new = 0.9 * module.new + mean
    else:
        module.register_buffer("new", mean)


def planned(model, x):
    recoup.plan(model, x, policy="full").apply()
    return model


def checkpointed(model, x):
    return lambda x: recoup.checkpoint(model[1], recoup.checkpoint(model[0], x))


@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize("count", [assign, write, assign_first, register])
@pytest.mark.parametrize("way", [planned, checkpointed])
def test_a_buffer_counts_once_in_each_step_however_it_is_assigned(way, count, first_step):
    torch.manual_seed(0)
    plain = nn.Sequential(*(Counting(count, first_step) for _ in range(2)))
    other, x = copy.deepcopy(plain), torch.randn(3, 4)
    run = way(other, x)
    for step, is_training in enumerate((True, False, True, True, True)):
        for model, call in ((plain, plain), (other, run)):
            model.train(is_training)
            for module in model:
                module.num_steps = step
            call(x).sum().backward()
        wanted, found = dict(plain.named_buffers()), dict(other.named_buffers())
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], each) for name, each in wanted.items())
    for wanted, found in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(found.grad, wanted.grad)
