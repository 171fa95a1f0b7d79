from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import recoup
from tests.oracle import assert_same_step, run_step
from tests.zoo import chain_of


def test_an_ordered_dictionary_of_modules():
    modules, x = chain_of("dropout")
    named = OrderedDict((f"block{i}", module) for i, module in enumerate(modules))
    want = run_step(nn.Sequential(named), x)
    assert_same_step(run_step(recoup.Sequential(named, memory="sqrt"), x), want)


@pytest.mark.parametrize("memory", ["sqrt", "log", 2])
def test_a_chain_that_grows_and_shrinks(memory):
    modules, x = chain_of("dropout")
    model = recoup.Sequential(*modules[:3], memory=memory)
    model(x).sum().backward()
    model.extend(modules[3:])
    model.insert(0, nn.Tanh())
    want = run_step(nn.Sequential(nn.Tanh(), *modules), x)
    assert_same_step(run_step(model, x), want)
    del model[0]
    assert_same_step(run_step(model, x), run_step(nn.Sequential(*modules), x))


def test_what_a_chain_shows_and_hands_on():
    modules, x = chain_of("mlp")
    chain = recoup.Sequential(*modules, memory="sqrt")
    assert chain[1:4].memory == "sqrt"
    assert "memory='sqrt'" in repr(chain)
    assert recoup.Sequential(*modules, memory="constant", otherwise="keep")[:2].otherwise == "keep"
    assert recoup.Sequential(memory="sqrt")(x) is x


class Attends(nn.Module):
    """Attention of a query, a key and a value, which returns one tensor for all three."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, given):
        y = self.attention(*given)[0].tanh()
        return y, y, y


@pytest.mark.parametrize("memory", [1, "sqrt", "log", "inputs"])
def test_a_tensor_that_is_in_a_state_twice_is_one_tensor_again(memory):
    """An attention has another projection for a query that is its key."""
    blocks, x = [Attends() for _ in range(5)], torch.randn(2, 3, 8, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(model((x, x, x))[0].sin().sum(), x)
        for model in (recoup.Sequential(*blocks, memory=memory), nn.Sequential(*blocks))
    )
    assert torch.equal(found[0], wanted[0])
