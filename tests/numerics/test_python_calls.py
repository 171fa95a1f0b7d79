"""Python calls of a step: what a region costs beyond its operators, counted rather than clocked."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import recoup
from recoup.invertible import AdditiveCoupling, Chain
from tests.oracle import tensors

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


def small(width):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def couplings():
    return [AdditiveCoupling(small(4), small(4)) for _ in range(12)]


MODELS = {  # and the most calls of a step
    "checkpoint": (lambda: partial(recoup.checkpoint, lambda x: x.sin().exp().cos()), 60),
    "sqrt": (lambda: recoup.Sequential(*(small(8) for _ in range(10)), memory="sqrt"), 253),
    "constant": (lambda: Chain(*couplings(), memory="constant"), 2450),
    "noise": (lambda: recoup.weight_noise(nn.Linear(8, 8)), 60),
    "noise and dropout": (lambda: recoup.weight_dropout(recoup.weight_noise(nn.Linear(8, 8))), 130),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_step_makes_at_most_so_many_calls(name):
    build, most = MODELS[name]
    model, x = build(), torch.randn(4, 8, requires_grad=True)
    assert num_calls(lambda: tensors(model(x))[0].square().sum().backward()) <= most


def test_sums_of_gradients_make_few_calls_a_parameter():
    parameters = [nn.Parameter(torch.randn(8)) for _ in range(100)]
    optimizer = torch.optim.SGD(parameters, lr=1e-6)

    def step():
        gradients = recoup.GradStore(parameters)
        gradients.backward(torch.stack([p.square().sum() for p in parameters]).sum())
        recoup.step(optimizer, gradients)

    assert num_calls(step) <= 1045
