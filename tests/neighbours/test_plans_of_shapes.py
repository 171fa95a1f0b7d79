"""Plans for shapes that come later (`replan=True`), under real steps."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

import recoup
from recoup.errors import BudgetError, RecoupError
from recoup.planning import frontier as frontiers
from tests.alive import allocated_bytes
from tests.neighbours.planned import Net, assert_same, loss_of, result_of
from tests.plan_oracle import between


def small_net():
    torch.manual_seed(0)
    return Net(16, 3)


def planned_net(share=0.2, loss=loss_of, *, is_frozen=False):
    model, x = small_net(), torch.randn(128, 16)
    budget = between(recoup.plan(model, x, loss=loss), share)
    model.blocks[1:].requires_grad_(not is_frozen)
    return model, recoup.plan(model, x, budget=budget, loss=loss, replan=True).apply()


def step_of(model, x):
    return lambda: loss_of(model(x)).backward()


def assert_as_small(model, x):
    plain = small_net()
    found, wanted = (result_of(each, step_of(each, x)) for each in (model, plain))
    assert_same(found, wanted)


def has_grown(plan):
    return len(plan.family) > 1 or plan.family[0] is not plan


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_larger_batch_or_what_is_thawed_is_planned_once_and_is_right(is_frozen):
    model, plan = planned_net(is_frozen=is_frozen)
    x = torch.randn(128 if is_frozen else 150, 16)
    model.requires_grad_(True)
    assert_as_small(model, x)  # the step that plans
    assert has_grown(plan)
    assert f"{len(x)} x 16" in str(plan)
    family = plan.family
    assert_as_small(model, x)
    assert plan.family == family  # nothing was planned
    peak = result_of(model, lambda: [allocated_bytes(step_of(model, x))[0]])["returned 0"]
    assert peak <= plan.budget_bytes


@pytest.mark.parametrize(("size", "error"), [(4096, BudgetError), (160, KeyboardInterrupt)])
def test_planning_that_fails_or_is_cut_off_leaves_no_trace(size, error, monkeypatch):
    model, plan = planned_net()
    state, x = copy.deepcopy(model.state_dict()), torch.randn(size, 16)
    stream = torch.get_rng_state()
    with monkeypatch.context() as patch:
        if error is KeyboardInterrupt:
            patch.setattr(frontiers, "price_blocks", mock.Mock(side_effect=error))
        with pytest.raises(error):
            model(x)
    assert torch.equal(torch.get_rng_state(), stream)
    assert_same(model.state_dict(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert plan.family == (plan,)
    assert_as_small(model, torch.randn(128, 16))
    assert plan.is_applied


def test_no_plan_is_made_where_nothing_trains():
    model, plan = planned_net()
    with torch.no_grad():
        model(torch.randn(200, 16))
    model.eval()
    with pytest.warns(UserWarning, match="where the plan is for"):
        model(torch.randn(200, 16))  # with gradients, but in another mode
    assert plan.family == (plan,)
    model, plan = planned_net(share=1.2)
    for size in (3, 127):  # what keeps all serves all that is smaller
        model(torch.randn(size, 16))
    assert plan.family == (plan,)


def test_a_family_in_several_threads_makes_no_plan():
    model, plan = planned_net()
    model(torch.randn(128, 16))
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(model, torch.randn(150, 16))
        with pytest.raises(RecoupError, match="Run a step of each shape in one thread before"):
            other.result()
    assert len(plan.family) == 1
    model(torch.randn(150, 16))  # the other has ended
    assert has_grown(plan)


def test_removal():
    model, plan = planned_net()
    plan.remove()
    assert not model._forward_pre_hooks
    with plan.applied():
        model(torch.randn(140, 16))
        assert plan.is_applied
    assert not model._forward_pre_hooks
    assert recoup.applied_plans(model) == []


def test_a_loss_of_one_shape_says_the_way_out():
    target = torch.randn(128, 16)
    model, _ = planned_net(loss=lambda output: (output - target).square().mean())
    with pytest.raises(RuntimeError, match=r"With replan=True, `loss` must serve batches of every"):
        model(torch.randn(150, 16))
