"""Python calls of a step: what a region costs beyond its operators, counted rather than clocked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import recoup
from recoup.invertible import AdditiveCoupling, Chain

OURS = str(Path(recoup.__file__).parent)


def num_calls(step):
    for _ in range(3):
        step()
    found = 0

    def count(frame, event, argument):
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(OURS)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    return found


X = torch.randn(4, 8)


def block(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def stepping(run, x=X):
    return lambda: run(x).sum().backward()


def stored():
    parameters = [nn.Parameter(torch.randn(8)) for _ in range(100)]
    optimizer = torch.optim.SGD(parameters, lr=1e-6)

    def step():
        gradients = recoup.GradStore(parameters)
        gradients.backward(torch.stack([p.square().sum() for p in parameters]).sum())
        recoup.step(optimizer, gradients)

    return step


LEAF = torch.randn(4, 8, requires_grad=True)
CHAIN = Chain(*(AdditiveCoupling(block(4), block(4)) for _ in range(12)), memory="constant")
STEPS = [
    (stepping(lambda x: recoup.checkpoint(lambda x: x.sin().exp().cos(), x), LEAF), 60),
    (stepping(recoup.Sequential(*(block() for _ in range(10)), memory="sqrt")), 250),
    (stepping(lambda x: CHAIN(x)[0].square(), LEAF), 2450),
    (stepping(recoup.weight_noise(nn.Linear(8, 8))), 50),
    (stored(), 1045),
]


@pytest.mark.parametrize(("step", "bound"), STEPS)
def test_a_step_makes_at_most_so_many_calls(step, bound):
    assert num_calls(step) <= bound
