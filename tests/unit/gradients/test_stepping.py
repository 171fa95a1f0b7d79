"""Steps from stores: what is applied and what is left, with scalers, and after failures."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import recoup
from recoup import GradStore
from recoup.errors import GradientError
from tests.unit.gradients.cases import holding


def parameters(count=3, size=4):
    return [nn.Parameter(torch.randn(size, dtype=torch.float64)) for _ in range(count)]


def twins(count=3):
    params = parameters(count)
    return params, copy.deepcopy(params)


def same(one, other):
    return all(map(torch.equal, one, other))


class FailsOnce(torch.optim.SGD):
    def step(self, closure=None):
        self.step = super().step
        raise OSError("the power went")


# -- what is applied -------------------------------------------------------------------------------


def test_without_gradients_nothing_happens():
    params, before = twins()
    stranger, calls = parameters(1), []
    optimizer = torch.optim.AdamW(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for param in params:
        param.grad = torch.ones_like(param)
    GradStore(params).step(optimizer)
    recoup.step(optimizer, GradStore(params), GradStore())
    store = holding(stranger, 1.0)
    store.step(optimizer, unknown="ignore")
    store.step(optimizer, unknown="ignore", scaler=torch.amp.GradScaler("cpu"))
    assert len(store) == 1
    assert not calls
    assert same(params, before)
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("missing", ["skip", "zero"])
def test_absent_is_not_zero(missing):
    """An absent parameter stays; zero decays it and moves its momentum, but not a frozen one."""
    params, plain = twins()
    frozen = params[2].requires_grad_(requires_grad=False).clone()
    params[1].grad = stale = torch.full_like(params[1], 7.0)
    ours, theirs = (torch.optim.AdamW(e, lr=0.1, weight_decay=0.5) for e in (params, plain))
    holding(params, 1.0, 1.0).step(ours)
    holding(params, 1.0).step(ours, missing=missing)
    ones = torch.ones_like(plain[0])
    for second in (ones, None if missing == "skip" else ones * 0):
        plain[0].grad, plain[1].grad = ones, second
        theirs.step()
    assert same(params[:2], plain[:2])
    assert torch.equal(params[2], frozen)
    assert params[1].grad is stale
    assert bool((stale == 7).all()), "an old gradient was lost"


@pytest.mark.parametrize("consume", [True, False])
def test_several_stores_are_their_sum(consume):
    """One that is named twice counts twice."""
    params, plain = twins()
    stores = [
        holding(params, 1.0, None, 2.0),
        holding(params, 3.0, 4.0),
        holding(params, None, 5.0),
    ]
    kept = [store.clone() for store in stores]
    ours, theirs = (torch.optim.AdamW(each, lr=0.1) for each in (params, plain))
    recoup.step(ours, *stores, stores[1], consume=consume)
    for param, value in zip(plain, (7.0, 13.0, 2.0), strict=True):
        param.grad = torch.full_like(param, value)
    theirs.step()
    assert same(params, plain)
    for store, before in zip(stores, kept, strict=True):
        assert list(store) == ([] if consume else list(before))
        assert store.weight == (0 if consume else 1)
        assert all(torch.equal(store[each], before[each]) for each in store)


def test_groups_and_two_optimizers_that_share_a_store():
    params, plain = twins(4)

    def build(each):
        groups = [{"params": each[:1], "lr": 0.5}, {"params": each[1:2], "weight_decay": 0.3}]
        return torch.optim.AdamW(groups, lr=0.1), torch.optim.SGD(each[2:], lr=0.2, momentum=0.9)

    ours, theirs = build(params), build(plain)
    for _ in range(3):
        store = holding(params, 1.0, 2.0, 3.0, 4.0)
        places = {each: gradient.data_ptr() for each, gradient in store.items()}
        parts = store.split(*ours)
        assert len(store) == 0
        assert {e: g.data_ptr() for part in parts for e, g in part.items()} == places
        for value, param in enumerate(plain, start=1):
            param.grad = torch.full_like(param, float(value))
        for part, optimizer, reference in zip(parts, ours, theirs, strict=True):
            part.step(optimizer)
            reference.step()
    assert same(params, plain)
    store = holding(params, 1.0, 2.0, 3.0, 4.0)
    store.step(ours[1], unknown="ignore")
    assert set(store) == set(params[:2])
    store.step(ours[0])
    assert len(store) == 0


def test_as_grad_puts_back_what_was_there():
    params = parameters()
    stale = params[1].grad = torch.ones_like(params[1])
    names = [(str(place), param) for place, param in enumerate(params)]
    for fails in (False, True):
        store = holding(params, 2.0)
        try:
            with store.as_grad(names):
                assert torch.equal(params[0].grad, torch.full_like(params[0], 2.0))
                assert params[1].grad is None
                assert not fails or 1 / 0
        except ZeroDivisionError:
            assert torch.equal(store[params[0]], torch.full_like(params[0], 2.0))
        else:
            assert len(store) == 0
        assert params[0].grad is None
        assert params[1].grad is stale
    with store.as_grad(params, consume=False):
        params[0].grad.zero_()
        holding(params, 10.0).step(torch.optim.SGD(params, lr=1.0))  # another store, within
        assert bool((params[0].grad == 0).all())
    assert torch.equal(store[params[0]], torch.full_like(params[0], 2.0))


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stores", [1, 3])
@pytest.mark.parametrize("consume", [True, False])
def test_a_step_that_fails_can_be_tried_again(consume, num_stores):
    params, before = twins()
    stores = [holding(params, 3.0, 1.0) for _ in range(num_stores)]
    optimizer = FailsOnce(params, lr=1.0)
    with pytest.raises(OSError, match="power"):
        recoup.step(optimizer, *stores, consume=consume)
    assert same(params, before)
    recoup.step(optimizer, *stores, consume=consume)
    assert torch.equal(params[0], before[0] - 3.0 * num_stores)


CHANGED = {"momentum": 0.5, "nesterov": True, "foreach": True}  # which adds momentum to gradients


HALF_WAY = [
    (kind, how, when)
    for kind in ("own", "cast", "kept")
    for how in ("changed", "divided", "divided, fused", "unscaled")
    for when in ("pre", "post")
    if kind != "cast" or how == "changed"
]


@pytest.mark.parametrize(("kind", "how", "when"), HALF_WAY)
def test_a_step_that_fails_after_changing_gradients(kind, how, when):
    """Only copies of them may be tried again: a store may not pass for what it was."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16 if kind == "cast" else torch.float32))
    scaler = None if how == "changed" else scaler_of()
    settings = CHANGED if how == "changed" else {"fused": "fused" in how}
    optimizer = torch.optim.SGD([param], lr=1.0, **settings)
    fails = [True]

    def hook(*_):
        if fails.pop():
            raise OSError("the power went")

    getattr(optimizer, f"register_step_{when}_hook")(hook)
    store, consume = collected([param], scaler), kind != "kept"
    if how == "unscaled":
        store.unscale_(scaler, optimizer)
    before = store[param].clone()
    with pytest.raises(OSError, match="power"):
        store.step(optimizer, scaler=scaler, consume=consume)
    fails.append(False)
    is_changed = when == "post" if how == "changed" else "divided" in how
    if kind == "own" and is_changed:
        with pytest.raises(GradientError, match="half way"):
            store.step(optimizer)
        store.clear()
        assert store.norm() == 0
    else:
        assert torch.equal(store[param], before)
        if "divided" not in how:  # a scaler unscales for an optimizer once
            store.step(optimizer, scaler=scaler)
            assert len(store) == 0


