"""Steps from stores: what is applied, what is left, and what is said when that cannot be."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import GradientError


def parameters(count=3, size=4):
    return [nn.Parameter(torch.randn(size, dtype=torch.float64)) for _ in range(count)]


def holding(params, *gradients, **settings):
    """A store; a number stands for a gradient full of it."""
    store = recoup.GradStore(params, **settings)
    for param, gradient in zip(params, gradients, strict=False):
        if gradient is not None:
            store.add_(param, torch.full_like(param, gradient))
    store.weight = 1.0
    return store


def assert_untouched(params, before, optimizer):
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value)
    assert optimizer.state_dict()["state"] == {}


class FailsOnce(torch.optim.SGD):
    """Fails once, before or after it has done its work."""

    def __init__(self, params, when, **settings):
        super().__init__(params, **settings)
        self.when = when

    def step(self, closure=None):
        when, self.when = self.when, None
        if when == "before":
            raise OSError("the power went")
        super().step()
        if when == "after":
            raise OSError("the power went")


# -- what is applied -------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "recoup.step", "zero gradients"])
def test_without_gradients_nothing_happens(call):
    params = parameters()
    before, calls = copy.deepcopy(params), []
    optimizer = torch.optim.AdamW(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for param in params:
        param.grad = torch.ones_like(param)
    empty, stranger = recoup.GradStore(params), parameters(1)
    match call:
        case "step":
            empty.step(optimizer)
        case "recoup.step":
            recoup.step(optimizer, empty, recoup.GradStore())
        case _:
            store = holding(stranger, 1.0)
            store.step(optimizer, unknown="ignore")
            store.step(optimizer, unknown="ignore", scaler=torch.amp.GradScaler("cpu"))
            assert len(store) == 1
    assert not calls
    assert_untouched(params, before, optimizer)


def test_absent_is_not_zero():
    """An absent parameter stays; zero decays it and moves its momentum."""
    ends = {}
    for missing in ("skip", "zero"):
        params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        params[1].grad = torch.full((2,), 7.0)
        optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)
        holding(params, 1.0, 1.0).step(optimizer)
        middle = params[1].detach().clone()
        holding(params, 1.0).step(optimizer, missing=missing)
        assert torch.equal(params[1], middle) == (missing == "skip")
        assert torch.equal(params[1].grad, torch.full((2,), 7.0)), "an old gradient was lost"
        ends[missing] = params[1].detach()
        plain = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        reference = torch.optim.AdamW(plain, lr=0.1, weight_decay=0.5)
        for second in (torch.ones(2), None if missing == "skip" else torch.zeros(2)):
            plain[0].grad, plain[1].grad = torch.ones(2), second
            reference.step()
        assert torch.equal(ends[missing], plain[1])
    assert not torch.equal(ends["skip"], ends["zero"])


def test_zero_leaves_frozen_parameters_alone():
    params = parameters()
    params[2].requires_grad_(requires_grad=False)
    before = params[2].detach().clone()
    optimizer = torch.optim.SGD(params, lr=0.1, weight_decay=0.5)
    holding(params, 1.0).step(optimizer, missing="zero")
    assert torch.equal(params[2], before)


def test_several_stores_are_their_sum_and_consumed():
    params, same = parameters(), parameters()
    for one, other in zip(params, same, strict=True):
        other.data = one.detach().clone()
    stores = [
        holding(params, 1.0, None, 2.0),
        holding(params, 3.0, 4.0),
        holding(params, None, 5.0),
    ]
    optimizers = [torch.optim.AdamW(each, lr=0.1) for each in (params, same)]
    kept = [store.clone() for store in stores]
    recoup.step(optimizers[0], *stores, consume=False)
    for store, before in zip(stores, kept, strict=True):
        assert list(store) == list(before)
        assert all(torch.equal(store[each], before[each]) for each in store)
    holding(same, 4.0, 9.0, 2.0).step(optimizers[1])
    assert all(torch.equal(*pair) for pair in zip(params, same, strict=True))
    recoup.step(optimizers[0], *stores)
    assert [len(store) for store in stores] == [0, 0, 0]
    assert [store.weight for store in stores] == [0, 0, 0]
    holding(same, 4.0, 9.0, 2.0).step(optimizers[1])
    assert all(torch.equal(*pair) for pair in zip(params, same, strict=True))


@pytest.mark.parametrize("consume", [True, False])
def test_a_store_that_is_named_twice_is_applied_twice(consume):
    param = nn.Parameter(torch.zeros(2))
    store, other = holding([param], 1.0), holding([param], 4.0)
    recoup.step(torch.optim.SGD([param], lr=1.0), store, other, store, consume=consume)
    assert torch.equal(param, torch.full((2,), -6.0))
    assert len(store) == (0 if consume else 1)


@pytest.mark.parametrize("num_stores", [2, 6])
def test_summing_stores_takes_no_second_set_of_gradients(num_stores):
    params = parameters(count=8, size=1000)
    num_bytes = 8 * 1000
    stores = [holding(params, *range(8)) for _ in range(num_stores)]
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=False)
    cost = recoup.measure(lambda: recoup.step(optimizer, *stores), device="cpu", repeats=0)
    assert cost.peak_bytes <= num_bytes
    stores = [holding(params, *range(8)) for _ in range(num_stores)]
    cost = recoup.measure(
        lambda: recoup.step(optimizer, *stores, consume=False), device="cpu", repeats=0
    )
    assert 8 * num_bytes <= cost.peak_bytes <= 9 * num_bytes


def test_groups_and_two_optimizers_that_share_a_store():
    params, same = parameters(4), parameters(4)
    for one, other in zip(params, same, strict=True):
        other.data = one.detach().clone()

    def build(each):
        groups = [{"params": each[:1], "lr": 0.5}, {"params": each[1:2], "weight_decay": 0.3}]
        return torch.optim.AdamW(groups, lr=0.1), torch.optim.SGD(each[2:], lr=0.2, momentum=0.9)

    ours, theirs = build(params), build(same)
    for _ in range(3):
        store = holding(params, 1.0, 2.0, 3.0, 4.0)
        for value, param in enumerate(same, start=1):
            param.grad = torch.full_like(param, float(value))
        parts = store.split(*ours)
        assert len(store) == 0
        for part, optimizer, reference in zip(parts, ours, theirs, strict=True):
            part.step(optimizer)
            reference.step()
    assert all(torch.equal(*pair) for pair in zip(params, same, strict=True))
    store = holding(params, 1.0, 2.0, 3.0, 4.0)
    store.step(ours[1], unknown="ignore")
    assert set(store) == set(params[:2])
    store.step(ours[0])
    assert len(store) == 0


# -- what is refused before anything changes -------------------------------------------------------


def refusals():
    stranger = parameters(1)

    def frozen(params, optimizer, store):
        params[0].requires_grad_(requires_grad=False)
        return store.step(optimizer)

    return {
        "unknown": (lambda p, o, s: recoup.step(o, s, holding(stranger, 1.0)), r"shape \(4,\)"),
        "missing": (lambda p, o, s: s.step(o, missing="error"), r"no gradient of `c\.weight`"),
        "frozen": (frozen, r"`a\.weight` was frozen"),
        "scale": (lambda p, o, s: recoup.step(o, s, scaled(p)), "one scale"),
        "no scaler": (lambda p, o, s: recoup.step(o, scaled(p), scaled(p)), "`scaler` was not"),
        "other scaler": (
            lambda p, o, s: recoup.step(
                o, scaled(p), scaled(p), scaler=torch.amp.GradScaler("cpu", init_scale=2.0)
            ),
            "is 2 now",
        ),
        "way": (lambda p, o, s: s.step(o, missing="none"), "`missing` is 'none'"),
        "other way": (lambda p, o, s: s.step(o, unknown="skip"), "`unknown` is 'skip'"),
        "no optimizer": (lambda p, o, s: s.step(p), "`optimizer` is a list"),
        "turned round": (lambda p, o, s: recoup.step(s, o), "`stores` contains a AdamW"),
        "nothing": (lambda p, o, s: recoup.step(o), "`stores` is empty"),
    }


def scaled(params):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    store = recoup.GradStore(params)
    store.backward(params[0].sum() + params[1].sum(), scaler=scaler)
    return store


@pytest.mark.parametrize("name", refusals())
def test_a_refusal_changes_nothing(name):
    call, message = refusals()[name]
    params = parameters()
    before = copy.deepcopy(params)
    names = ["a.weight", "b.weight", "c.weight"]
    optimizer = torch.optim.AdamW(list(zip(names, params, strict=True)), lr=0.1)
    store = holding(params, 1.0, 2.0)
    with pytest.raises((GradientError, ValueError), match=message):
        call(params, optimizer, store)
    assert_untouched(params, before, optimizer)
    assert torch.equal(store[params[0]], torch.ones(4).double())
    assert torch.equal(store[params[1]], 2 * torch.ones(4).double())


def test_a_refused_sum_leaves_every_store_what_it_had():
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    stores = [scaled(params), scaled(params)]
    with pytest.raises(GradientError, match="`scaler` was not given"):
        recoup.step(optimizer, *stores)
    assert [len(store) for store in stores] == [2, 2]
    assert float(stores[0].norm()) == float(stores[1].norm())


@pytest.mark.parametrize("holder", ["empty", "full"])
def test_scales_do_not_mix(holder):
    """Neither with what is there, nor among those that come."""
    params = parameters()
    plain, with_scale = holding(params, 1.0), scaled(params)
    store = recoup.GradStore(params) if holder == "empty" else holding(params, 1.0)
    with pytest.raises(GradientError, match="one scale"):
        store.extend_(plain, with_scale)
    with pytest.raises(GradientError, match="one scale"):
        recoup.step(torch.optim.SGD(params), store, plain, with_scale)
    assert (len(plain), len(with_scale)) == (1, 2)
    assert len(store) == (holder == "full")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda params: params[0], r"give \[tensor\]"),
        (lambda params: nn.Linear(2, 2), r"module\.parameters"),
        (lambda params: [{"params": params}], "has a dict in it"),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(given, message):
    params = parameters()
    store = holding(params, 1.0)
    for call in (lambda each: store.as_grad(each).__enter__(), store.split):
        with pytest.raises(ValueError, match=message):
            call(given(params))
    assert len(store) == 1


def test_as_grad_of_pairs_of_name_and_parameter_by_copies():
    layer = nn.Linear(2, 2)
    store = recoup.GradStore.from_backward(layer(torch.ones(2)).sum(), layer.parameters())
    with store.as_grad(layer.named_parameters(), consume=False):
        assert torch.equal(layer.weight.grad, torch.ones(2, 2))
        layer.weight.grad.zero_()
    assert torch.equal(store[layer.weight], torch.ones(2, 2))
    assert len(store) == 2


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stores", [1, 3])
@pytest.mark.parametrize("consume", [True, False])
def test_a_step_that_fails_can_be_tried_again(consume, num_stores):
    params = parameters()
    before = copy.deepcopy(params)
    stale = params[0].grad = torch.full_like(params[0], 9.0)
    stores = [holding(params, 3.0, 1.0) for _ in range(num_stores)]
    optimizer = FailsOnce(params, "before", lr=1.0)
    with pytest.raises(OSError, match="power"):
        recoup.step(optimizer, *stores, consume=consume)
    assert params[0].grad is stale
    assert all(torch.equal(*pair) for pair in zip(params, before, strict=True))
    recoup.step(optimizer, *stores, consume=consume)
    assert torch.equal(params[0], before[0] - 3.0 * num_stores)


@pytest.mark.parametrize("kind", ["own", "cast"])
def test_a_step_that_fails_after_changing_gradients(kind):
    """nesterov with foreach adds momentum to them: only copies of them may be tried again."""
    param = nn.Parameter(torch.zeros(2, dtype=torch.float32 if kind == "own" else torch.bfloat16))
    settings = {"momentum": 0.5, "nesterov": True, "foreach": True}
    optimizer = FailsOnce([param], "after", lr=1.0, **settings)
    store = recoup.GradStore([param]).add_(param, torch.ones(2))
    with pytest.raises(OSError, match="power"):
        store.step(optimizer)
    if kind == "own":
        with pytest.raises(GradientError, match="half way"):
            store.step(optimizer)
        store.clear()
        assert len(store) == 0
    else:
        assert torch.equal(store[param], torch.ones(2))
    kept = recoup.GradStore([param]).add_(param, torch.ones(2))
    optimizer.when = "after"
    with pytest.raises(OSError, match="power"):
        kept.step(optimizer, consume=False)
    assert torch.equal(kept[param], torch.ones(2))


def test_as_grad_puts_back_what_was_there():
    params = parameters()
    stale = params[1].grad = torch.ones_like(params[1])
    for fails in (False, True):
        store = holding(params, 2.0)
        try:
            with store.as_grad(params):
                assert torch.equal(params[0].grad, torch.full_like(params[0], 2.0))
                assert params[1].grad is None
                assert not fails or 1 / 0
        except ZeroDivisionError:
            assert torch.equal(store[params[0]], torch.full_like(params[0], 2.0))
        else:
            assert len(store) == 0
        assert params[0].grad is None
        assert params[1].grad is stale


def test_a_step_within_as_grad_of_another_store():
    params = parameters(1)
    start = params[0].detach().clone()
    outer, inner = holding(params, 1.0), holding(params, 10.0)
    optimizer = torch.optim.SGD(params, lr=1.0)
    with outer.as_grad(params):
        inner.step(optimizer)
        optimizer.step()
    torch.testing.assert_close(params[0], start - 11)
