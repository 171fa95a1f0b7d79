"""Policies: what people choose by hand for all blocks, and plans that beat it."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup.schedules import simulate
from tests.neighbours.planned import Net, assert_same, loss_of, result_of
from tests.oracle import Operators
from tests.plan_oracle import Made, peak_of, ways_of


def attends(width: int) -> nn.Module:
    """A block with a kernel of attention."""

    def forward(block, x):
        q, k, v = block.given(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.gelu(block.made(y.transpose(1, 2).flatten(2)))

    return Made(forward, given=nn.Linear(width, 3 * width), made=nn.Linear(width, width))


def of_net(*, is_attending: bool = False):
    """A model, its input, and a step."""
    torch.manual_seed(0)
    model, x = Net(32, 6, attends) if is_attending else Net(32, 6), torch.randn(8, 64, 32)
    model.stem = nn.Linear(32, 32)
    return model, x, lambda: loss_of(model(x)).backward()


def counted(model, step):
    """What a step makes, its peak, and the runs of each block."""
    runs = Counter()
    for index, block in enumerate(model.blocks):
        first = next(block.children())
        first.register_forward_pre_hook(lambda *_, i=index: runs.update([i]))
    made = result_of(model, step)
    runs, forwards = Counter(), runs
    return made, peak_of(model, step), sorted(forwards.items())


@pytest.mark.parametrize(("policy", "every"), [("full", 1), ("every 2nd block", 2), ("keep", 7)])
def test_it_is_what_people_do_by_hand(policy, every):
    hand, _, step = of_net()
    for block in list(hand.blocks)[::every] if every < 7 else []:
        block.forward = functools.partial(recoup.checkpoint, block.forward)
    wanted, most, runs = counted(hand, step)
    model, x, step = of_net()
    plan = recoup.plan(model, x, policy=policy, loss=loss_of)
    with plan.applied():
        found, peak, own_runs = counted(model, step)
    assert_same(found, wanted)
    assert own_runs == runs
    assert abs(peak - most) <= 0.005 * most  # of one region, or of several, are random states
    assert peak <= plan.rehearsed_peak_bytes


def test_attention_is_kept_and_the_rest_runs_again():
    model, x, step = of_net(is_attending=True)
    wanted = result_of(model, step)
    plan = recoup.plan(model, x, policy="save attention", loss=loss_of)
    assert ways_of(plan) == {"keep products"}
    kept = x.nbytes + 4 * x.shape[0] * 4 * x.shape[1]  # its result, and a number a row and head
    assert {row.keeps_bytes for row in plan.blocks} == {x.nbytes + kept}
    with plan.applied(), Operators() as ran:
        found = result_of(model, step)
    assert_same(found, wanted)
    assert ran.of("_scaled_dot_product_flash_attention_for_cpu") == 6
    assert ran.of("addmm") >= 2 * 6 + 2


def test_a_plan_with_its_bytes_is_at_least_as_fast():
    model, x, _ = of_net(is_attending=True)
    by_policy = recoup.plan(model, x, policy="every 2nd block", loss=loss_of)
    budget = max(by_policy.rehearsed_peak_bytes, by_policy.predicted_peak_bytes)
    plan = recoup.plan(model, x, budget=budget, loss=loss_of)
    seconds = [simulate(each.schedule, costs=plan.costs).seconds for each in (plan, by_policy)]
    assert seconds[0] <= seconds[1]
    assert plan.rehearsed_peak_bytes <= budget


def test_it_has_no_budget():
    model, x, _ = of_net()
    with recoup.plan(model, x, policy="full", loss=loss_of).applied() as plan:
        loss_of(model(x) + model(x)).backward()  # more than was planned: fewer bytes than plainly
    assert 'Net: 6 blocks, policy "full" (step)' in str(plan)
    assert "least feasible" not in str(plan)
