"""Stores of gradients on a GPU, and on the CPU beside it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recoup

pytestmark = pytest.mark.cuda
SIZE, DEPTH = 1024, 12
ONE = 4 * SIZE * SIZE  # bytes of one gradient


def chain(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(SIZE, SIZE, bias=False) for _ in range(DEPTH)]
    return nn.Sequential(*layers).to("cuda", dtype)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).cuda()


def batches(num, *size):
    return torch.randn(num, *size, device="cuda", generator=torch.Generator("cuda").manual_seed(1))


def plain_gradients(model, xs):
    model = copy.deepcopy(model)
    for x in xs:
        model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def assert_close(got, want):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.to(theirs.device), theirs, rtol=1e-5, atol=1e-6)


def test_gradients_leave_one_by_one():
    model, xs = chain(), batches(3, 8, SIZE)
    store = recoup.GradStore(model.parameters(), device="cpu")
    store.backward(model(xs[0]).square().mean())  # what libraries allocate at first
    store.clear()
    for x in xs:
        loss = model(x).square().mean()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        store.backward(loss)
        assert torch.cuda.max_memory_allocated() - before < 1.5 * ONE
        del loss
    assert {each.device.type for each in store.values()} == {"cpu"}
    want, single = plain_gradients(model, xs), copy.deepcopy(model)
    assert_close([store[each] for each in model.parameters()], want)
    for each, gradient in zip(single.parameters(), want, strict=True):
        each.grad = gradient
    torch.optim.SGD(single.parameters(), lr=0.1).step()
    store.step(torch.optim.SGD(model.parameters(), lr=0.1))  # on the GPU
    assert_close(model.parameters(), single.parameters())


def test_they_leave_a_stream_of_its_own():
    model, xs = chain(), batches(2, 8, SIZE)
    want, store = plain_gradients(model, xs), recoup.GradStore(model.parameters(), device="cpu")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in xs:
            store.backward(model(x).square().mean())
    assert_close([store[each] for each in model.parameters()], want)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_the_host_does_not_wait():
    model, xs = small(), batches(2, 8, 16)
    store = recoup.GradStore(model.parameters())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in xs:
            store.backward(model(x).square().mean())
        norm = store.mean_().clip_norm_(0.01)
        is_finite = store.isfinite()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = torch.cat([each.flatten() for each in plain_gradients(model, xs)]) / 2
    torch.testing.assert_close(norm, want.norm(), rtol=1e-5, atol=1e-6)
    assert norm.device.type == "cuda"
    assert float(store.norm()) == pytest.approx(0.01, rel=1e-3)
    assert bool(is_finite)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_scaler_and_infinities(clips, fused):
    """As the loop of torch: skipped steps, the scale, and the weights."""
    model = small()
    single = copy.deepcopy(model)
    ours, theirs = (
        torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused) for m in (model, single)
    )
    scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3) for _ in "ab"]
    store = recoup.GradStore(model.parameters())
    for step, x in enumerate(batches(12, 8, 16)):
        factor = float("inf") if step in (2, 7) else 1.0
        with torch.autocast("cuda", torch.float16):
            mine, other = ((m(x).float().square().mean() * factor) for m in (model, single))
        store.backward(mine, scaler=scalers[0])
        theirs.zero_grad()
        scalers[1].scale(other).backward()
        if clips:
            store.unscale_(scalers[0], ours)
            store.clip_norm_(0.1)
            scalers[1].unscale_(theirs)
            nn.utils.clip_grad_norm_(single.parameters(), 0.1)
        store.step(ours, scaler=scalers[0])
        scalers[0].update()
        scalers[1].step(theirs)
        scalers[1].update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert_close(model.parameters(), single.parameters())
