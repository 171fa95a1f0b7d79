"""Steps from stores: what is applied, what is left, after failures, and with scalers of losses."""

from __future__ import annotations

import copy
import math
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import recoup
from recoup import GradStore
from recoup.errors import GradientError
from tests.unit.gradients.cases import holding, same, scaler_of, tripled


def twins():
    params = [nn.Parameter(torch.randn(4, dtype=torch.float64)) for _ in range(3)]
    return params, copy.deepcopy(params)


def plainly(optimizer, params, *values):
    for param, value in zip(params, values, strict=False):
        param.grad = None if value is None else torch.full_like(param, value)
    optimizer.step()


@pytest.mark.parametrize("missing", ["skip", "zero"])
def test_absent_is_not_zero(missing):
    params, plain = twins()
    frozen = params[2].requires_grad_(requires_grad=False).clone()
    params[1].grad = stale = torch.full_like(params[1], 7.0)
    ours, theirs = (torch.optim.AdamW(e, lr=0.1, weight_decay=0.5) for e in (params, plain))
    holding(params, 1.0, 1.0).step(ours)
    holding(params, 1.0).step(ours, missing=missing)
    plainly(theirs, plain, 1.0, 1.0)
    plainly(theirs, plain, 1.0, None if missing == "skip" else 0.0)
    assert same(params[:2], plain[:2])
    assert torch.equal(params[2], frozen)
    assert params[1].grad is stale
    assert bool((stale == 7).all())


@pytest.mark.parametrize("consume", [True, False])
def test_several_stores_are_their_sum_also_when_a_step_that_failed_is_tried_again(consume):
    params, plain = twins()
    stores = [holding(params, *each) for each in ((1.0, None, 2.0), (3.0, 4.0), (None, 5.0))]
    kept, fails = [store.clone() for store in stores], [False, True]
    ours, theirs = (torch.optim.AdamW(each, lr=0.1) for each in (params, plain))
    ours.register_step_pre_hook(lambda *_: 1 / 0 if fails.pop() else None)
    with pytest.raises(ZeroDivisionError):
        recoup.step(ours, *stores, stores[1], consume=consume)
    assert same(params, plain)
    recoup.step(ours, *stores, stores[1], consume=consume)
    plainly(theirs, plain, 7.0, 13.0, 2.0)
    assert same(params, plain)
    for store, before in zip(stores, kept, strict=True):
        assert list(store) == ([] if consume else list(before))
        assert store.weight == (0 if consume else 1)
        assert all(torch.equal(store[each], before[each]) for each in store)


def test_as_grad_puts_back_what_was_there():
    params, _ = twins()
    stale = params[1].grad = torch.ones_like(params[1])
    twos = torch.full_like(params[0], 2.0)
    for fails in (False, True):
        store = holding(params, 2.0)
        with suppress(ZeroDivisionError), store.as_grad(params):
            assert torch.equal(params[0].grad, twos)
            assert params[1].grad is None
            assert not fails or 1 / 0
        assert len(store) == fails
        assert [each.grad for each in params] == [None, stale, None]
    with store.as_grad(params, consume=False):
        params[0].grad.zero_()
        holding(params, 10.0).step(torch.optim.SGD(params, lr=1.0))  # another store, within
        assert bool((params[0].grad == 0).all())
    assert torch.equal(store[params[0]], twos)


HALF_WAY = [(kind, how) for kind in ("own", "kept")
            for how in ("changed", "divided", "divided, fused", "unscaled")]  # fmt: skip


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize(("kind", "how"), [("cast", "changed"), *HALF_WAY])
def test_a_step_that_fails_after_changing_gradients(kind, how, when):
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16 if kind == "cast" else torch.float32))
    scaler, settings = scaler_of(), {"fused": "fused" in how}
    if how == "changed":  # momentum is added to gradients
        scaler, settings = None, {"momentum": 0.5, "nesterov": True, "foreach": True}
    optimizer = torch.optim.SGD([param], lr=1.0, **settings)
    fails = [True]

    def hook(*_):
        if fails.pop():
            raise OSError("the power went")

    getattr(optimizer, f"register_step_{when}_hook")(hook)
    store, consume = tripled([param], scaler), kind != "kept"
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


