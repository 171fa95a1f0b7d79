"""Residuals of a GPU that wait in pinned host memory, or in a folder."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import recoup

pytestmark = pytest.mark.cuda
WIDE = 1024


def made():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.RReLU()) for _ in range(16)]
    return nn.Sequential(*layers).cuda(), torch.randn(4 * WIDE, WIDE, device="cuda")


def step(model, x, around):
    torch.manual_seed(1)
    with around:
        loss = model(x * 1).square().mean()
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("where", ["host", "folder", "schedule"])
@pytest.mark.parametrize("in_flight_bytes", [None, 1, "1 GiB"])
def test_the_plain_gradients(where, in_flight_bytes, tmp_path):
    model, x = made()
    wanted, around = step(model, x, nullcontext()), nullcontext()
    if where == "schedule":
        model = recoup.Sequential(*model, memory=recoup.schedules.offloaded(16))
        x.requires_grad_()
    else:
        to = tmp_path if where == "folder" else "host"
        around = recoup.offloading("1 MiB", to, in_flight_bytes=in_flight_bytes)
    for _ in range(5):
        torch.testing.assert_close(step(model, x, around), wanted, rtol=0, atol=0)


def test_what_is_held_on_the_device():
    model, x = made()
    held = []
    for around in (nullcontext(), recoup.offloading("1 MiB")):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with around:
            y = model(x)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        del y
    assert held[0] >= 30 * x.numel() * 4
    assert held[1] <= 6 * x.numel() * 4  # the output, two in flight, and what one operator makes
