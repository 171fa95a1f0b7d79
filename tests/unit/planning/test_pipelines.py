"""Plans of a stage of a pipeline: each microbatch has a backward, the first one first."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from tests.neighbours.planned import Net, loss_of
from tests.plan_oracle import assert_as_plain, ways_of

NUM_MICROBATCHES = 5


@pytest.fixture
def stage():
    torch.manual_seed(0)
    model, x = Net(32, 4), torch.randn(256, 32)
    model.stem = nn.Linear(32, 32)
    return model, x, recoup.plan(model, x, loss=loss_of)


@pytest.mark.parametrize("pending", [0, 2])
def test_a_step_of_a_stage_keeps_to_its_budget(stage, pending):
    model, x, frontier = stage

    def one_forward_one_backward():
        waiting = deque()
        for _ in range(NUM_MICROBATCHES):
            waiting.append(model(x))
            if len(waiting) > pending:
                loss_of(waiting.popleft()).backward()
        while waiting:
            loss_of(waiting.popleft()).backward()

    with pytest.raises(BudgetError) as error:
        frontier.plan("1 KiB", pending=pending)
    least, most = error.value.least_bytes, frontier.plan("1 GiB", pending=pending).most_bytes
    for budget in (least, (least + most) // 2):
        plan = frontier.plan(budget, pending=pending)
        assert_as_plain(plan, one_forward_one_backward)
        assert ways_of(plan) != {"keep"}


def test_what_waits_holds_little(stage):
    """A plan for a step alone keeps what costs nothing there, and several times here."""
    _, _, frontier = stage
    kept = []
    for pending in (None, 3):
        least = frontier.plan("1 GiB", pending=pending).least_bytes
        plan = frontier.plan(least, pending=pending)
        kept.append(sum(row.keeps_bytes for row in plan.blocks))
    assert kept[1] < kept[0]


def test_one_forward_more_is_refused_before_it_takes_memory(stage):
    model, x, frontier = stage
    budget = frontier.plan("1 GiB", pending=1).least_bytes
    with frontier.plan(budget, pending=1).applied():
        waiting = [model(x), model(x)]
        with pytest.raises(BudgetError, match="for the third time before a backward"):
            model(x)
        loss_of(waiting.pop()).backward()
        waiting.append(model(x))
