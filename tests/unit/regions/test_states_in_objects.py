"""Tensors in objects among the arguments: replaced once, and never changed twice."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import ReplayError
from tests.plan_oracle import Made

DIM = 8


class State:
    def __init__(self):
        self.seen, self.caches = torch.zeros(()), [torch.zeros(DIM), {"last": torch.zeros(DIM)}]


def count_in_place(state, y):
    state.seen.add_(len(y))


def fill_in_place(state, y):
    state.caches[1]["last"].copy_(y[-1].detach())


def replace(state, y):
    state.seen = state.seen + len(y)


class Block(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.up, self.down, self.write = nn.Linear(DIM, 32), nn.Linear(32, DIM), write

    def forward(self, x, state):
        y = x + self.down(torch.tanh(self.up(x)))
        self.write(state, y)
        return y


def test_a_forward_without_a_backward_is_freed_with_the_object_that_it_wrote_to():
    linear, states = nn.Linear(DIM, DIM), []

    def run(x, state):
        states.append(weakref.ref(state))
        state.seen = linear(x).tanh()
        return state.seen.cos()

    recoup.checkpoint(run, torch.randn(4, DIM), State())
    gc.collect()
    assert states[0]() is None


def test_a_tensor_in_an_object_is_replaced_once_and_a_change_in_place_is_an_error():
    """R2: as that of a tensor that is an argument itself; also in a list or dict of the object."""
    x, state = torch.randn(4, DIM), State()
    for write in (count_in_place, fill_in_place):
        with pytest.raises(ReplayError, match=r"Block.*in an object among its arguments"):
            recoup.checkpoint(Block(write), x, State())
    recoup.checkpoint(Block(replace), x, state).sum().backward()
    assert state.seen == 4


def test_a_plan_keeps_such_blocks_and_says_so():
    """R2: they run once, so each counts once."""
    blocks = [Block(count_in_place) for _ in range(4)]
    net = Made(lambda net, x, state: [x := b(x, state) for b in net.blocks][-1], blocks=blocks)
    x, state = torch.randn(4, DIM), State()
    words = r"keeps everything.*`blocks\.0` changes a tensor in place"
    with pytest.warns(UserWarning, match=words):
        plan = recoup.plan(net, x, State(), policy="full")
    with plan.applied():
        net(x, state).sum().backward()
    assert state.seen == 16
