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


class Attends(nn.Module):
    """A block with a kernel of attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.given, self.made = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.given(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + F.gelu(self.made(y.transpose(1, 2).flatten(2)))


def model_and_input(attends: bool = False):
    torch.manual_seed(0)
    model = Net(32, 6, Attends) if attends else Net(32, 6)
    model.stem = nn.Linear(32, 32)
    return model, torch.randn(8, 64, 32)


def by_hand(blocks):
    for block in blocks:
        block.forward = functools.partial(recoup.checkpoint, block.forward)


def counted(model, x):
    """What a step makes, its peak, and the runs of each block."""
    runs = Counter()
    for index, block in enumerate(model.blocks):
        first = next(block.children())
        first.register_forward_pre_hook(lambda *_, i=index: runs.update([i]))

    def step():
        loss_of(model(x)).backward()

    made = result_of(model, step)
    runs, forwards = Counter(), runs
    return made, recoup.measure(step, device="cpu", repeats=0).peak_bytes, sorted(forwards.items())


@pytest.mark.parametrize(("policy", "every"), [("full", 1), ("every 2nd block", 2), ("keep", 7)])
def test_it_is_what_people_do_by_hand(policy, every):
    hand, x = model_and_input()
    by_hand(list(hand.blocks)[::every] if every < 7 else [])
    wanted, most, runs = counted(hand, x)
    model, x = model_and_input()
    plan = recoup.plan(model, x, policy=policy, loss=loss_of)
    with plan.applied():
        found, peak, own_runs = counted(model, x)
    assert_same(found, wanted)
    assert own_runs == runs
    assert abs(peak - most) <= 0.005 * most  # of one region, or of several, are random states
    assert peak <= plan.rehearsed_peak_bytes


def test_attention_is_kept_and_the_rest_runs_again():
    model, x = model_and_input(attends=True)
    wanted = result_of(model, lambda: loss_of(model(x)).backward())
    plan = recoup.plan(model, x, policy="save attention", loss=loss_of)
    assert {row.way for row in plan.blocks} == {"keep products"}
    kept = x.nbytes + 4 * x.shape[0] * 4 * x.shape[1]  # its result, and a number a row and head
    assert {row.keeps_bytes for row in plan.blocks} == {x.nbytes + kept}
    kernels = Counter()

    class Kernels(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kernels.update([func.__name__.split(".")[0]])
            return func(*args, **(kwargs or {}))

    with plan.applied(), Kernels():
        found = result_of(model, lambda: loss_of(model(x)).backward())
    assert_same(found, wanted)
    assert kernels["_scaled_dot_product_flash_attention_for_cpu"] == 6
    assert kernels["addmm"] >= 2 * 6 + 2


@pytest.mark.parametrize("policy", ["full", "every 2nd block"])
def test_a_plan_with_its_bytes_is_at_least_as_fast(policy):
    model, x = model_and_input(attends=True)
    by_policy = recoup.plan(model, x, policy=policy, loss=loss_of)
    budget = max(by_policy.rehearsed_peak_bytes, by_policy.predicted_peak_bytes)
    plan = recoup.plan(model, x, budget=budget, loss=loss_of)
    seconds = [simulate(each.schedule, costs=plan.costs).seconds for each in (plan, by_policy)]
    assert seconds[0] <= seconds[1]
    assert plan.rehearsed_peak_bytes <= budget


def test_two_forwards_treat_a_block_alike():
    model, x = model_and_input()
    model.blocks = model.blocks[:5]
    plan = recoup.plan(
        model, x, policy="every 2nd block", num_forwards=2, loss=lambda a, b: loss_of(a + b)
    )
    ways = [row.way for row in plan.blocks]
    assert ways == ["recompute", "keep", "recompute", "keep", "recompute"] * 2


def test_it_has_no_budget():
    model, x = model_and_input()
    with recoup.plan(model, x, policy="full", loss=loss_of).applied() as plan:
        loss_of(model(x) + model(x)).backward()  # more than was planned: fewer bytes than plainly
    assert 'Net: 6 blocks, policy "full" (step)' in str(plan)
    assert "least feasible" not in str(plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "half"}, '\'half\', but must be one of "full", .*"save attention", "keep"'),
        ({"policy": ["full"]}, r"\['full'\], but must be one of"),
        ({"policy": "full", "budget": "1 GiB"}, "`budget` is '1 GiB', and .* Choose one"),
        ({"policy": "full", "tiles": True}, "`tiles` is True, but .* Leave `tiles` out"),
        ({"policy": "full", "exact": False}, "`exact` is False, but"),
        ({"policy": "full", "replan": True}, "`replan` is True without a `budget`"),
        ({"policy": "save attention"}, "'save attention', but no block was seen to call a kernel"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, message):
    model, x = model_and_input()
    with pytest.raises(ValueError, match=message):
        recoup.plan(model, x, loss=loss_of, **options)
