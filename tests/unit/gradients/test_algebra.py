"""Stores as vectors: against the same gradients in one long list of numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import GradientError
from tests.unit.gradients.vectors import (
    KINDS,
    close,
    dense,
    flat,
    holding,
    sparse,
    store_of,
    targets,
)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# -- against the flattened reference ---------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2, 3.5, math.inf])
def test_norm(kind, order):
    params = targets(kind)
    store = store_of(kind, params)
    numbers = [store[param].to_dense().reshape(-1).abs().double() for param in params]
    numbers = torch.cat([torch.zeros(1, dtype=torch.float64), *numbers])
    close(store.norm(order), torch.linalg.vector_norm(numbers, order), kind)


def test_dot_and_cosine(kind):
    params = targets(kind)
    a, b = store_of(kind, params), store_of(kind, params)
    numbers, others = flat(a, params), flat(b, params)
    close(a.dot(b), numbers @ others, kind)
    close(b.dot(a), numbers @ others, kind)
    close(a.dot(a), a.norm().double() ** 2, kind)
    lengths = numbers.norm() * others.norm()
    close(a.cosine(b), numbers @ others / lengths if lengths > 0 else 0.0, kind)


def test_dot_of_sparse_with_dense_and_other_keys():
    params = [nn.Parameter(torch.zeros(8, 3, dtype=torch.float64)) for _ in range(3)]
    a = holding(params, sparse()(), dense(8, 3)(), None)
    b = holding(params, dense(8, 3)(), sparse(rows=torch.tensor([[1, 0]]))(), dense(8, 3)())
    for one, other in ((a, b), (b, a), (a, a), (a, recoup.GradStore())):
        close(one.dot(other), flat(one, params) @ flat(other, params))


def test_operators(kind):
    params = targets(kind)
    a, b = store_of(kind, params), store_of(kind, params)
    one, other = flat(a, params), flat(b, params)
    for got, want in (
        (a + b, one + other),
        (a - b, one - other),
        (a * 3, one * 3),
        (0.5 * a, one * 0.5),
        (torch.tensor(0.5) * a, one * 0.5),
        (a / 4, one / 4),
        (a / torch.tensor(4.0), one / 4),
        (-a, -one),
        (a + 0.5 * b - a / 2, one / 2 + other / 2),
    ):
        close(flat(got, params), want, kind)
        assert isinstance(got, recoup.GradStore)
    assert torch.equal(flat(a, params), one), "an operator changed its left side"
    assert torch.equal(flat(b, params), other), "an operator changed its right side"


@pytest.mark.parametrize("change", ["scale_", "clip_norm_", "extend_", "+=", "*="])
def test_results_share_no_memory_with_what_they_came_from(change):
    params = targets("sparse")
    a, b = store_of("sparse", params), store_of("sparse", params)
    before = flat(a, params), flat(b, params)
    for result in (a + b, a - b, a * 2, -a, a / 2, recoup.GradStore() + a):
        match change:
            case "scale_":
                result.scale_(7.0)
            case "clip_norm_":
                result.clip_norm_(1e-3)
            case "extend_":
                result.extend_(a, b, consume=False)
            case "+=":
                result += b
            case _:
                result *= 3.0
    assert torch.equal(flat(a, params), before[0])
    assert torch.equal(flat(b, params), before[1])


def test_in_place_operators_keep_the_object_and_the_memory():
    params = targets("shapes")
    a, b = store_of("shapes", params), store_of("shapes", params)
    want = flat(a, params)
    same, places = a, [a[param].data_ptr() for param in params]
    a += b
    a -= 2 * b
    a *= 2
    a /= 4
    assert a is same
    assert [a[param].data_ptr() for param in params] == places
    close(flat(a, params), (want - flat(b, params)) / 2)


@pytest.mark.parametrize(
    ("call", "factor"),
    [
        (lambda a, b: a.extend_(a), 2),
        (lambda a, b: a.extend_(a, a), 3),
        (lambda a, b: a.extend_(a, a, weight=0.5), 2),
        (lambda a, b: a.__iadd__(a), 2),
        (lambda a, b: a + a, 2),
        (lambda a, b: a.extend_(b, b, consume=False), 3),
        (lambda a, b: a.extend_(b, b), 3),
        (lambda a, b: a.extend_(b, a), 3),
        (lambda a, b: a.extend_(a, b), 3),
    ],
)
def test_a_store_that_is_named_twice_counts_twice(call, factor):
    params = targets("shapes")
    a = store_of("shapes", params)
    b, numbers = a.clone(), flat(a, params)
    result = call(a, b)
    close(flat(result, params), factor * numbers)
    assert result.weight == factor


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("max_norm", [1e-3, 0.7, 1e6])
def test_clip_norm_is_torchs_bit_by_bit(order, dtype, max_norm):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(7, 5), (13,), ()]]
    store = recoup.GradStore(params, dtype=None if dtype.is_complex else dtype)
    for param in params:
        param.grad = torch.randn_like(param)
        store.add_(param, param.grad)
    want = torch.nn.utils.clip_grad_norm_(params, max_norm, order)
    got = store.clip_norm_(max_norm, order)
    assert torch.equal(got, want), (got, want)
    for param in params:
        assert torch.equal(store[param], param.grad)


def test_clip_norm_counts_rows_that_are_listed_twice_once():
    params = [nn.Parameter(torch.zeros(8, 3, dtype=torch.float64))]
    rows = torch.zeros(1, 2, dtype=torch.long)
    values = torch.full((2, 3), 5.0, dtype=torch.float64)
    store = holding(params, torch.sparse_coo_tensor(rows, values, (8, 3), check_invariants=True))
    norm = torch.tensor(10 * math.sqrt(3), dtype=torch.float64)
    close(store.clip_norm_(1.0), norm)
    close(store.norm(), norm / (norm + 1e-6))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_an_error_before_anything_changes(bad):
    params = targets("shapes")
    store = store_of("shapes", params)
    store[params[0]][0, 0] = bad
    before = flat(store, params)
    with pytest.raises(GradientError, match="error_if_nonfinite"):
        store.clip_norm_(1.0, error_if_nonfinite=True)
    torch.testing.assert_close(flat(store, params), before, rtol=0, atol=0, equal_nan=True)
    assert not store.isfinite()


def test_a_cosine_does_not_hide_what_is_not_a_number():
    params = targets("shapes")
    a, b = store_of("shapes", params), store_of("shapes", params)
    a[params[0]][0, 0] = math.nan
    assert a.cosine(b).isnan()
    b.discard(params[0])
    assert a.cosine(b).isnan()


def test_clipping_once_is_not_clipping_each():
    params = targets("one")
    big, small = holding(params, torch.tensor([4.0, 0, 0, 0])), holding(params, torch.ones(4) / 4)
    together = big + small
    together.clip_norm_(1.0)
    big.clip_norm_(1.0)
    small.clip_norm_(1.0)
    assert big.extend_(small).cosine(together) < 0.99


def test_clip_value():
    params = targets("sparse")
    store = store_of("sparse", params)
    want = flat(store, params).clamp(-0.4, 0.4)
    close(flat(store.clip_value_(0.4), params), want)


# -- what is refused, and leaves everything as it was ----------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda a: a.scale_(torch.ones(3)), ValueError),
        (lambda a: a.scale_("2"), ValueError),
        (lambda a: a.scale_(1j), ValueError),
        (lambda a: a * a, TypeError),
        (lambda a: a + 1, TypeError),
        (lambda a: a - {}, TypeError),
        (lambda a: a.extend_({}), ValueError),
        (lambda a: a.extend_(a, None), ValueError),
        (lambda a: a.clip_value_(0.1), GradientError),
        (lambda a: a / 0, ZeroDivisionError),
    ],
)
def test_a_refusal_leaves_the_store_as_it_was(call, error):
    params = targets("complex")
    store = store_of("complex", params)
    before = flat(store, params)
    with pytest.raises(error, match=r"must (be|contain)|unsupported operand|no order|division"):
        call(store)
    assert torch.equal(flat(store, params), before)
    assert store.norm() > 0


def test_a_merge_that_fails_half_way_is_said_by_both():
    """One of them holds a part of the sum, and the other only what was left."""
    params = [nn.Parameter(torch.zeros(8, 3, dtype=torch.float64)) for _ in range(2)]
    a = holding(params, torch.ones(8, 3), sparse()())
    other = torch.ones(2, 3).double().to_sparse(2)
    other = torch.sparse_coo_tensor(other.indices(), other.values(), (8, 3), check_invariants=True)
    b = holding(params, torch.ones(8, 3), other)
    c = b.clone()
    with pytest.raises(RuntimeError, match="same density"):
        a.extend_(c, consume=False)
    assert len(c) == 2, "what is not consumed is not damaged"
    assert float(c[params[0]].sum()) == 24
    a = holding(params, torch.ones(8, 3), sparse()())
    with pytest.raises(RuntimeError, match="same density"):
        a.extend_(b)
    for store in (a, b):
        with pytest.raises(GradientError, match="half way"):
            store.norm()
        store.clear()
        assert store.norm() == 0


def test_a_shape_that_does_not_fit_is_found_before_anything_is_merged():
    params = targets("shapes")
    a, b = recoup.GradStore(params), store_of("shapes", params)
    params[2].data = torch.zeros(7, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"has shape \(2, 1, 5\)"):
        a.extend_(b)
    assert (len(a), len(b)) == (0, 4)
