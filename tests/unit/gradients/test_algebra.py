"""Stores as vectors: sums, products, norms and clips, against one long list of numbers."""

from __future__ import annotations

import itertools
import math
import weakref
from operator import iadd, imul, isub, itruediv  # noqa: F401 - in the table

import pytest
import torch
from torch import nn

import recoup
from recoup import GradStore
from recoup.errors import GradientError
from tests.alive import no_collector
from tests.unit.gradients.cases import WAYS, collect, holding

ROWS = torch.tensor([[0, 2, 0, 5]])


def dense(*shape, dtype=torch.float64):
    return lambda: torch.randn(shape, dtype=dtype)


def sparse(dtype=torch.float64, rows=ROWS):
    return lambda: torch.sparse_coo_tensor(
        rows, torch.randn(rows.shape[1], 3, dtype=dtype), (8, 3), check_invariants=True
    )


KINDS = {
    "one": [dense(4)],
    "shapes": [dense(4, 3), dense(), dense(2, 1, 5), dense(0, 3)],
    "types": [dense(4), dense(3, dtype=torch.float32), dense(5, dtype=torch.bfloat16)],
    "complex": [dense(4, dtype=torch.complex128), dense(3), dense(2, dtype=torch.complex64)],
    "sparse": [sparse(), dense(4, 3), sparse(rows=torch.zeros(1, 0, dtype=torch.long))],
    "sparse complex": [sparse(torch.complex128)],
    "empty": [],
}
# Where the type with the fewest digits sets what can be asked.
ROUGH = {"types": 1e-2, "complex": 1e-6}


def targets(kind):
    return [nn.Parameter(torch.zeros_like(make().to_dense())) for make in KINDS[kind]]


def store_of(kind, params, weight=1.0):
    return holding(params, *(make() for make in KINDS[kind]), weight=weight)


def flat(gradients):
    """All numbers, complex ones or not; zeros for what is absent."""
    pieces = [torch.zeros(0, dtype=torch.complex128)]
    return torch.cat(pieces + [each.to_dense().reshape(-1).to(pieces[0]) for each in gradients])


def numbers_of(store, params):
    found = [store.get(param) for param in params]
    return flat(
        torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)
    ).detach()


def close(got, want, kind="one"):
    got, want = (torch.as_tensor(each).to(torch.complex128) for each in (got, want))
    torch.testing.assert_close(got, want, rtol=ROUGH.get(kind, 1e-12), atol=1e-12)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


# -- vectors ---------------------------------------------------------------------------------------

# What becomes of a store `a` of weight 2 and of `b`, of weight 4: how often each is in the result,
# its weight, and whether `b` is consumed. In place:
CHANGES = {
    "a.extend_(a)": (2, 0, 4),
    "a.extend_(a, a, weight=0.5)": (2, 0, 4),
    "a.extend_(a, alpha=-0.5)": (0.5, 0, 2),
    "a.extend_(b, b, consume=False)": (1, 2, 10),
    "a.extend_(b, alpha=-0.4, consume=False)": (1, -0.4, 2),
    "a.extend_(a, b)": (2, 1, 8, True),
    "a.extend_(b, alpha=0.25)": (1, 0.25, 2, True),
    "a.extend_(b, weight=3)": (1, 3, 14, True),
    "a.extend_(b, weight=torch.tensor(0.5))": (1, 0.5, 4, True),
    "a.extend_()": (1, 0, 2),
    "iadd(a, b)": (1, 1, 6),
    "isub(a, 2 * b)": (1, -2, 2),
    "imul(a, 2)": (2, 0, 2),
    "itruediv(a, 4)": (0.25, 0, 2),
    "a.scale_(torch.tensor([3.0]))": (3, 0, 2),
    "a.mean_()": (0.5, 0, 1),
}
NEW = {
    "a + b": (1, 1, 6),
    "a - b": (1, -1, 2),
    "a * 3": (3, 0, 2),
    "torch.tensor(0.5) * a": (0.5, 0, 2),
    "a / torch.tensor(4.0)": (0.25, 0, 2),
    "-a": (-1, 0, 2),
    "a + 0.5 * b - a / 2": (0.5, 0.5, 6),
    "sum([a, b, GradStore()])": (1, 1, 6),
    "sum([a])": (1, 0, 2),
    "GradStore() + a": (1, 0, 2),
}