@pytest.mark.parametrize("use", ["step", "kept", "unscale", "as_grad"])
def test_gradients_with_a_graph_are_not_changed_in_place(use):
    """The graph needs them, and autograd gives one object to both sides of a sum."""
    x, ends = torch.tensor([1.0, 2.0], requires_grad=True), []
    for with_graph in (False, True):
        params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        scaler = scaler_of(4.0) if use == "unscale" else None
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
        for _ in range(3):
            store = GradStore(params)
            loss = ((params[0] + params[1]) * x.pow(3)).sum()
            store.backward(loss, create_graph=with_graph, scaler=scaler)
            if use == "unscale":
                store.unscale_(scaler, optimizer)
                assert all(torch.equal(each, x.pow(3)) for each in store.values())
                assert all(each.requires_grad == with_graph for each in store.values())
            if use == "as_grad":
                with store.as_grad(params, consume=False):
                    params[0].grad.zero_()
                    assert torch.equal(params[1].grad, x.pow(3))
            store.step(optimizer, scaler=scaler, consume=use != "kept")
            if use == "unscale":
                scaler.update()
            if use == "kept" and with_graph:
                (found,) = torch.autograd.grad(store[params[0]].sum(), x)
                torch.testing.assert_close(found, 3 * x.detach() ** 2)
        ends.append(params)
    assert same(*ends)


