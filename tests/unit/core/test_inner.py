from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import recoup
from recoup.invertible.gradients_in_forward import gradients_in_forward


def slopes(network, x):
    """The sum of the squares of a network's derivative, taken while forward runs."""
    with gradients_in_forward():
        alias = x.view_as(x)
        gradient = torch.autograd.grad(network(alias).sum(), alias, create_graph=True)[0]
        return gradient.square().sum()


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Sigmoid()).double()


@pytest.fixture
def x():
    return torch.randn(4, 3, dtype=torch.float64, requires_grad=True)


def test_hooks_beneath_see_each_save_once_and_give_backward_what_they_kept(network, x):
    plain, packed, unpacked = [], [], []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (plain.append(t.shape), t)[1], lambda t: t
    ):
        alias = x.view_as(x)
        value = network(alias).sum()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (packed.append(t.shape), t)[1], lambda t: (unpacked.append(t.shape), t)[1]
    ):
        with gradients_in_forward():
            value = network(x.view_as(x)).sum()
            torch.autograd.grad(value, list(network.parameters()), retain_graph=True)
        assert packed == plain
        assert unpacked == []
    value.backward()
    assert sorted(unpacked) == sorted(packed)


def test_nothing_is_held_when_the_call_has_ended(network, x):
    seen = []

    def watched(x):
        h = network(x)
        seen.append(weakref.ref(h.untyped_storage()))
        return h

    gc.disable()
    try:
        loss = recoup.checkpoint(lambda x: slopes(watched, x), x)
        assert [ref() for ref in seen] == [None]
        try:
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.numel(), lambda n: None)
            with hooks, gradients_in_forward():
                h = watched(x)
                kept = h.grad_fn  # a graph, which backward may still want
                raise KeyError
        except KeyError:
            del h
        assert kept is not None
        assert seen[-1]() is None
    finally:
        gc.enable()
    loss.backward()
    assert x.grad is not None