@pytest.mark.sampled(61)
@pytest.mark.parametrize("call", [*CHANGES, *NEW])
def test_a_store_is_a_vector_and_counts_as_often_as_it_is_named(call, kind):
    """Surgery changes the direction, and not how many batches a gradient stands for."""
    params = targets(kind)
    a, b = store_of(kind, params, 2.0), store_of(kind, params, 4.0)
    one, other = numbers_of(a, params), numbers_of(b, params)
    places = [a[param].data_ptr() for param in params if not a[param].is_sparse]
    got = eval(call, globals(), {"a": a, "b": b})
    own, factor, weight, *is_consumed = (CHANGES | NEW)[call]
    close(numbers_of(got, params), own * one + factor * other, kind)
    if kind != "empty" or call != "a.mean_()":
        assert (got.weight, type(got.weight)) == (weight, float)
    assert (len(b), b.weight) == ((0, 0) if is_consumed else (len(params), 4))
    assert (got is a) == (call in CHANGES)
    if got is a:
        assert [a[param].data_ptr() for param in params if not a[param].is_sparse] == places
    else:
        got.scale_(7.0).extend_(a, b, consume=False).clip_norm_(1e-3)
        assert torch.equal(numbers_of(a, params), one), "an operator changed its left side"
    assert is_consumed or torch.equal(numbers_of(b, params), other), "... its right side"


def dot(one, other):
    return (one.conj() * other).sum().real


NUMBERS = {  # of stores, and of vectors
    **{
        f"norm {order}": (lambda a, b, p=order: a.norm(p),
                          lambda x, y, p=order: torch.linalg.vector_norm(x, p))
        for order in (1, 2, 3.5)
    },
    "largest": (lambda a, b: a.norm(math.inf), lambda x, y: max([0.0, *x.abs()])),
    "dot": (lambda a, b: a.dot(b), dot),
    "square": (lambda a, b: a.dot(a), lambda x, y: x.norm() ** 2),
    "cosine": (lambda a, b: a.cosine(b),
               lambda x, y: dot(x, y) / (x.norm() * y.norm() if len(x) else 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name, kind):
    params, (number, want) = targets(kind), NUMBERS[name]
    a, b = store_of(kind, params), store_of(kind, params)
    close(number(a, b), want(numbers_of(a, params), numbers_of(b, params)), kind)
    if kind == "shapes":  # what is not a number is not hidden
        a[params[0]][0, 0] = math.nan
        assert number(a, b).isnan()
        assert not a.isfinite()
        assert b.isfinite()


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("name", ["norm 2", "dot", "cosine"])
def test_second_derivatives_through_numbers(name, is_sparse):
    """A penalty on a norm must not be a constant in silence."""
    table = nn.Embedding(6, 3, sparse=is_sparse).double()
    params = [table.weight, nn.Parameter(torch.randn(3).double())]
    index, others = torch.tensor([1, 1, 2]), [torch.randn(6, 3).double(), torch.randn(3).double()]

    def loss(look):
        return (look(index, table.weight) + params[1]).pow(3).sum()

    store, (number, want) = GradStore(params), NUMBERS[name]
    store.backward(loss(lambda index, _: table(index)), create_graph=True)
    plain = torch.autograd.grad(loss(nn.functional.embedding), params, create_graph=True)
    found = number(store, holding(params, *others)), want(flat(plain), flat(others))
    close(*found)
    for one, other in zip(*(torch.autograd.grad(each, params) for each in found), strict=True):
        close(one.to_dense(), other)


def test_products_of_sparse_with_dense_and_of_other_keys():
    params = [nn.Parameter(torch.zeros(8, 3, dtype=torch.float64)) for _ in range(3)]
    a = holding(params, sparse()(), dense(8, 3)(), None)
    b = holding(params, dense(8, 3)(), sparse(rows=torch.tensor([[1, 0]]))(), dense(8, 3)())
    for one, other in ((a, b), (b, a), (a, a), (a, GradStore())):
        close(one.dot(other), dot(numbers_of(one, params), numbers_of(other, params)))


@pytest.mark.sampled(13)
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("max_norm", [1e-3, 0.7, 1e6])
def test_clip_norm_is_torchs_bit_by_bit(order, dtype, max_norm):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(7, 5), (13,), ()]]
    store = GradStore(params, dtype=None if dtype.is_complex else dtype)
    for param in params:
        param.grad = torch.randn_like(param)
        store.add_(param, param.grad)
    want = torch.nn.utils.clip_grad_norm_(params, max_norm, order)
    assert torch.equal(store.clip_norm_(max_norm, order), want)
    assert all(torch.equal(store[param], param.grad) for param in params)


# -- memory, layouts and types ---------------------------------------------------------------------


