"""States that wait in host memory: a schedule with offloads gives the plain gradients."""

from __future__ import annotations

import torch
from torch import nn

import recoup
from recoup._core.offload import moved_to_host
from recoup.schedules import Advance, Drop, Load, Offload, Reverse, Schedule, Tape


def test_a_schedule_that_offloads():
    torch.manual_seed(0)
    links = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)]
    actions = (
        Offload(0), Advance(0, 2), Offload(2), Advance(2, 3), Tape(3), Reverse(3),
        Load(2), Drop(2), Tape(2), Reverse(2),
        Load(0), Advance(0, 1), Offload(1), Load(1), Drop(1), Tape(1), Reverse(1),
        Load(0), Drop(0), Tape(0), Reverse(0),
    )  # fmt: skip
    chain = recoup.Sequential(*links, memory=Schedule(4, actions))
    results = []
    for model in (nn.Sequential(*links), chain):
        x = torch.ones(3, 4, requires_grad=True)
        torch.manual_seed(1)
        y = model(x)
        loss = y.square().sum()
        leaves = [x, *model.parameters()]
        once = torch.autograd.grad(loss, leaves, retain_graph=True)
        results += [(y, *once), (y, *torch.autograd.grad(loss, leaves))]
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            assert torch.equal(a, b)


def test_what_hooks_beneath_do_is_done_with_the_copy():
    seen = []

    def look(tensor):
        seen.append(tensor)
        return tensor

    pack, unpack = moved_to_host((look, lambda tensor: tensor))
    tensor = torch.randn(3)
    packed = pack(tensor)
    wanted = tensor.clone()
    tensor.zero_()
    assert seen[0] is not tensor
    assert torch.equal(unpack(packed), wanted)
