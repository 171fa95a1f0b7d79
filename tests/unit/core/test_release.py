"""What a chain keeps for second runs goes as backward passes its stages."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import recoup
from recoup.schedules import constant

STATE_BYTES = torch.get_rng_state().nbytes


def block():
    """One that draws."""
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5))


def num_states():
    """The random states that are alive."""
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum(each.dtype is torch.uint8 and each.nbytes == STATE_BYTES for each in found)


def test_random_states_are_freed_as_backward_goes_on():
    blocks = [block() for _ in range(8)]
    chain = recoup.Sequential(*blocks, memory=constant(["recompute"] * 7 + ["keep"]))
    gc.collect()
    around = num_states()  # of other tests
    output, seen = chain(torch.randn(2, 8)), []
    assert num_states() - around == 7  # the last stage keeps its residuals
    for each in blocks:
        each[0].weight.register_hook(lambda _: seen.append(num_states() - around))
    output.sum().backward()
    assert seen == [7, 7, 6, 5, 4, 3, 2, 0]


AGAIN = constant(["recompute"] * 5 + ["keep"])


@pytest.mark.parametrize("memory", ["sqrt", "log", AGAIN])
def test_a_value_between_stages_outlives_the_output(memory):
    """The stages above run no more, or for nothing, and the global stream goes on as it was."""

    def gradients(chain):
        torch.manual_seed(1)
        x, seen = torch.randn(2, 8, requires_grad=True), []
        handle = blocks[2].register_forward_hook(lambda *given: seen.append(given[2]))
        output = chain(x)
        handle.remove()
        first = torch.autograd.grad(output.sum(), [x, *chain.parameters()], retain_graph=True)
        del output
        second = torch.autograd.grad(seen[0].sum(), [x, *blocks[0].parameters()])
        return [*first, *second, torch.rand(1)]

    blocks = [block() for _ in range(6)]
    expected = gradients(nn.Sequential(*blocks))
    found = gradients(recoup.Sequential(*blocks, memory=memory))
    assert all(map(torch.equal, found, expected))
