"""Laws of vector spaces, means, second derivatives and gradient surgery with stores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import recoup
from tests.unit.gradients.vectors import close, flat, holding, targets

# -- laws ------------------------------------------------------------------------------------------

NUMBERS = st.floats(-8, 8, width=32)
LAW_PARAMS = [nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in (2, 1, 3)]


@st.composite
def vectors(draw):
    return holding(
        LAW_PARAMS,
        *(
            torch.tensor(draw(st.lists(NUMBERS, min_size=size, max_size=size)), dtype=torch.float64)
            if draw(st.booleans())
            else None
            for size in (2, 1, 3)
        ),
    )


@given(vectors(), vectors(), vectors(), NUMBERS, NUMBERS)
def test_vector_space(a, b, c, x, y):
    def agree(one, other):
        torch.testing.assert_close(
            flat(one, LAW_PARAMS), flat(other, LAW_PARAMS), rtol=1e-12, atol=1e-9
        )

    agree(a + b, b + a)
    agree((a + b) + c, a + (b + c))
    agree(x * (a + b), x * a + x * b)
    agree((x + y) * a, x * a + y * a)
    agree((x * y) * a, x * (y * a))
    agree(a - b, a + (-b))
    agree(a + recoup.GradStore(), a)
    agree(a - a, 0 * a)
    assert set(a + b) == set(a) | set(b)
    close((x * a + y * b).dot(c), x * a.dot(c) + y * b.dot(c) + 0.0)
    assert float(a.dot(b)) ** 2 <= float(a.dot(a) * b.dot(b)) * (1 + 1e-9) + 1e-9
    for order in (1, 2, math.inf):
        assert (a + b).norm(order) <= (a.norm(order) + b.norm(order)) * (1 + 1e-9)
        close((x * a).norm(order), abs(x) * a.norm(order))


# -- means -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["weight", "weight of a store", "stores"])
def test_a_mean_over_tokens_is_that_of_the_whole_batch(how):
    """Windows of unequal micro-batches, the last of them incomplete."""
    model = nn.Linear(5, 1).double()
    x, y = torch.randn(23, 5).double(), torch.randn(23, 1).double()
    sizes = [[4, 9, 1], [6, 3]]
    start = 0
    for window in sizes:
        rows = slice(start, start + sum(window))
        want = recoup.GradStore.from_backward(
            (model(x[rows]) - y[rows]).square().mean(), model.parameters()
        )
        store = recoup.GradStore(model.parameters())
        parts = []
        for size in window:
            loss = (model(x[start : start + size]) - y[start : start + size]).square().mean()
            start += size
            match how:
                case "weight":
                    store.backward(loss, weight=size)
                case "weight of a store":
                    part = recoup.GradStore.from_backward(loss, model.parameters())
                    store.extend_(part, weight=size)
                case _:
                    parts.append(recoup.GradStore(model.parameters()))
                    parts[-1].backward(loss, weight=size)
        store.extend_(*parts)
        assert store.weight == sum(window)
        store.mean_()
        assert store.weight == 1
        params = list(model.parameters())
        close(flat(store, params), flat(want, params))


def test_scaling_scales_the_mean_too():
    params = targets("one")
    store = holding(params, torch.ones(4), weight=4.0).scale_(2.0).mean_()
    close(flat(store, params), 0.5 * torch.ones(4))


def test_a_weight_stays_a_number():
    params = targets("one")
    a, b = holding(params, torch.ones(4)), holding(params, torch.ones(4), weight=4.0)
    assert a.extend_(b, weight=torch.tensor(0.5)).weight == 3.0
    assert isinstance(a.weight, float)


# -- graphs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("what", ["norm", "dot", "cosine"])
def test_second_derivatives_through_numbers(what, is_sparse):
    """A penalty on a norm must not be a constant in silence."""
    table = nn.Embedding(6, 3, sparse=is_sparse).double()
    shift = nn.Parameter(torch.randn(3).double())
    params, others = [table.weight, shift], torch.randn(21).double()
    store = recoup.GradStore(params)
    index = torch.tensor([1, 1, 2])

    def loss():
        return (table(index) + shift).pow(3).sum()

    store.backward(loss(), create_graph=True)
    plain = torch.autograd.grad(
        (nn.functional.embedding(index, table.weight) + shift).pow(3).sum(),
        params,
        create_graph=True,
    )
    numbers = torch.cat([gradient.reshape(-1) for gradient in plain])
    direction = holding(params, others[:18].view(6, 3), others[18:])
    got, want = {
        "norm": (lambda: store.norm(), lambda: numbers.norm()),
        "dot": (lambda: store.dot(direction), lambda: numbers @ others),
        "cosine": (
            lambda: store.cosine(direction),
            lambda: numbers @ others / numbers.norm() / others.norm(),
        ),
    }[what]
    close(got(), want())
    found = torch.autograd.grad(got(), params)
    for one, other in zip(found, torch.autograd.grad(want(), params), strict=True):
        close(one.to_dense(), other)


@pytest.mark.parametrize("use", ["step", "kept", "unscale", "as_grad"])
def test_gradients_with_a_graph_are_not_changed_in_place(use):
    """The graph needs them, and autograd gives one object to both sides of a sum."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    ends = []
    for with_graph in (False, True):
        params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if use == "unscale" else None
        settings = {"momentum": 0.9, "nesterov": True, "foreach": True}
        optimizer = torch.optim.SGD(params, lr=0.1, **settings)
        for _ in range(3):
            store = recoup.GradStore(params)
            loss = ((params[0] + params[1]) * x.pow(3)).sum()
            store.backward(loss, create_graph=with_graph, scaler=scaler)
            if use == "unscale":
                store.unscale_(scaler, optimizer)
                assert all(torch.equal(each, x.pow(3)) for each in store.values())
            if use == "as_grad":
                with store.as_grad(params, consume=False):
                    params[0].grad.zero_()
                    assert torch.equal(params[1].grad, x.pow(3))
            store.step(optimizer, scaler=scaler, consume=use != "kept")
            if use == "unscale":
                scaler.update()
            if use == "kept" and with_graph:
                (found,) = torch.autograd.grad(store[params[0]].sum(), x)
                close(found, 3 * x.detach() ** 2)
        ends.append(params)
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one, other)


