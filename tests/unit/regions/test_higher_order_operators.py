"""Operators that torch compiles (`torch.cond`): an error that names them and the way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import RecoupError

DIM = 8


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        y = self.first(x)
        return self.last(torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,)))


class ChoiceOfParameters(Choice):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.first(x), lambda x: self.last(x), (x,))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_condition_in_a_region_or_in_a_planned_model_names_itself():
    """N10"""
    x, says = torch.randn(4, DIM).requires_grad_(), r"torch\.cond.*torch\.utils\.checkpoint"
    with pytest.raises(RecoupError, match=says):
        recoup.checkpoint(ChoiceOfParameters(), x)
    with pytest.raises(RecoupError, match=says):
        recoup.plan(nn.Sequential(*(Choice() for _ in range(3))), x.detach(), policy="full")
