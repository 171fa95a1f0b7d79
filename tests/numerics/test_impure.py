"""Impure code in a region: the gradients of the plain run, or an error before backward returns."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import RecoupError
from tests.impure import OTHERS, draw_cases, same, verdict
from tests.zoo import Fn

# Whose sources are the same in each read while nothing changes them.
STEADY = [c for c in draw_cases(4, seed=8) if OTHERS.get(c.source[0], (None, 1))[1] is not None]


@pytest.mark.filterwarnings("ignore:The (plan for|first step of) a Sequential")
@pytest.mark.sampled(50)
@pytest.mark.parametrize("case", draw_cases(8), ids=str)
def test_right_or_refused(case):
    assert verdict(case)[0] != "silently wrong"


@pytest.mark.filterwarnings("ignore:The first step of a Sequential")  # its branch is not planned
@pytest.mark.sampled(20)
@pytest.mark.parametrize("case", STEADY, ids=str)
def test_right_where_nothing_changes(case):
    found, error = verdict(case, changes=False)
    assert found == "right", error


def test_the_cases_would_be_wrong_without_a_check():
    found = [verdict(case._replace(way="torch"))[0] for case in draw_cases(1)[::2]]
    assert found.count("silently wrong") > 0.75 * len(found)


@pytest.mark.parametrize("what", ["max_norm", "share_memory"])
def test_changes_of_a_parameter_that_are_none(what):
    def step(call):
        torch.manual_seed(2)
        model = nn.Embedding(9, 9, max_norm=0.5) if what == "max_norm" else nn.Linear(9, 9)
        y = call(lambda t: model(t.argsort() if what == "max_norm" else t).sin(), torch.randn(9))
        if what == "share_memory":
            model.share_memory()
        return torch.autograd.grad(y.sum(), list(model.parameters()))

    assert same(step(recoup.checkpoint), step(lambda fn, x: fn(x)))


@pytest.mark.parametrize("memory", ["inputs", "sqrt", "log", 1, 3])
@pytest.mark.parametrize("place", [0, 3, 12, 15])
def test_a_state_that_is_made_again_is_compared(memory, place):
    """The only residual of a linear layer is its input."""
    torch.manual_seed(0)
    blocks, numbers, used = [nn.Linear(5, 5) for _ in range(16)], itertools.count(1), []
    blocks[place] = Fn(lambda x: (used.append(next(numbers)), x * used[-1])[1])
    model, x = recoup.Sequential(*blocks, memory=memory), torch.randn(3, 5)
    parameters = list(model.parameters())
    try:
        found = torch.autograd.grad(model(x).sum(), parameters)
    except RecoupError:
        return
    numbers = iter(used[:1])
    assert same(found, torch.autograd.grad(nn.Sequential(*blocks)(x).sum(), parameters))
