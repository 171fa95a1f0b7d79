"""Plans of a stage of a pipeline: each microbatch has a backward, the first one first."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from tests.neighbours.planned import Net, loss_of

NUM_MICROBATCHES = 5


def stage():
    torch.manual_seed(0)
    model = Net(32, 4)
    model.stem = nn.Linear(32, 32)
    return model, torch.randn(256, 32)


def one_forward_one_backward(model, x, pending):
    """A step as a stage runs it under 1F1B."""
    waiting = deque()
    for _ in range(NUM_MICROBATCHES):
        waiting.append(model(x))
        if len(waiting) > pending:
            loss_of(waiting.popleft()).backward()
    while waiting:
        loss_of(waiting.popleft()).backward()


def gradients(model, x, pending):
    model.zero_grad()
    torch.manual_seed(1)
    one_forward_one_backward(model, x, pending)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("pending", [0, 2])
def test_a_step_of_a_stage_keeps_to_its_budget(pending):
    model, x = stage()
    frontier, wanted = recoup.plan(model, x, loss=loss_of), gradients(model, x, pending)
    with pytest.raises(BudgetError) as error:
        frontier.plan("1 KiB", pending=pending)
    least, most = error.value.least_bytes, frontier.plan("1 GiB", pending=pending).most_bytes
    for budget in (least, (least + most) // 2):
        with frontier.plan(budget, pending=pending).applied() as plan:
            found = gradients(model, x, pending)
            model.zero_grad()
            peak = recoup.measure(
                lambda: one_forward_one_backward(model, x, pending), device="cpu", repeats=0
            ).peak_bytes
        assert peak <= budget
        assert all(map(torch.equal, found, wanted))
        assert {row.way for row in plan.blocks} != {"keep"}


def test_what_waits_holds_little():
    """A plan for a step alone keeps what costs nothing there, and several times here."""
    model, x = stage()
    frontier = recoup.plan(model, x, loss=loss_of)
    alone, beside = (frontier.plan("1 GiB", pending=each).least_bytes for each in (None, 3))
    kept = sum(row.keeps_bytes for row in frontier.plan(alone).blocks)
    assert sum(row.keeps_bytes for row in frontier.plan(beside, pending=3).blocks) < kept


def test_one_forward_more_is_refused_before_it_takes_memory():
    model, x = stage()
    frontier = recoup.plan(model, x, loss=loss_of)
    budget = frontier.plan("1 GiB", pending=1).least_bytes
    with frontier.plan(budget, pending=1).applied():
        waiting = [model(x), model(x)]
        with pytest.raises(BudgetError, match="for the third time before a backward"):
            model(x)
        loss_of(waiting.pop()).backward()
        waiting.append(model(x))


@pytest.mark.parametrize("pending", [-1, 1.5, True, "1"])
def test_it_is_a_number_of_forwards(pending):
    model, x = stage()
    with pytest.raises(ValueError, match=f"`pending` is {pending!r}, but must be a number"):
        recoup.plan(model, x, loss=loss_of).plan("1 GiB", pending=pending)
