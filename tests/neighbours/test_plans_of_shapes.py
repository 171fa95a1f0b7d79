"""Models that are planned again for other shapes: no budget exceeded, and hardly slower."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError, RecoupError
from recoup.planning import frontier, measuring
from recoup.planning import step as planning_step
from recoup.planning.work import WorkCounter, counted_seconds, timed_by_work
from tests.neighbours.planned import Net, assert_same, loss_of, peak_of, result_of
from tests.plan_oracle import Made, between


def net():
    torch.manual_seed(0)
    return Net(16, 3)


def planned_net(share=0.2, loss=loss_of):
    model, x = net(), torch.randn(128, 16)
    budget = between(recoup.plan(model, x, loss=loss), share)
    return model, recoup.plan(model, x, budget=budget, loss=loss, replan=True).apply()


def stepping(model, x):
    return lambda: loss_of(model(x)).backward()


def assert_as_plain(model, x):
    assert_same(result_of(model, stepping(model, x)), result_of(plain := net(), stepping(plain, x)))


def has_grown(plan):
    return len(plan.family) > 1 or plan.family[0] is not plan


def test_a_larger_batch_is_planned_once_and_is_right():
    model, plan = planned_net()
    x = torch.randn(150, 16)
    assert_as_plain(model, x)  # the step that plans
    assert has_grown(plan)
    assert "150 x 16" in str(plan)
    family = plan.family
    assert_as_plain(model, x)
    assert plan.family == family  # nothing was planned
    assert peak_of(stepping(model, x)) <= plan.budget_bytes


@pytest.mark.parametrize(("size", "error"), [(4096, BudgetError), (160, KeyboardInterrupt)])
def test_planning_that_fails_or_is_cut_off_leaves_no_trace(size, error):
    model, plan = planned_net()
    state, x = copy.deepcopy(model.state_dict()), torch.randn(size, 16)
    stream = torch.get_rng_state()
    cut_off = mock.patch.object(frontier, "price_blocks", side_effect=error)
    with nullcontext() if error is BudgetError else cut_off, pytest.raises(error) as caught:
        model(x)
    assert error is not BudgetError or caught.value.least_bytes > plan.budget_bytes
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert plan.family == (plan,)
    assert_as_plain(model, torch.randn(128, 16))
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


def test_tensors_in_a_dict_are_told_apart_by_their_keys():
    def forward(model, batch):
        return model.wide(batch["wide"]).sum() + model.narrow(batch["narrow"]).sum()

    model = Made(forward, wide=net(), narrow=Net(16, 1))
    large, small = torch.randn(128, 16), torch.randn(8, 16)
    plan = recoup.plan(model, {"wide": small, "narrow": large}, budget="10 MiB", replan=True)
    with plan.applied():
        model({"narrow": large, "wide": small})  # the same in another order
        assert plan.family == (plan,)
        model({"narrow": small, "wide": large})
        assert has_grown(plan)


def test_parameters_that_are_thawed_get_a_plan_of_their_own():
    model, x = net(), torch.randn(32, 16)
    budget = between(recoup.plan(model, x, loss=loss_of), 0.1)
    model.blocks[1:].requires_grad_(requires_grad=False)
    plan = recoup.plan(model, x, budget=budget, loss=loss_of, replan=True).apply()
    model.requires_grad_(requires_grad=True)
    assert_as_plain(model, x)
    assert len(plan.family) == 2
    assert peak_of(stepping(model, x)) <= budget


def test_copies_and_removal():
    model, plan = planned_net()
    x = torch.randn(140, 16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_as_plain(other, x)
    assert plan.family == (plan,)
    plan.remove()
    assert not model._forward_pre_hooks
    with plan.applied():
        model(x)
        assert plan.is_applied
    assert not model._forward_pre_hooks
    assert recoup.applied_plans(model) == []


def test_a_loss_of_one_shape_says_the_way_out():
    target = torch.randn(128, 16)
    model, _ = planned_net(loss=lambda output: (output - target).square().mean())
    with pytest.raises(RuntimeError, match=r"With replan=True, `loss` must serve batches of every"):
        model(torch.randn(150, 16))


# -- work, in the place of time --------------------------------------------------------------------


@pytest.mark.clocked
def test_a_plan_that_keeps_products_does_the_work_that_it_predicts(monkeypatch):
    """Masks save less than their counted work, as their bits are packed; products save more."""
    for module in (planning_step, measuring):
        monkeypatch.setattr(module, "now", counted_seconds)  # so that plans depend on no clock
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 96, 32)

    def work():
        counter = WorkCounter()
        with counter.counting():
            model(x).abs().sum().backward()
        return counter.work

    with timed_by_work():
        plain, frontier = work(), recoup.plan(model, x)
        with frontier.plan(between(frontier, 0.3)).applied() as plan:
            assert "keep products" in {block.way for block in plan.blocks}
            assert work() / plain == pytest.approx(plan.predicted_time_ratio, rel=0.006)
