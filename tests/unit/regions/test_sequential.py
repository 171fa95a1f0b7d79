from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import NotInvertibleError
from recoup.invertible import AdditiveCoupling
from recoup.schedules import sqrt
from tests.oracle import assert_same_step, hooks_in_force, run_step
from tests.zoo import chain_of, net


def test_an_ordered_dictionary_of_modules():
    modules, x = chain_of("dropout")
    named = OrderedDict((f"block{i}", module) for i, module in enumerate(modules))
    want = run_step(nn.Sequential(named), x)
    assert_same_step(run_step(recoup.Sequential(named, memory="sqrt"), x), want)


@pytest.mark.parametrize("memory", ["square", "2 stages", 0, -1, 1.5, None, True, ("sqrt",)])
def test_an_unknown_mode(memory):
    with pytest.raises(ValueError, match=r"`memory`|`slots`"):
        recoup.Sequential(nn.Tanh(), nn.Tanh(), memory=memory)
    model = recoup.Sequential(nn.Tanh(), nn.Tanh(), memory="sqrt")
    with pytest.raises(ValueError, match=r"`memory`|`slots`"):
        model.memory = memory
    assert model.memory == "sqrt"


def test_a_schedule_for_another_length():
    with pytest.raises(ValueError, match=r"for 3 stages, but the chain has 2"):
        recoup.Sequential(nn.Tanh(), nn.Tanh(), memory=sqrt(3))


def test_constant_names_the_stage_and_the_way_out():
    with pytest.raises(NotInvertibleError, match=r'module `1` \(Tanh\).*"sqrt".*otherwise='):
        recoup.Sequential(AdditiveCoupling(net(3, 3)), nn.Tanh(), memory="constant")
    with pytest.raises(ValueError, match=r"`otherwise` is 'drop'"):
        recoup.Sequential(nn.Tanh(), otherwise="drop")


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


def test_an_error_in_a_stage_is_the_users():
    model = recoup.Sequential(nn.Linear(3, 3), nn.Linear(4, 4), nn.Tanh(), memory="sqrt")
    with pytest.raises(RuntimeError, match=r"cannot be multiplied"):
        model(torch.zeros(2, 3))
    assert hooks_in_force() is None


class Recomputed(nn.Module):
    """Returns a value that is not kept."""

    def forward(self, x):
        return recoup.recompute(nn.functional.gelu)(x)


@pytest.mark.parametrize("memory", ["linear", "inputs", "sqrt", "log", 1, 3])
def test_stages_that_return_values(memory):
    """A state that the schedule keeps is kept: a stage could not be run while one is loaded."""
    linears = [nn.Linear(4, 4) for _ in range(3)]
    layers = [linears[0], Recomputed(), Recomputed(), linears[1], Recomputed(), linears[2]]
    x = torch.randn(2, 4, requires_grad=True)
    found = []
    for chain in (nn.Sequential(*layers), recoup.Sequential(*layers, memory=memory)):
        loss = chain(x).square().sum()
        found.append(torch.autograd.grad(loss, (x, *chain.parameters())))
    assert all(map(torch.equal, *found))


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
