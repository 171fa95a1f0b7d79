"""Models that are planned again for other shapes: no budget exceeded, and hardly slower."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError, RecoupError
from recoup.planning import frontier, measuring
from recoup.planning import step as planning_step
from recoup.planning.replanning import PlanMaker
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


def planned_net(size=128, share=0.2, **options):
    model, x = net(), torch.randn(size, 16)
    budget = budget_for(model, x, share=share)
    plan = recoup.plan(model, x, budget=budget, loss=loss_of, replan=True, **options)
    return model, plan.apply(), budget


def work_of(step):
    counter = WorkCounter()
    with counter.counting():
        step()
    return counter.work


def has_grown(plan):
    return len(plan.family) > 1 or plan.family[0] is not plan


def grown(model, x):
    return result_of(model, lambda: loss_of(model(x)).backward())


def test_a_larger_batch_is_planned_once_and_is_right():
    model, plan, budget = planned_net()
    plain = net()
    x = torch.randn(150, 16)
    wanted = grown(plain, x)
    assert_same(grown(model, x), wanted)  # the step that plans
    assert has_grown(plan)
    assert "150 x 16" in str(plan)
    family = plan.family
    assert_same(grown(model, x), wanted)
    assert plan.family == family  # nothing was planned
    assert peak_of(lambda: loss_of(model(x)).backward()) <= budget


def test_a_batch_that_does_not_fit_is_an_error_and_leaves_no_trace():
    model, plan, budget = planned_net()
    state = copy.deepcopy(model.state_dict())
    stream = torch.get_rng_state()
    with pytest.raises(BudgetError) as caught:
        model(torch.randn(4096, 16))
    assert caught.value.least_bytes > budget
    torch.randn(4096, 16)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.set_rng_state(stream)
    x = torch.randn(128, 16)
    assert_same(grown(model, x), grown(net(), x))
    assert plan.is_applied
    assert plan.family == (plan,)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_planning_that_is_cut_off_leaves_the_family_as_it_was(error):
    model, plan, _ = planned_net()
    with mock.patch.object(frontier, "price_blocks", side_effect=error), pytest.raises(error):
        model(torch.randn(160, 16))
    assert plan.family == (plan,)
    for size in (128, 140):
        x = torch.randn(size, 16)
        assert_same(grown(model, x), grown(net(), x))


def test_no_plan_is_made_where_nothing_trains():
    model, plan, _ = planned_net()
    with torch.no_grad():
        model(torch.randn(200, 16))
    model.eval()
    with pytest.warns(UserWarning, match="where the plan is for"):
        model(torch.randn(200, 16))  # with gradients, but in another mode
    assert plan.family == (plan,)
    model, plan, _ = planned_net(share=1.2)
    for size in (3, 40, 127):  # what keeps all serves all that is smaller
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
    for block in model.blocks[1:]:
        block.requires_grad_(requires_grad=False)
    plan = recoup.plan(model, x, budget=budget, loss=loss_of, replan=True).apply()
    model.requires_grad_(requires_grad=True)
    wanted = grown(net(), x)
    assert_same(grown(model, x), wanted)
    assert len(plan.family) == 2
    assert peak_of(lambda: loss_of(model(x)).backward()) <= budget


def test_copies_and_removal():
    model, plan, _ = planned_net()
    x = torch.randn(140, 16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(grown(other, x), grown(net(), x))
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

    def loss(output):
        return (output - x).square().mean()

    budget = budget_for(model, x, share=0.2, loss=loss)
    recoup.plan(model, x, budget=budget, loss=loss, replan=True).apply()
    with pytest.raises(ValueError, match=r"another shape than the example.*replan=True"):
        model(torch.randn(150, 16))


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def of_encoder(size):
    torch.manual_seed(size)
    return {"src": torch.randn(2, size, 32)}


def loss_found(output):
    return output.loss if hasattr(output, "loss") else output.abs().sum()


def count_calls(monkeypatch, name):
    """The list of the calls of a method of what makes the plans of a family."""
    calls, own = [], getattr(PlanMaker, name)
    monkeypatch.setattr(PlanMaker, name, lambda *a, **k: calls.append(a) or own(*a, **k))
    return calls


@pytest.fixture
def counted_time(monkeypatch):
    """Time is the counted work of operators, so that plans do not depend on a clock."""
    for module in (planning_step, measuring):
        monkeypatch.setattr(module, "now", counted_seconds)
    for name in ("_SECONDS_OF_REGION", "_SECONDS_OF_PRODUCT"):
        monkeypatch.setattr(measuring, name, 0.0)
    with timed_by_work():
        yield


@pytest.mark.clocked
@pytest.mark.usefixtures("counted_time")
def test_a_plan_that_keeps_products_does_the_work_that_it_predicts():
    """Masks save less than their counted work, as their bits are packed; products save more."""
    model, given = encoder(), of_encoder(96)

    def step():
        model(**given).abs().sum().backward()

    plain, frontier = work_of(step), recoup.plan(model, **given)
    least, most = (frontier.points[place].peak_bytes for place in (0, -1))
    for share in (0.1, 0.3, 0.7):
        with frontier.plan(int(least + (most - least) * share)).applied() as plan:
            assert {block.way for block in plan.blocks} & {"keep products"}
            assert work_of(step) / plain == pytest.approx(plan.predicted_time_ratio, rel=0.006)


RANDOM = random.Random(0).choices(range(16, 257), k=200)


@pytest.mark.clocked  # by the counted work of `counted_time`
@pytest.mark.usefixtures("counted_time")
@pytest.mark.parametrize(
    ("build", "batch", "lengths", "most_plans"),
    [
        pytest.param(encoder, of_encoder, [64, 96, 92, 64, 60], 3, marks=pytest.mark.slow),
        pytest.param(encoder, of_encoder, RANDOM, 12, marks=pytest.mark.exhaustive),
        pytest.param(encoder, of_encoder, range(64, 256), 6, marks=pytest.mark.exhaustive),
    ],
    ids=["a few", "random", "growing"],
)
def test_lengths_in_any_order(monkeypatch, build, batch, lengths, most_plans):
    """Few plans, each step within the budget and hardly slower than under a plan of its own."""
    plans = count_calls(monkeypatch, "plan")
    model, plain = build(), build()
    budget = budget_for(model, share=0.2, loss=None, **batch(max(lengths)))
    plan = recoup.plan(model, **batch(lengths[0]), budget=budget, replan=True).apply()
    works = {}  # by the length and the plan that serves it

    def step(net, size):
        net.zero_grad()
        given = batch(size)
        return lambda: loss_found(net(**given)).backward()

    for size in lengths:
        plan.replanner.serve((), batch(size))  # what the call does first: it is not measured
        key = size, plan.replanner.chosen
        if key not in works:
            assert peak_of(step(model, size)) <= budget
            works[key] = work_of(step(model, size))
    assert 1 + len(plans) <= most_plans
    ratios = []  # of each step's work to that under a plan of its own
    for size in sorted(set(lengths))[:: max(len(works) // 12, 1)]:
        with recoup.plan(plain, **batch(size), budget=budget).applied():
            alone = work_of(step(plain, size))
        ratios += [work / alone for (length, _), work in works.items() if length == size]
        assert_same(*(result_of(net, step(net, size)) for net in (model, plain)))
    assert sum(ratios) <= 1.02 * len(ratios)
    # A length that is smaller by less than 3 % than a planned one gets no plan of its own.
    assert max(ratios) <= 1.05
