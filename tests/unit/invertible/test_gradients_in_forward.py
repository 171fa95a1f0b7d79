"""Gradients that are taken while forward runs, and what they leave for backward."""

from __future__ import annotations

import weakref
from contextlib import suppress

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import recoup
from recoup.invertible.residual import gradients_in_forward
from tests.alive import no_collector


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Sigmoid()).double()


def input_of():
    return torch.randn(4, 3, dtype=torch.float64, requires_grad=True)


def test_hooks_beneath_see_each_save_once_and_give_backward_what_they_kept():
    net, x, plain, packed, unpacked = network(), input_of(), [], [], []
    with saved_tensors_hooks(lambda t: (plain.append(t.shape), t)[1], lambda t: t):
        net(x.view_as(x)).sum()
    with saved_tensors_hooks(
        lambda t: (packed.append(t.shape), t)[1], lambda t: (unpacked.append(t.shape), t)[1]
    ):
        with gradients_in_forward():
            value = net(x.view_as(x)).sum()
            torch.autograd.grad(value, list(net.parameters()), retain_graph=True)
        assert packed == plain
        assert unpacked == []
    value.backward()
    assert sorted(unpacked) == sorted(packed)


def test_nothing_is_held_when_the_call_has_ended():
    net, x, seen = network(), input_of(), []

    def watched(x):
        h = net(x)
        seen.append(weakref.ref(h.untyped_storage()))
        return h

    def slopes(x):
        with gradients_in_forward():
            alias = x.view_as(x)
            gradient = torch.autograd.grad(watched(alias).sum(), alias, create_graph=True)[0]
            return gradient.square().sum()

    with no_collector():
        loss = recoup.checkpoint(slopes, x)
        assert [ref() for ref in seen] == [None]
        hooks = saved_tensors_hooks(lambda t: t.numel(), lambda n: None)
        with suppress(KeyError), hooks, gradients_in_forward():
            h = watched(x)
            kept = h.grad_fn  # a graph, which backward may still want
            raise KeyError
        del h
        assert kept is not None
        assert seen[-1]() is None
    loss.backward()
    assert x.grad is not None
