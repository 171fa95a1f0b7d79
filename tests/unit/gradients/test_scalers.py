"""Stores with scalers of losses: the standard loop, infinities, and who divides."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import recoup
from recoup import GradStore
from recoup.errors import GradientError
from tests.unit.gradients.cases import same, scaler_of, tripled


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def trackers(scaler):
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("way", ["step", "clip", "several", "kept"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_with_infinities_are_those_of_the_standard_loop(name, way, windows):
    plain, ours = model_of(), model_of()
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (plain, ours)]
    scalers = [scaler_of(2.0**10, growth_interval=4) for _ in range(2)]
    torch.manual_seed(7)
    scales = set()
    for step in range(50):
        batches = torch.randn(windows, 6, 5)
        if step % 7 == 5 or step in (20, 21):
            batches[-1, 0, 0] = math.inf if step % 2 else math.nan

        optimizers[0].zero_grad()
        for x in batches:
            scalers[0].scale(plain(x).square().mean()).backward()
        if way == "clip":
            scalers[0].unscale_(optimizers[0])
            want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        scalers[0].step(optimizers[0])
        scalers[0].update()

        stores = [GradStore(ours.parameters())]
        for x in batches:
            if way == "several":
                stores.append(GradStore(ours.parameters()))
            stores[-1].backward(ours(x).square().mean(), scaler=scalers[1])
        if way == "clip":
            scale = scalers[1].get_scale()
            norm = stores[0].clip_norm_(0.1 * scale) / scale
            torch.testing.assert_close(norm, want, rtol=1e-2, atol=1e-4, equal_nan=True)
        recoup.step(optimizers[1], *stores, scaler=scalers[1], consume=way != "kept")
        scalers[1].update()
        assert all(len(store) == 0 for store in stores) or way == "kept"

        assert trackers(scalers[0]) == trackers(scalers[1])
        scales.add(trackers(scalers[0]))
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            rtol = 1e-2 if way == "clip" else 0.0
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)
            assert other.grad is None
    assert len(scales) > 8, "the scale hardly moved"


def test_two_optimizers_and_one_of_them_with_an_infinity():
    """The scaler skips that one alone."""
    ends, x, before = [], torch.full((2, 5), 1e30), model_of().parameters()
    for is_ours in (False, True):
        model, scaler = model_of(), scaler_of()
        loss = model[0](x).square().sum() * 1e30 + model[2](torch.ones(2, 4)).sum()
        optimizers = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2)]
        if is_ours:
            store = GradStore(model.parameters())
            store.backward(loss, scaler=scaler)
            for part, optimizer in zip(store.split(*optimizers), optimizers, strict=True):
                part.step(optimizer, scaler=scaler)
        else:
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        ends.append((trackers(scaler), [*model.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert same(ends[0][1], ends[1][1])
    kept = [torch.equal(*each) for each in zip(ends[1][1], before, strict=True)]
    assert kept == [True, True, False, False]


def test_a_scaler_that_is_not_enabled():
    params, scaler = [nn.Parameter(torch.ones(4))], torch.amp.GradScaler("cpu", enabled=False)
    optimizer, store = torch.optim.SGD(params, lr=1.0), tripled(params, scaler)
    store.step(optimizer, scaler=scaler)
    scaler.update()
    assert bool((params[0] == -2.0).all())


def test_what_a_scaler_has_unscaled_in_grad_it_does_not_divide_again():
    """So the step takes what was unscaled there, and nothing that is scaled."""
    params, scaler = [nn.Parameter(torch.ones(4))], scaler_of()
    optimizer, store = torch.optim.SGD(params, lr=1.0), tripled(params, scaler)
    scaler.scale((3 * params[0]).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(GradientError, match="has unscaled"):
        store.step(optimizer, scaler=scaler)
    GradStore.from_grad(params).step(optimizer, scaler=scaler)
    assert bool((params[0] == -2.0).all())
    scaler.update()
    store.step(optimizer, scaler=scaler)
    assert bool((params[0] == -5.0).all())


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


def test_parameters_of_float16_are_refused_as_by_torch():
    layer = nn.Embedding(6, 3).half()
    store, scaler = GradStore(layer.parameters()), scaler_of()
    store.backward(layer(torch.tensor([1])).sum(), scaler=scaler)
    with pytest.raises(ValueError, match="Attempting to unscale FP16"):
        store.step(torch.optim.SGD(layer.parameters(), lr=1.0), scaler=scaler)
