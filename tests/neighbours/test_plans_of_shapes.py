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


def net():
    torch.manual_seed(0)
    return Net(16, 3)


def budget_for(model, *args, share=0.5, loss=loss_of, **kwargs):
    """A budget between the least that the arguments need (0) and what a plain step takes (1)."""
    points = recoup.plan(model, *args, loss=loss, **kwargs).points
    least, most = points[0].peak_bytes * 1.03, points[-1].peak_bytes
    return int(least + (most - least) * share)


def planned_net(share=0.2):
    model, x = net(), torch.randn(128, 16)
    budget = budget_for(model, x, share=share)
    plan = recoup.plan(model, x, budget=budget, loss=loss_of, replan=True)
    return model, plan.apply(), budget


def stepping(model, x):
    return lambda: loss_of(model(x)).backward()


def assert_as_plain(model, x):
    assert_same(result_of(model, stepping(model, x)), result_of(plain := net(), stepping(plain, x)))


def has_grown(plan):
    return len(plan.family) > 1 or plan.family[0] is not plan


def test_a_larger_batch_is_planned_once_and_is_right():
    model, plan, budget = planned_net()
    x = torch.randn(150, 16)
    assert_as_plain(model, x)  # the step that plans
    assert has_grown(plan)
    assert "150 x 16" in str(plan)
    family = plan.family
    assert_as_plain(model, x)
    assert plan.family == family  # nothing was planned
    assert peak_of(stepping(model, x)) <= budget


@pytest.mark.parametrize(("size", "error"), [(4096, BudgetError), (160, KeyboardInterrupt)])
def test_planning_that_fails_or_is_cut_off_leaves_no_trace(size, error):
    model, plan, budget = planned_net()
    state, x = copy.deepcopy(model.state_dict()), torch.randn(size, 16)
    stream = torch.get_rng_state()
    cut_off = mock.patch.object(frontier, "price_blocks", side_effect=error)
    with nullcontext() if error is BudgetError else cut_off, pytest.raises(error) as caught:
        model(x)
    assert error is not BudgetError or caught.value.least_bytes > budget
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert plan.family == (plan,)
    assert_as_plain(model, torch.randn(128, 16))
    assert plan.is_applied


def test_no_plan_is_made_where_nothing_trains():
    model, plan, _ = planned_net()
    with torch.no_grad():
        model(torch.randn(200, 16))
    model.eval()
    with pytest.warns(UserWarning, match="where the plan is for"):
        model(torch.randn(200, 16))  # with gradients, but in another mode
    assert plan.family == (plan,)
    model, plan, _ = planned_net(share=1.2)
    for size in (3, 127):  # what keeps all serves all that is smaller
        model(torch.randn(size, 16))
    assert plan.family == (plan,)


def test_a_family_in_several_threads_makes_no_plan():
    model, plan, _ = planned_net()
    model(torch.randn(128, 16))
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(model, torch.randn(150, 16))
        with pytest.raises(RecoupError, match="Run a step of each shape in one thread before"):
            other.result()
    assert len(plan.family) == 1
    model(torch.randn(150, 16))  # the other has ended
    assert has_grown(plan)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = net(), Net(16, 1)

    def forward(self, batch):
        return self.wide(batch["wide"]).sum() + self.narrow(batch["narrow"]).sum()


def test_tensors_in_a_dict_are_told_apart_by_their_keys():
    model, large, small = Named(), torch.randn(128, 16), torch.randn(8, 16)
    plan = recoup.plan(model, {"wide": small, "narrow": large}, budget="10 MiB", replan=True)
    with plan.applied():
        model({"narrow": large, "wide": small})  # the same in another order
        assert plan.family == (plan,)
        model({"narrow": small, "wide": large})
        assert has_grown(plan)


def test_parameters_that_are_thawed_get_a_plan_of_their_own():
    model, x = net(), torch.randn(32, 16)
    budget = budget_for(model, x, share=0.1)
    model.blocks[1:].requires_grad_(requires_grad=False)
    plan = recoup.plan(model, x, budget=budget, loss=loss_of, replan=True).apply()
    model.requires_grad_(requires_grad=True)
    assert_as_plain(model, x)
    assert len(plan.family) == 2
    assert peak_of(stepping(model, x)) <= budget


def test_copies_and_removal():
    model, plan, _ = planned_net()
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
    model, x = net(), torch.randn(128, 16)
    loss = lambda output: (output - x).square().mean()  # noqa: E731
    budget = budget_for(model, x, share=0.2, loss=loss)
    recoup.plan(model, x, budget=budget, loss=loss, replan=True).apply()
    with pytest.raises(RuntimeError, match=r"With replan=True, `loss` must serve batches of every"):
        model(torch.randn(150, 16))


# -- work, in the place of time --------------------------------------------------------------------


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def of_length(size):
    torch.manual_seed(size)
    return torch.randn(2, size, 32)


def encoding(model, x):
    return lambda: model(x).abs().sum().backward()


def work_of(step):
    counter = WorkCounter()
    with counter.counting():
        step()
    return counter.work


@pytest.fixture
def counted_time(monkeypatch):
    """Time is the counted work of operators, so that plans do not depend on a clock."""
    for module in (planning_step, measuring):
        monkeypatch.setattr(module, "now", counted_seconds)
    with timed_by_work():
        yield


@pytest.mark.clocked
@pytest.mark.usefixtures("counted_time")
def test_a_plan_that_keeps_products_does_the_work_that_it_predicts():
    """Masks save less than their counted work, as their bits are packed; products save more."""
    model, x = encoder(), of_length(96)
    plain, frontier = work_of(encoding(model, x)), recoup.plan(model, x)
    least, most = (frontier.points[place].peak_bytes for place in (0, -1))
    for share in (0.1, 0.7):
        with frontier.plan(int(least + (most - least) * share)).applied() as plan:
            assert "keep products" in {block.way for block in plan.blocks}
            work = work_of(encoding(model, x))
            assert work / plain == pytest.approx(plan.predicted_time_ratio, rel=0.006)
