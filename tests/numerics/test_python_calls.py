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
    """The number of Python calls of our own in one step, after others have prepared it."""
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


def checkpointed():
    x = torch.randn(4, 4, requires_grad=True)
    return lambda: recoup.checkpoint(lambda x: x.sin().exp().cos(), x).sum().backward()


def square_root():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(10)]
    model, x = recoup.Sequential(*blocks, memory="sqrt"), torch.randn(4, 8)
    return lambda: model(x).sum().backward()


def constant():
    def network():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    couplings = [AdditiveCoupling(network(), network()) for _ in range(12)]
    chain, x = Chain(*couplings, memory="constant"), torch.randn(4, 8, requires_grad=True)
    return lambda: chain(x)[0].square().sum().backward()


def noisy():
    layer, x = recoup.weight_noise(nn.Linear(64, 64)), torch.randn(4, 64)
    return lambda: layer(x).sum().backward()


def stored():
    parameters = [nn.Parameter(torch.randn(8)) for _ in range(100)]
    optimizer = torch.optim.SGD(parameters, lr=1e-6)

    def step():
        gradients = recoup.GradStore(parameters)
        gradients.backward(torch.stack([p.square().sum() for p in parameters]).sum())
        recoup.step(optimizer, gradients)

    return step


@pytest.mark.parametrize(
    ("build", "bound"),
    [
        (checkpointed, 60),
        (square_root, 250),
        (constant, 2450),
        (noisy, 50),
        (stored, 1045),
    ],
)
def test_a_step_makes_at_most_so_many_calls(build, bound):
    assert num_calls(build()) <= bound
