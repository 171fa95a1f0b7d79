"""Gradients that code takes by itself within a region, where a zoo does not reach (F9)."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import recoup
from recoup._core.storage_tracking import StorageTracker
from tests.oracle import assert_same_tensor
from tests.zoo import Energy, leaf


class Coupling(recoup.invertible.InvertibleModule):
    """Adds a force to one half."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def force(self, a):
        with torch.enable_grad():
            z = a.detach().requires_grad_()
            return torch.autograd.grad(self.energy(z).sum(), z, create_graph=True)[0]

    def forward(self, x):
        a, b = x.chunk(2, 1)
        return torch.cat((b + self.force(a), a), 1), x.new_zeros(len(x))

    def inverse(self, y):
        b, a = y.chunk(2, 1)
        return torch.cat((a, b - self.force(a)), 1), y.new_zeros(len(y))


def test_in_constant_memory():
    chain, x, found = recoup.invertible.Chain(*[Coupling() for _ in range(4)]), leaf(5, 6), []
    for chain.memory in ("constant", "linear"):
        loss = chain(x)[0].sin().sum()
        found.append(torch.autograd.grad(loss, [x, *chain.parameters()], allow_unused=True))
    for got, want in zip(*found, strict=True):
        assert_same_tensor("a gradient", got, want, 1e-9)


def test_code_that_takes_its_first_gradient_late():
    net, x, late = Energy().double(), leaf(5, 6), [False]

    def fn(x):
        if not late[0]:
            return net(x)
        z = x.detach().requires_grad_()
        return x * torch.autograd.grad(net(z).sum(), z, create_graph=True)[0]

    def gradients(call):
        torch.manual_seed(1)
        return torch.autograd.grad(call().sin().sum(), [x, *net.parameters()], allow_unused=True)

    for late[0] in (False, True):
        pair = gradients(lambda: recoup.checkpoint(fn, x)), gradients(lambda: fn(x))
        for got, want in zip(*pair, strict=True):
            assert_same_tensor("a gradient", got, want)


@pytest.mark.slow
def test_no_residual_is_held_after_the_first_run():
    x = leaf(64, 64)

    def silent(x):
        for _ in range(8):
            x = x.sin()
        return x

    def asking(x):
        z = x.detach().requires_grad_()
        return x.sin() * torch.autograd.grad(silent(z).sum(), z)[0]

    for fn in (silent, silent, asking, asking):
        gc.collect()
        with StorageTracker() as tracker:
            y = recoup.checkpoint(fn, x)
            held = tracker.current_bytes
        y.sum().backward()
        assert held // x.nbytes == 1
        assert fn is asking or tracker.peak_bytes // x.nbytes < 8