@pytest.mark.parametrize("consume", [True, False])
def test_what_is_consumed_is_handed_over_or_freed(consume):
    params = [nn.Parameter(torch.zeros(64, 64)) for _ in range(3)]
    a, b = holding(params, dense(64, 64)(), dense(64, 64)(), None), GradStore()
    for param in params[1:]:
        b.add_(param, torch.ones(64, 64))
    watched = [weakref.ref(each.untyped_storage()) for each in b.values()]
    got = recoup.measure(lambda: a.extend_(b, consume=consume), device="cpu", repeats=0)
    assert got.peak_bytes == (0 if consume else b[params[2]].nbytes)
    assert list(a) == params
    with no_collector():
        assert (watched[0]() is None) is consume
        assert (a[params[2]].untyped_storage() is watched[1]()) is consume
    assert consume or float(b.scale_(0.0).norm()) == 0
    assert float(a[params[2]].sum()) == 64 * 64


LOW = (torch.float32, torch.float64, torch.bfloat16)
TYPES = [*itertools.product(LOW, LOW), (torch.complex128, torch.complex128)]


@pytest.mark.sampled(37)
@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("dtypes", TYPES, ids=str)
@pytest.mark.parametrize("into", [dense, sparse])
@pytest.mark.parametrize("other", [dense, sparse])
def test_sums_over_layouts_and_types_are_in_the_type_of_the_store(
    into, other, dtypes, consume, alpha
):
    of = torch.complex128 if dtypes[0].is_complex else torch.float64
    params = [nn.Parameter(torch.zeros(8, 3, dtype=of)) for _ in range(2)]
    make = {dense: dense(8, 3, dtype=of), sparse: sparse(of)}
    one, two = make[into](), make[other]()
    before, real = [one.to_dense().clone(), two.to_dense().clone()], [d.to_real() for d in dtypes]
    store = GradStore(dtype=real[0]).add_(params[0], one)
    more = GradStore(dtype=real[1]).add_(params[0], two).add_(params[1], two)
    held, address = [g.to_dense().clone() for g in more.values()], store[params[0]].data_ptr
    place = address() if into is dense else None
    assert store.extend_(more, alpha=alpha, consume=consume) is store
    assert {each.dtype for each in store.values()} == {dtypes[0]}
    bound = 2e-2 if torch.bfloat16 in dtypes else 1e-6 if torch.float32 in dtypes else 1e-14
    wanted = before[0] + alpha * before[1], alpha * before[1]
    for param, want in zip(params, wanted, strict=True):
        got = store[param].to_dense().to(of)
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)
    assert [g.is_sparse for g in store.values()] == [into is other is sparse, other is sparse]
    assert place is None or store[params[0]].data_ptr() == place
    for given, values in zip((one, two), before, strict=True):
        assert torch.equal(given.to_dense(), values)
    assert consume or all(map(torch.equal, (g.to_dense() for g in more.values()), held))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", [*WAYS, "extend_", "add_"])
@pytest.mark.parametrize("num_rows", [10, 1000])
def test_sparse_sums_stay_small(num_rows, way):
    """However many there are, and sparse, however many rows they cover."""
    layer = nn.Embedding(num_rows, 2, sparse=True).double()
    store, total = GradStore(layer.parameters()), torch.zeros(num_rows, 2, dtype=torch.float64)
    most = 0
    for step in range(400):
        tokens = torch.randint(num_rows if step > 100 else 8, (8,))
        total.index_add_(0, tokens, torch.ones(8, 2, dtype=torch.float64))
        if way in ("extend_", "add_"):
            other = GradStore.from_backward(layer(tokens).sum(), layer.parameters())
            if way == "extend_":
                store.extend_(other)
            else:
                store.add_(layer.weight, other.pop(layer.weight), own=True)
        else:
            collect(store, layer(tokens).sum(), way)
        most = max(most, store.nbytes())
    assert torch.equal(store[layer.weight].to_dense(), total)
    assert most <= (num_rows + 8) * (2 * 8 + 8)  # two entries and an index a row
    assert store[layer.weight].is_sparse


@pytest.mark.parametrize("consume", [True, False])
def test_a_merge_that_fails_half_way_is_said_by_both(consume):
    """One of them holds a part of the sum, and the other only what was left."""
    params = [nn.Parameter(torch.zeros(8, 3, dtype=torch.float64)) for _ in range(2)]
    entries = torch.sparse_coo_tensor([[0], [1]], [1.0], (8, 3), check_invariants=True)
    a = holding(params, torch.ones(8, 3), sparse()())
    b = holding(params, torch.ones(8, 3), entries)  # of another sparse layout
    with pytest.raises(RuntimeError, match="same density"):
        a.extend_(b, consume=consume)
    for store in (a, b) if consume else (a,):
        with pytest.raises(GradientError, match="half way"):
            store.norm()
        store.clear()
        assert store.norm() == 0
    assert consume or float(b[params[0]].sum()) == 24
