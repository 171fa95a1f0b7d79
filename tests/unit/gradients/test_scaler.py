"""Stores and `torch.amp.GradScaler`: the standard loop, scale for scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import GradientError

INF = math.inf


def scaler_of(scale=8.0, **settings):
    return torch.amp.GradScaler("cpu", init_scale=scale, **settings)


def model_of(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def collected(params, scaler, value=3.0):
    store = recoup.GradStore(params)
    store.backward(sum((value * each).sum() for each in params), scaler=scaler)
    return store


def trackers(scaler):
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("way", ["step", "unscale", "clip", "several", "kept"])
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
            batches[-1, 0, 0] = INF if step % 2 else math.nan

        optimizers[0].zero_grad()
        for x in batches:
            scalers[0].scale(plain(x).square().mean()).backward()
        if way in ("unscale", "clip"):
            scalers[0].unscale_(optimizers[0])
        if way == "clip":
            want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        scalers[0].step(optimizers[0])
        scalers[0].update()

        stores = [recoup.GradStore(ours.parameters())]
        for x in batches:
            if way == "several":
                stores.append(recoup.GradStore(ours.parameters()))
            stores[-1].backward(ours(x).square().mean(), scaler=scalers[1])
        if way in ("unscale", "clip"):
            found = stores[0].unscale_(scalers[1], optimizers[1])
            assert bool(found) != bool(batches.isfinite().all())
        if way == "clip":
            torch.testing.assert_close(
                stores[0].clip_norm_(0.1), want, rtol=0, atol=0, equal_nan=True
            )
        recoup.step(optimizers[1], *stores, scaler=scalers[1], consume=way != "kept")
        scalers[1].update()
        assert all(len(store) == 0 for store in stores) or way == "kept"

        assert trackers(scalers[0]) == trackers(scalers[1])
        scales.add(trackers(scalers[0]))
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(one, other), step
            assert other.grad is None
    assert len(scales) > 8, "the scale hardly moved"


def test_what_is_kept_is_still_scaled():
    model = model_of()
    params = list(model.parameters())
    for build in OPTIMIZERS.values():
        optimizer, scaler = build(params), scaler_of()
        store = collected(params, scaler)
        store.step(optimizer, scaler=scaler, consume=False)
        scaler.update()
        assert all(bool((each == 24.0).all()) for each in store.values())
        store.step(optimizer, scaler=scaler)
        assert len(store) == 0


def test_two_optimizers_and_one_of_them_with_an_infinity():
    """The scaler skips that one alone."""
    plain, ours = model_of(), model_of()
    scalers = [scaler_of(), scaler_of()]
    pairs = [
        (
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.AdamW(model[2].parameters(), lr=0.1),
        )
        for model in (plain, ours)
    ]
    for place, model in enumerate((plain, ours)):
        before = model[0].weight.detach().clone()
        moved = model[2].weight.detach().clone()
        x = torch.full((2, 5), 1e30)
        loss = model[0](x).square().sum() * 1e30 + model[2](torch.ones(2, 4)).sum()
        if place == 0:
            scalers[0].scale(loss).backward()
            for optimizer in pairs[0]:
                scalers[0].unscale_(optimizer)
                scalers[0].step(optimizer)
        else:
            store = recoup.GradStore(model.parameters())
            store.backward(loss, scaler=scalers[1])
            assert store.unscale_(scalers[1], *pairs[1])
            for part, optimizer in zip(store.split(*pairs[1]), pairs[1], strict=True):
                part.step(optimizer, scaler=scalers[1])
        scalers[place].update()
        assert torch.equal(model[0].weight, before)
        assert not torch.equal(model[2].weight, moved)
    assert trackers(scalers[0]) == trackers(scalers[1])
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_that_the_store_has_nothing_for():
    """Torch would fail an assertion; here nothing happens, as in a step without a scaler."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    scaler = scaler_of()
    store = collected([first], scaler)
    store.step(torch.optim.SGD([second], lr=1.0), scaler=scaler, unknown="ignore")
    store.step(torch.optim.SGD([first], lr=1.0), scaler=scaler)
    scaler.update()
    assert torch.equal(first, torch.full((2,), -2.0))
    assert torch.equal(second, torch.ones(2))