def test_second_derivatives_of_what_was_unscaled():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    param = nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    store = recoup.GradStore([param])
    store.backward((param * x.pow(3)).sum(), create_graph=True, scaler=scaler)
    store.unscale_(scaler, torch.optim.SGD([param]))
    (found,) = torch.autograd.grad(store[param].sum(), x)
    close(found, 3 * x.detach() ** 2)


# -- gradient surgery ------------------------------------------------------------------------------


def pcgrad(stores):
    """Yu et al., https://arxiv.org/abs/2001.06782, with stores."""
    projected = [store.clone() for store in stores]
    for place, mine in enumerate(projected):
        for other_place, other in enumerate(stores):
            product = mine.dot(other)
            if other_place != place and product < 0:
                mine -= product / other.dot(other) * other
    return recoup.GradStore().extend_(*projected)


def pcgrad_of_vectors(vectors):
    projected = [vector.clone() for vector in vectors]
    for place, mine in enumerate(projected):
        for other_place, other in enumerate(vectors):
            if other_place != place and mine @ other < 0:
                mine -= mine @ other / (other @ other) * other
    return sum(projected)


def test_pcgrad_of_three_tasks_with_shared_and_private_parameters():
    shared = nn.Linear(6, 4).double()
    heads = [nn.Linear(4, 1).double() for _ in range(3)]
    params = [*shared.parameters(), *(each for head in heads for each in head.parameters())]
    x = torch.randn(8, 6).double()
    conflicts = 0
    for seed in range(4):
        torch.manual_seed(seed)
        goals = torch.randn(3, 8, 1).double()
        losses = [
            (head(shared(x).tanh()) - goal).square().mean()
            for head, goal in zip(heads, goals, strict=True)
        ]
        stores = [
            recoup.GradStore.from_backward(loss, params, retain_graph=True) for loss in losses
        ]
        assert all(len(store) == 4 for store in stores), "a head of another task is absent"
        vectors = [flat(store, params) for store in stores]
        conflicts += sum(bool(a @ b < 0) for a in vectors for b in vectors)
        close(flat(pcgrad(stores), params), pcgrad_of_vectors(vectors))
        for store, vector in zip(stores, vectors, strict=True):
            assert torch.equal(flat(store, params), vector)
    assert conflicts, "no two of these tasks are at odds"


@pytest.mark.parametrize("how", ["alpha", "-="])
@pytest.mark.parametrize("factor", [-0.4, 0.4, 1.0])
def test_surgery_leaves_the_weight_alone(how, factor):
    """N7: a correction changes the direction of a gradient, not how many batches it stands for."""
    params = targets("one")
    mine, other = (holding(params, torch.randn(4), weight=w) for w in (3.0, 2.0))
    want = flat(mine, params) - factor * flat(other, params)
    if how == "alpha":
        mine.extend_(other, alpha=-factor, consume=False)
    else:
        mine -= factor * other
    close(flat(mine, params), want)
    assert (mine.weight, other.weight) == (3.0, 2.0)
    mine.clip_norm_(0.5)
    mine.clip_value_(0.2)
    assert mine.weight == 3.0
    assert (mine + other).weight == 5.0, "what was collected is summed"


def test_the_mean_of_a_pcgrad_is_over_its_tasks():
    """N7: weights that were raised by each correction made the mean too small."""
    params = targets("one")
    rows = [[1.0, 0, 0, 1], [-1.0, 1, 0, 1], [0.0, -1, 1, -1]]
    vectors = list(torch.tensor(rows, dtype=torch.float64))
    total = pcgrad([holding(params, vector) for vector in vectors])
    assert total.weight == 3.0
    close(flat(total.mean_(), params), pcgrad_of_vectors(vectors) / 3)
