"""Plans that let the inputs of blocks wait in a folder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.planning import options
from recoup.planning.options import OffloadPlace
from recoup.schedules import Offload


class Block(nn.Module):
    """A block whose input is large beside what its second run needs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.b(self.a(x).tanh())


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(12)))


@pytest.mark.filterwarnings("ignore:The first step")  # of another loss
def test_a_plan_that_offloads_to_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "_seconds_per_byte", lambda to, device: 1e-12)
    net, x = model(), torch.randn(512, 64)
    frontier, without = recoup.plan(net, x, offload_to=tmp_path), recoup.plan(net, x)
    budget = without.points[0].peak_bytes + 9 * 512 * 64  # two states are in flight
    plan = frontier.plan(budget)
    runs = [
        sum(block.num_forwards for block in each.blocks) for each in (plan, without.plan(budget))
    ]
    assert runs[0] < runs[1]
    offloads = [a for a in plan.schedule.actions if isinstance(a, Offload)]
    assert offloads
    assert {a.to for a in offloads} == {str(tmp_path)}
    assert "recompute, offload" in str(plan)

    def step():
        net.zero_grad()
        net(x).square().mean().backward()
        return [p.grad.clone() for p in net.parameters()]

    wanted = step()
    with plan.applied():
        for got, want in zip(step(), wanted, strict=True):
            assert torch.equal(got, want)
        net.zero_grad()
        loss = lambda: net(x).sum().backward()  # noqa: E731
        peak = recoup.measure(loss, repeats=0).peak_bytes
    assert peak <= plan.budget_bytes
    assert not list(tmp_path.iterdir())


def test_a_slow_folder_is_not_used_where_recomputing_is_faster(tmp_path, monkeypatch):
    net, x = model(), torch.randn(512, 64)
    least = recoup.plan(net, x).least_bytes
    monkeypatch.setattr(options, "_seconds_per_byte", lambda to, device: 0.1)
    plan = recoup.plan(net, x, budget=least, offload_to=tmp_path)
    assert not any(isinstance(a, Offload) for a in plan.schedule.actions)


@pytest.mark.parametrize(("to", "message"), [
    ("host", '`offload_to` is "host", but the model is on the cpu'),
    (3, "`offload_to` is 3, which is no folder"),
    ("/nowhere", "`offload_to` is '/nowhere', which is no folder"),
])  # fmt: skip
def test_wrong_places(to, message):
    with pytest.raises(ValueError, match=message):
        recoup.plan(model(), torch.randn(4, 64), offload_to=to)


def test_the_schedule_names_the_place():
    schedule = recoup.schedules.offloaded(3)
    moved = OffloadPlace("/scratch", 1.0).of(schedule)
    assert [a.to for a in moved.actions if isinstance(a, Offload)] == ["/scratch", "/scratch"]
    assert moved.num_stages == 3