@pytest.mark.parametrize("name", ["sgd", "fused adamw"])
def test_a_scaler_that_is_not_enabled(name):
    plain, ours = model_of(), model_of()
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (plain, ours)]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for unscales in (False, True):
        x = torch.randn(6, 5)
        optimizers[0].zero_grad()
        plain(x).square().mean().backward()
        optimizers[0].step()
        store = recoup.GradStore(ours.parameters())
        store.backward(ours(x).square().mean(), scaler=scaler)
        if unscales:
            assert not store.unscale_(scaler, optimizers[1])
        store.step(optimizers[1], scaler=scaler)
        scaler.update()
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(one, other)


# -- dividing twice, or not at all -----------------------------------------------------------------


def test_unscaling_twice_is_an_error_and_nothing_is_lost():
    params = [nn.Parameter(torch.ones(2))]
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), scaler_of()
    store, other = collected(params, scaler), collected(params, scaler)
    store.unscale_(scaler, optimizer)
    with pytest.raises(GradientError, match="unscaled before"):
        store.unscale_(scaler, optimizer)
    with pytest.raises(GradientError, match="Merge stores first"):
        other.unscale_(scaler, optimizer)
    assert torch.equal(store[params[0]], torch.full((2,), 3.0))
    assert torch.equal(other[params[0]], torch.full((2,), 24.0))
    store.step(optimizer, scaler=scaler)
    assert torch.equal(params[0], torch.full((2,), -2.0))


@pytest.mark.parametrize("how", ["updated", "another", "loaded"])
def test_what_was_unscaled_is_not_unscaled_again_by_the_step(how):
    """Torch itself cannot know, and divides a second time."""
    layer = nn.Linear(2, 1, bias=False)
    params = list(layer.parameters())
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), scaler_of()
    store = collected(params, scaler)
    store.unscale_(scaler, optimizer)
    if how == "updated":
        scaler.update()
    elif how == "another":
        scaler = scaler_of()
    else:
        state = store.state_dict(layer)
        store, scaler = recoup.GradStore(params), scaler_of()
        store.load_state_dict(state, layer)
    before = params[0].detach().clone()
    with pytest.raises(GradientError, match="unscale it again"):
        store.step(optimizer, scaler=scaler)
    assert torch.equal(params[0], before)
    store.step(optimizer)
    assert torch.equal(params[0], before - 3.0)


def test_stores_with_another_scale_or_none():
    params = [nn.Parameter(torch.ones(2))]
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), scaler_of()
    unscaled = collected(params, scaler)
    unscaled.unscale_(scaler, optimizer)
    first, second, plain = (
        collected(params, scaler),
        collected(params, scaler_of(4.0)),
        recoup.GradStore(params).add_(params[0], torch.ones(2)),
    )
    stores = [unscaled, first, second, plain]
    before = [store[params[0]].clone() for store in stores]
    for one in stores:
        for other in stores:
            if one is not other:
                with pytest.raises(GradientError, match="one scale"):
                    one.extend_(other)
                with pytest.raises(GradientError, match="one scale"):
                    one + other
                with pytest.raises(GradientError, match="one scale"):
                    recoup.GradStore().extend_(one, other)
                with pytest.raises(GradientError, match="one scale"):
                    recoup.step(optimizer, one, other, scaler=scaler)
    with pytest.raises(GradientError, match="the scale of `scaler` is 8 now"):
        second.step(optimizer, scaler=scaler)
    with pytest.raises(GradientError, match="`scaler` was not given"):
        first.step(optimizer)
    for store, value in zip(stores, before, strict=True):
        assert torch.equal(store[params[0]], value)


def test_a_parameter_of_two_optimizers_is_not_divided_twice():
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    scaler = scaler_of()
    first, second = torch.optim.SGD(params, lr=1.0), torch.optim.SGD(params[1:], lr=1.0)
    store = collected(params, scaler)
    with pytest.raises(GradientError, match="belongs to 2 of the optimizers"):
        store.unscale_(scaler, first, second)
    with pytest.raises(GradientError, match="was not given the optimizers of all"):
        store.unscale_(scaler, second)
    store.unscale_(scaler, first, first)
    assert all(bool((each == 3.0).all()) for each in store.values())