TAKEN = {
    name: set(each.__init__.__annotations__)
    for name, each in sorted(vars(torch.optim).items())
    if isinstance(each, type) and name not in ("Optimizer", "LBFGS", "SparseAdam")
}
VARIANTS = [{"foreach": False}, {"foreach": True}, {"fused": True}, {"maximize": True}]
VARIANTS += [{"nesterov": True, "momentum": 0.9, "foreach": True}]
VARIANTS += [{"weight_decay": 0.1, "foreach": True, "maximize": True}]
CASES = [(name, how) for name in TAKEN for how in VARIANTS if how.keys() <= TAKEN[name]]


def matrices(dtype=torch.float32):
    torch.manual_seed(1)
    shapes = [(4, 3), (5, 5), (1, 7), (2, 6)]
    return [nn.Parameter(torch.randn(*each, dtype=dtype)) for each in shapes]


def run_both(name, settings, *, dtype=torch.float32, consume=True, **preset):
    def clip(optimizer, *_):
        torch.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.5)

    plain, ours = matrices(dtype), matrices(dtype)
    optimizers = [vars(torch.optim)[name](each, lr=0.05, **settings) for each in (plain, ours)]
    # These would warn, an error here, if `optimizer.step` was not called before their own.
    schedules = [lr_scheduler.StepLR(each, 2) for each in optimizers]
    for each in optimizers:
        each.register_step_pre_hook(clip)
    for each in (*plain, *ours):
        each.grad_dtype = preset.get("grad_dtype", each.grad_dtype)
    for step in range(4):
        store = GradStore(ours)
        for place, (one, other) in enumerate(zip(plain, ours, strict=True)):
            # What has no gradient in a step has an old one lying around.
            one.grad, other.grad = None, torch.full_like(other, 100.0, dtype=other.grad_dtype)
            if step == place:
                continue
            gradient = torch.randn(one.shape)
            one.grad = gradient.to(preset.get("grad_dtype") or dtype)
            store.add_(other, gradient)
        before = {each: value.clone() for each, value in store.items()}
        stale = [each.grad for each in ours]
        optimizers[0].step()
        assert store.step(optimizers[1], consume=consume) is None
        assert all(each.grad is value for each, value in zip(ours, stale, strict=True))
        assert all(bool((value == 100).all()) for value in stale)
        assert len(store) == 0 if consume else same(store.values(), before.values())
        assert same(ours, plain)
        for each in schedules:
            each.step()
    states = [each.state_dict() for each in reversed(optimizers)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert [each.grad_dtype for each in ours] == [each.grad_dtype for each in plain]


@pytest.mark.sampled(19)
@pytest.mark.parametrize("consume", [True, False], ids=["consumed", "kept"])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_step_is_that_of_torch(name, settings, consume):
    run_both(name, settings, consume=consume)


@pytest.mark.parametrize("name", TAKEN)
def test_parameters_of_16_bits_have_float32_sums_or_the_type_that_was_asked_for(name):
    run_both(name, {}, dtype=torch.bfloat16)
    for grad_dtype in (torch.float32, None) if name in ("SGD", "Adafactor", "Muon") else ():
        run_both(name, {}, dtype=torch.bfloat16, grad_dtype=grad_dtype)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's Adagrad
@pytest.mark.parametrize(
    "windows", [[[[1, 1, 4]], [[0, 4, 0]]], [[[0, 1], [2, 3], [3, 4], [4, 5]], [[2, 2]]]]
)
@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_gradients_of_few_and_of_most_rows(name, windows):
    plain = nn.Embedding(6, 3, sparse=True)
    ours = copy.deepcopy(plain)
    optimizers = [vars(torch.optim)[name](each.parameters(), lr=0.1) for each in (plain, ours)]
    for window in windows:
        store = GradStore(ours.parameters())
        plain.weight.grad = None
        for rows in map(torch.tensor, window):
            plain(rows).pow(2).sum().backward()
            store.backward(ours(rows).pow(2).sum())
        optimizers[0].step()
        store.step(optimizers[1])
    found, want = ((o.param_groups[0]["params"], [*o.state.values()]) for o in optimizers)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7)


def optimizers_of(model):
    fused = torch.optim.AdamW(model[2].parameters(), lr=0.1, fused=True)
    return torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), fused


