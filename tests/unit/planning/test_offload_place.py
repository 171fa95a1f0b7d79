"""Plans that let the inputs of blocks wait in a folder."""

from __future__ import annotations

import torch
from torch import nn

import recoup
from recoup.planning import options
from recoup.schedules import Offload
from tests.plan_oracle import Made, assert_as_plain, stack, step_of


def model():
    """Blocks whose input is large beside what its second run needs."""

    def block():
        parts = {name: nn.Linear(64, 64) for name in "ab"}
        return Made(lambda block, x: x + block.b(block.a(x).tanh()), **parts)

    return stack(12, block), torch.randn(512, 64)


def offloads_of(schedule):
    return [action.to for action in schedule.actions if isinstance(action, Offload)]


def num_forwards(plan):
    return sum(block.num_forwards for block in plan.blocks)


def test_a_plan_that_offloads_to_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "_seconds_per_byte", lambda to, device: 1e-12)
    net, x = model()
    frontier, without = recoup.plan(net, x, offload_to=tmp_path), recoup.plan(net, x)
    budget = without.points[0].peak_bytes + 9 * 512 * 64  # two states are in flight
    plan = frontier.plan(budget)
    assert num_forwards(plan) < num_forwards(without.plan(budget))
    assert {*offloads_of(plan.schedule)} == {str(tmp_path)}
    assert "recompute, offload" in str(plan)
    assert_as_plain(plan, step_of(net, x, loss=torch.sum))
    assert not list(tmp_path.iterdir())


def test_a_slow_folder_is_not_used_where_recomputing_is_faster(tmp_path, monkeypatch):
    net, x = model()
    least = recoup.plan(net, x).least_bytes
    monkeypatch.setattr(options, "_seconds_per_byte", lambda to, device: 0.1)
    plan = recoup.plan(net, x, budget=least, offload_to=tmp_path)
    assert not offloads_of(plan.schedule)
