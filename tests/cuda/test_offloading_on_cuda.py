"""Residuals of a GPU that wait in pinned host memory, or in a folder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WIDE = 1024


def net(num_layers=16):
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDE, WIDE), nn.GELU())]
    return nn.Sequential(*layers).cuda()


def step(model, x, around=None):
    model.zero_grad()
    torch.manual_seed(1)
    if around is None:
        loss = model(x).square().mean()
    else:
        with around:
            loss = model(x).square().mean()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("where", ["host", "folder"])
@pytest.mark.parametrize("in_flight_bytes", [None, 1, "1 GiB"])
def test_the_plain_gradients(where, in_flight_bytes, tmp_path):
    model, x = net(), torch.randn(4 * WIDE, WIDE, device="cuda")
    wanted = step(model, x)
    to = "host" if where == "host" else tmp_path
    for _ in range(5):
        around = recoup.offloading("1 MiB", to, in_flight_bytes=in_flight_bytes)
        for got, want in zip(step(model, x, around), wanted, strict=True):
            assert torch.equal(got, want)


def test_what_is_held_on_the_device():
    model, x = net(), torch.randn(4 * WIDE, WIDE, device="cuda")
    state_bytes = x.numel() * 4

    def held(around):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        if around is None:
            y = model(x)
        else:
            with around:
                y = model(x)
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated()
        del y
        return after - before

    assert held(None) >= 30 * state_bytes
    assert held(recoup.offloading("1 MiB")) <= 5 * state_bytes


def test_states_that_wait_in_host_memory():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(16)]
    plain = nn.Sequential(*blocks).cuda()
    chain = recoup.Sequential(*blocks, memory=recoup.schedules.offloaded(16))
    x = torch.randn(4 * WIDE, WIDE, device="cuda", requires_grad=True)
    wanted = step(plain, x)
    for _ in range(5):
        for got, want in zip(step(chain, x * 1), wanted, strict=True):
            assert torch.equal(got, want)


def test_a_copy_comes_back():
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    with recoup.offloading("1 MiB"):
        y = (x * 1).sin().exp()
    (found,) = torch.autograd.grad(y.sum(), x)
    (wanted,) = torch.autograd.grad((x * 1).sin().exp().sum(), x)
    assert torch.equal(found, wanted)