def test_gradients_on_another_device_than_their_parameters():
    param = nn.Parameter(torch.ones(2, device="meta"))
    store = recoup.GradStore([param], device="cpu").add_(param, torch.ones(2))
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    with pytest.raises(GradientError, match=r"on cpu, and a scaler needs it on meta"):
        store.unscale_(scaler, torch.optim.SGD([param], lr=1.0))
    assert torch.equal(store[param], torch.ones(2))


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_that_fails_after_the_division(name, unscales):
    """It divides in place, and leaves no trace: the store may not pass for scaled."""
    params = [nn.Parameter(torch.ones(2))]
    optimizer, scaler = OPTIMIZERS[name](params), scaler_of()
    fails = [True]

    def hook(*_):
        if fails.pop():
            raise OSError("the power went")

    if "fused" in name:
        optimizer.register_step_post_hook(hook)  # it divides within the step
    else:
        optimizer.register_step_pre_hook(hook)
    store = collected(params, scaler)
    if unscales:
        store.unscale_(scaler, optimizer)
    with pytest.raises(OSError, match="power"):
        store.step(optimizer, scaler=scaler)
    fails.append(False)
    if unscales:
        assert torch.equal(store[params[0]], torch.full((2,), 3.0))
        store.step(optimizer, scaler=scaler)
        assert len(store) == 0
    else:
        with pytest.raises(GradientError, match="half way"):
            store.step(optimizer, scaler=scaler)
        store.clear()
        assert store.norm() == 0


# -- float16 ---------------------------------------------------------------------------------------


def halves(is_sparse):
    torch.manual_seed(2)
    return nn.Embedding(6, 3, sparse=is_sparse).half()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_of_float16_are_unscaled_in_float32(is_sparse):
    """What torch refuses for `.grad` in float16 works, and does not overflow in between."""
    layer = halves(is_sparse)
    before = layer.weight.detach().float()
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1.0), scaler_of(2.0**14)
    store = recoup.GradStore(layer.parameters())
    for _ in range(3):
        store.backward(layer(torch.tensor([1, 1, 4])).sum(), scaler=scaler)
    assert store[layer.weight].dtype is torch.float32
    assert store.norm() > 65504
    assert not store.unscale_(scaler, optimizer)
    store.step(optimizer, scaler=scaler)
    scaler.update()
    counts = torch.tensor([0, 6, 0, 0, 3, 0]).float()[:, None]
    torch.testing.assert_close(layer.weight.float(), before - counts, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_what_is_not_finite_in_float16_is_skipped(is_sparse):
    layer = halves(is_sparse)
    before = layer.weight.detach().clone()
    scaler = scaler_of(2.0**15)
    store = recoup.GradStore(layer.parameters(), dtype=torch.float16)
    store.backward(layer(torch.tensor([1, 1, 4])).sum(), scaler=scaler)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16"):
        store.step(optimizer, scaler=scaler)
    assert torch.equal(layer.weight, before)
    store = recoup.GradStore(layer.parameters())
    store.backward(layer(torch.tensor([1, 4])).sum() * INF, scaler=scaler)
    assert store.unscale_(scaler, optimizer)
    store.step(optimizer, scaler=scaler)
    assert torch.equal(layer.weight, before)


def test_a_store_that_was_emptied_one_by_one_forgets_its_scale():
    model, scaler = nn.Linear(3, 2), torch.amp.GradScaler("cpu", init_scale=4.0)
    store = recoup.GradStore(model.parameters())
    store.backward(model(torch.ones(1, 3)).sum(), scaler=scaler)
    while store:
        store.popitem()
    with store.collecting():
        model(torch.ones(1, 3)).sum().backward()
    store.step(torch.optim.SGD(model.parameters(), lr=0.1))  # which asks for no scaler
    assert not store
