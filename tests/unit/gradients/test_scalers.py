"""Stores with scalers of losses: the standard loop, infinities, and what is unscaled by whom."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import recoup
from recoup import GradStore
from recoup.errors import GradientError
from tests.unit.gradients.cases import scaler_of, tripled


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def trackers(scaler):
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


def optimizers_of(model):
    fused = torch.optim.AdamW(model[2].parameters(), lr=0.1, fused=True)
    return torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), fused


@pytest.mark.parametrize(
    ("way", "windows"), [("step", 1), ("unscale", 3), ("clip", 1), ("several", 3), ("kept", 1)]
)
def test_fifty_steps_with_infinities_are_those_of_the_standard_loop(way, windows):
    """Of two optimizers, of which the scaler may skip one alone."""
    plain, ours = model_of(), model_of()
    optimizers = [optimizers_of(each) for each in (plain, ours)]
    scalers = [scaler_of(2.0**10, growth_interval=4) for _ in range(2)]
    torch.manual_seed(7)
    scales = set()
    for step in range(50):
        batches = torch.randn(windows, 6, 5)
        if step % 7 == 5 or step in (20, 21):
            batches[-1, 0, 0] = math.nan
        factor = math.inf if step % 8 == 6 else 1.0  # for the last layer alone

        def loss_of(model, x, factor=factor):
            return model(x).square().mean() + factor * model[2].bias.sum()

        plain.zero_grad()
        for x in batches:
            scalers[0].scale(loss_of(plain, x)).backward()
        if way in ("unscale", "clip"):
            for optimizer in optimizers[0]:
                scalers[0].unscale_(optimizer)
        if way == "clip":
            want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        for optimizer in optimizers[0]:
            scalers[0].step(optimizer)
        scalers[0].update()

        stores = [GradStore(ours.parameters())]
        for x in batches:
            if way == "several":
                stores.append(GradStore(ours.parameters()))
            stores[-1].backward(loss_of(ours, x), scaler=scalers[1])
        if way in ("unscale", "clip"):
            found = stores[0].unscale_(scalers[1], *optimizers[1])
            assert bool(found) != bool(batches.isfinite().all() and factor == 1)
        if way == "clip":
            torch.testing.assert_close(
                stores[0].clip_norm_(0.1), want, rtol=0, atol=0, equal_nan=True
            )
        parts = [store.split(*optimizers[1]) for store in stores]
        for optimizer, own in zip(optimizers[1], zip(*parts, strict=True), strict=True):
            recoup.step(optimizer, *own, scaler=scalers[1], consume=way != "kept")
            assert all(len(store) == 0 for store in own) or way == "kept"
        scalers[1].update()

        assert trackers(scalers[0]) == trackers(scalers[1])
        scales.add(trackers(scalers[0]))
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(one, other), step
            assert other.grad is None
    assert len(scales) > 8, "the scale hardly moved"


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_that_is_not_enabled(unscales):
    params, scaler = [nn.Parameter(torch.ones(4))], torch.amp.GradScaler("cpu", enabled=False)
    optimizer, store = torch.optim.SGD(params, lr=1.0), tripled(params, scaler)
    assert not unscales or not store.unscale_(scaler, optimizer)
    store.step(optimizer, scaler=scaler)
    scaler.update()
    assert bool((params[0] == -2.0).all())


@pytest.mark.parametrize("how", ["updated", "loaded"])
def test_what_was_unscaled_is_not_unscaled_again_by_the_step(how):
    """Torch itself cannot know, and divides a second time."""
    layer = nn.Linear(2, 1, bias=False)
    params, scaler = list(layer.parameters()), scaler_of()
    optimizer = torch.optim.SGD(params, lr=1.0)
    store = tripled(params, scaler)
    store.unscale_(scaler, optimizer, optimizer)
    assert bool((store[params[0]] == 3.0).all())
    if how == "updated":
        scaler.update()
    else:
        state = store.state_dict(layer)
        store, scaler = GradStore(params), scaler_of()
        store.load_state_dict(state, layer)
    before = params[0].detach().clone()
    with pytest.raises(GradientError, match="unscale it again"):
        store.step(optimizer, scaler=scaler)
    assert torch.equal(params[0], before)
    store.step(optimizer)
    assert torch.equal(params[0], before - 3.0)


def test_the_scale_of_a_store_that_goes_elsewhere():
    layer, scaler = nn.Linear(2, 1), scaler_of()
    store = tripled(list(layer.parameters()), scaler)
    loaded, merged = GradStore(), GradStore()
    loaded.load_state_dict(store.state_dict(layer), layer)
    merged.extend_(store, consume=False)
    pair = copy.deepcopy((layer, store))[1]
    for other in (store.to("cpu"), store.clone(), pair, store * 2, loaded, merged):
        with pytest.raises(GradientError, match=r"scaled by 8"):
            other.step(torch.optim.SGD([*other], lr=0.1))
    while store:  # one that was emptied forgets it
        store.popitem()
    with store.collecting():
        layer(torch.ones(1, 2)).sum().backward()
    store.step(torch.optim.SGD(layer.parameters(), lr=0.1))
    assert not store


@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_of_float16_are_unscaled_in_float32(is_sparse):
    """What torch refuses for `.grad` in float16 works, and does not overflow in between."""
    layer = nn.Embedding(6, 3, sparse=is_sparse).half()
    before = layer.weight.detach().float()
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1.0), scaler_of(2.0**14)
    low = GradStore(layer.parameters(), dtype=torch.float16)
    low.backward(layer(torch.tensor([1])).sum(), scaler=scaler)
    with pytest.raises(ValueError, match="Attempting to unscale FP16"):
        low.step(optimizer, scaler=scaler)
    store, factor = GradStore(layer.parameters()), 1.0
    counts = torch.tensor([0, 6, 0, 0, 3, 0]).float()[:, None]
    for is_infinite in (False, True):
        factor = math.inf if is_infinite else 1.0
        for _ in range(3):
            store.backward(layer(torch.tensor([1, 1, 4])).sum() * factor, scaler=scaler)
        assert store[layer.weight].dtype is torch.float32
        assert store.norm() > 65504
        assert bool(store.unscale_(scaler, optimizer)) is is_infinite
        store.step(optimizer, scaler=scaler)
        scaler.update()
        torch.testing.assert_close(layer.weight.float(), before - counts, rtol=2e-3, atol=2e-3)