@pytest.mark.parametrize(
    ("way", "windows"), [("step", 1), ("unscale", 3), ("clip", 1), ("several", 3), ("kept", 1)]
)
def test_fifty_steps_with_infinities_are_those_of_the_standard_loop(way, windows):
    """Of two optimizers, of which the scaler may skip one alone."""
    plain = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    ours = copy.deepcopy(plain)
    theirs, own = optimizers_of(plain), optimizers_of(ours)
    scaler, scaler_of_ours = (scaler_of(2.0**10, growth_interval=4) for _ in range(2))
    scales = set()
    for step in range(50):
        batches = torch.randn(windows, 6, 5)
        if step % 7 == 5 or step in (20, 21):
            batches[-1, 0, 0] = math.nan
        factor = math.inf if step % 8 == 6 else 1.0  # for the last layer alone
        stores = [GradStore(ours.parameters()) for _ in range(windows if way == "several" else 1)]
        plain.zero_grad()
        for place, x in enumerate(batches):
            losses = [m(x).square().mean() + factor * m[2].bias.sum() for m in (plain, ours)]
            scaler.scale(losses[0]).backward()
            stores[place % len(stores)].backward(losses[1], scaler=scaler_of_ours)
        if way in ("unscale", "clip"):
            for optimizer in theirs:
                scaler.unscale_(optimizer)
            found = stores[0].unscale_(scaler_of_ours, *own)
            assert bool(found) != bool(batches.isfinite().all() and factor == 1)
        if way == "clip":
            norms = nn.utils.clip_grad_norm_(plain.parameters(), 0.1), stores[0].clip_norm_(0.1)
            torch.testing.assert_close(*norms, rtol=0, atol=0, equal_nan=True)
        parts = [store.split(*own) for store in stores]
        assert not any(map(len, stores))
        for optimizer, mine, each in zip(theirs, own, zip(*parts, strict=True), strict=True):
            scaler.step(optimizer)
            recoup.step(mine, *each, scaler=scaler_of_ours, consume=way != "kept")
            assert way == "kept" or not any(map(len, each))
        scaler.update()
        scaler_of_ours.update()
        state = scaler.state_dict()
        assert scaler_of_ours.state_dict() == state
        scales.add((state["scale"], state["_growth_tracker"]))
        assert same(plain.parameters(), ours.parameters()), step
        assert all(each.grad is None for each in ours.parameters())
    assert len(scales) > 8


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_that_is_not_enabled(unscales):
    params, scaler = [nn.Parameter(torch.ones(4))], torch.amp.GradScaler("cpu", enabled=False)
    optimizer, store = torch.optim.SGD(params, lr=1.0), tripled(params, scaler)
    assert not unscales or not store.unscale_(scaler, optimizer)
    store.step(optimizer, scaler=scaler)
    scaler.update()
    assert bool((params[0] == -2.0).all())


@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_was_unscaled_is_not_unscaled_again_by_the_step(is_loaded):
    layer, scaler = nn.Linear(2, 1, bias=False), scaler_of()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    store, before = tripled([layer.weight], scaler), layer.weight.detach().clone()
    store.unscale_(scaler, optimizer, optimizer)
    scaler.update()
    if is_loaded:
        state = store.state_dict(layer)
        store, scaler = GradStore(layer.parameters()), scaler_of()
        store.load_state_dict(state, layer)
    with pytest.raises(GradientError, match="unscale it again"):
        store.step(optimizer, scaler=scaler)
    store.step(optimizer)
    assert torch.equal(layer.weight, before - 3.0)


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
    store.backward(layer(torch.ones(1, 2)).sum())
    store.step(torch.optim.SGD(layer.parameters(), lr=0.1))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_of_float16_are_unscaled_in_float32(is_sparse):
    layer = nn.Embedding(6, 3, sparse=is_sparse).half()
    before, store = layer.weight.detach().float(), GradStore(layer.parameters())
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1.0), scaler_of(2.0**14)
    counts = torch.tensor([0, 6, 0, 0, 3, 0]).float()[:, None]
    for is_infinite in (False, True):
        factor = math.inf if is_infinite else 1.0
        for _ in range(3):
            store.backward(layer(torch.tensor([1, 1, 4])).sum() * factor, scaler=scaler)
        assert store.norm() > 65504
        assert bool(store.unscale_(scaler, optimizer)) is is_infinite
        store.step(optimizer, scaler=scaler)
        scaler.update()
        torch.testing.assert_close(layer.weight.float(), before - counts, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_gradients_are_installed_in_the_strides_of_their_parameter(layout):
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    gradient = torch.randn(4, 3, 2, 2)
    store = GradStore([weight]).add_(weight, gradient.contiguous(memory_format=layout))
    with store.as_grad([weight]):
        assert weight.grad.stride() == weight.stride()
        assert torch.equal(weight.grad, gradient)