# -- scalers ---------------------------------------------------------------------------------------


def scaler_of(scale=8.0, **settings):
    return torch.amp.GradScaler("cpu", init_scale=scale, **settings)


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def collected(params, scaler):
    store = GradStore(params)
    store.backward(sum((3.0 * each).sum() for each in params), scaler=scaler)
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
            batches[-1, 0, 0] = math.inf if step % 2 else math.nan

        optimizers[0].zero_grad()
        for x in batches:
            scalers[0].scale(plain(x).square().mean()).backward()
        if way in ("unscale", "clip"):
            scalers[0].unscale_(optimizers[0])
        if way == "clip":
            want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        scalers[0].step(optimizers[0])
        scalers[0].update()

        stores = [GradStore(ours.parameters())]
        for x in batches:
            if way == "several":
                stores.append(GradStore(ours.parameters()))
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


def test_two_optimizers_and_one_of_them_with_an_infinity():
    """The scaler skips that one alone."""
    ends, x = [], torch.full((2, 5), 1e30)
    for is_ours in (False, True):
        model, scaler = model_of(), scaler_of()
        loss = model[0](x).square().sum() * 1e30 + model[2](torch.ones(2, 4)).sum()
        optimizers = [torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 2)]
        if is_ours:
            store = GradStore(model.parameters())
            store.backward(loss, scaler=scaler)
            assert store.unscale_(scaler, *optimizers)
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
    before = [*model_of().parameters()]
    assert [torch.equal(*each) for each in zip(ends[1][1], before, strict=True)] == [True] * 2 + [
        False
    ] * 2


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_that_is_not_enabled(unscales):
    params, before = twins(1)
    optimizer, scaler = torch.optim.SGD(params, lr=1.0), torch.amp.GradScaler("cpu", enabled=False)
    store = collected(params, scaler)
    assert not unscales or not store.unscale_(scaler, optimizer)
    store.step(optimizer, scaler=scaler)
    scaler.update()
    assert torch.equal(params[0], before[0] - 3.0)


@pytest.mark.parametrize("how", ["updated", "another", "loaded"])
def test_what_was_unscaled_is_not_unscaled_again_by_the_step(how):
    """Torch itself cannot know, and divides a second time."""
    layer = nn.Linear(2, 1, bias=False)
    params, scaler = list(layer.parameters()), scaler_of()
    optimizer = torch.optim.SGD(params, lr=1.0)
    store = collected(params, scaler)
    store.unscale_(scaler, optimizer, optimizer)
    assert bool((store[params[0]] == 3.0).all())
    if how == "updated":
        scaler.update()
    elif how == "another":
        scaler = scaler_of()
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
    store = collected(list(layer.parameters()), scaler)
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


def test_gradients_on_another_device_than_their_parameters():
    param = nn.Parameter(torch.ones(2, device="meta"))
    store = GradStore([param], device="cpu").add_(param, torch.ones(2))
    scaler = scaler_of()
    scaler.scale(torch.ones(()))
    with pytest.raises(GradientError, match=r"another device.*`to`"):
        store.unscale_(scaler, torch.optim.SGD([param], lr=1.0))
    assert torch.equal(store[param], torch.ones(2))


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
