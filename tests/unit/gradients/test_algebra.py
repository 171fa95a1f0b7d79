"""Stores as vectors: sums, products, norms, clips and surgery, against one long list of numbers."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn

import recoup
from recoup import GradStore
from recoup.errors import GradientError
from tests.unit.gradients.cases import WAYS, collect

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


def store_of(kind, params):
    store = GradStore(params)
    for make, param in zip(KINDS[kind], params, strict=True):
        store.add_(param, make())
    store.weight = 1.0
    return store


def holding(params, *gradients, weight=1.0):
    store = GradStore(params)
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is not None:
            store.add_(param, gradient)
    store.weight = weight
    return store


def flat(store, params):
    """All numbers as float64, complex ones as two; zeros for what is absent."""
    pieces = [torch.zeros(0, dtype=torch.float64)]
    for param in params:
        gradient = store.get(param)
        gradient = torch.zeros_like(param) if gradient is None else gradient.detach().to_dense()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        pieces.append(gradient.detach().double().reshape(-1))
    return torch.cat(pieces)


def close(got, want, kind="one"):
    torch.testing.assert_close(
        got.double(), torch.as_tensor(want).double(), rtol=ROUGH.get(kind, 1e-12), atol=1e-12
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
    close(a.dot(a), a.norm().double() ** 2, kind)
    lengths = numbers.norm() * others.norm()
    close(a.cosine(b), numbers @ others / lengths if lengths > 0 else 0.0, kind)
    if kind == "shapes":  # what is not a number is not hidden
        a[params[0]][0, 0] = math.nan
        assert a.cosine(b).isnan()
        assert not a.isfinite()


def test_dot_of_sparse_with_dense_and_other_keys():
    params = [nn.Parameter(torch.zeros(8, 3, dtype=torch.float64)) for _ in range(3)]
    a = holding(params, sparse()(), dense(8, 3)(), None)
    b = holding(params, dense(8, 3)(), sparse(rows=torch.tensor([[1, 0]]))(), dense(8, 3)())
    for one, other in ((a, b), (b, a), (a, a), (a, GradStore())):
        close(one.dot(other), flat(one, params) @ flat(other, params))


def test_operators(kind):
    """Their results share no memory with what they came from."""
    params = targets(kind)
    a, b = store_of(kind, params), store_of(kind, params)
    one, other = flat(a, params), flat(b, params)
    for got, want in (
        (a + b, one + other),
        (a - b, one - other),
        (a * 3, one * 3),
        (torch.tensor(0.5) * a, one * 0.5),
        (a / torch.tensor(4.0), one / 4),
        (-a, -one),
        (a + 0.5 * b - a / 2, one / 2 + other / 2),
        (sum([a, b, GradStore()]), one + other),
        (sum([a]), one),
        (GradStore() + a, one),
    ):
        close(flat(got, params), want, kind)
        for change in (got.scale_(7.0), got.extend_(a, consume=False), got.__iadd__(b)):
            change.clip_norm_(1e-3)
    assert torch.equal(flat(a, params), one), "an operator changed its left side"
    assert torch.equal(flat(b, params), other), "an operator changed its right side"
    same, places = a, [a[param].data_ptr() for param in params if not a[param].is_sparse]
    a += b
    a -= 2 * b
    a *= 2
    a /= 4
    assert a is same
    assert [a[param].data_ptr() for param in params if not a[param].is_sparse] == places
    close(flat(a, params), (one - other) / 2, kind)


# -- merging ---------------------------------------------------------------------------------------


def several(a, b):
    """Calls that name stores repeatedly, and how often each counts."""
    return [
        (lambda: a.extend_(a), 2, 0),
        (lambda: a.extend_(a, a, weight=0.5), 2, 0),
        (lambda: a.extend_(a, alpha=-0.5), 0.5, 0),
        (lambda: a.extend_(b, b, consume=False), 1, 2),
        (lambda: a.merge_(b, a), 2, 1),
        (lambda: a.extend_(a, b), 2, 1),
        (lambda: a.extend_(b, alpha=0.25), 1, 0.25),
        (lambda: a.extend_(b, weight=3), 1, 3),
        (lambda: a.extend_(b, weight=torch.tensor(0.5)), 1, 0.5),
        (lambda: a.extend_(), 1, 0),
    ]


@pytest.mark.parametrize("case", range(10))
def test_what_is_merged_counts_as_often_as_it_is_named(case, kind):
    params = targets(kind)
    a, b = store_of(kind, params), store_of(kind, params)
    b.weight, one, other = 4.0, flat(a, params), flat(b, params)
    call, own, factor = several(a, b)[case]
    assert call() is a
    close(flat(a, params), own * one + factor * other, kind)
    is_vector = case in (2, 6)
    assert a.weight == (1 if is_vector else own + factor * 4)
    assert isinstance(a.weight, float)
    is_consumed = case in (4, 5, 6, 7, 8)
    assert (len(b), b.weight) == ((0, 0) if is_consumed else (len(params), 4))


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
    gc.disable()
    try:
        assert (watched[0]() is None) is consume
        assert (a[params[2]].untyped_storage() is watched[1]()) is consume
    finally:
        gc.enable()
    assert consume or float(b.scale_(0.0).norm()) == 0
    assert float(a[params[2]].sum()) == 64 * 64


@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("into", [dense, sparse])
@pytest.mark.parametrize("other", [dense, sparse])
def test_layouts(into, other, dtype, consume, alpha):
    make = {dense: dense(8, 3, dtype=dtype), sparse: sparse(dtype)}
    params = [nn.Parameter(torch.zeros(8, 3, dtype=dtype))]
    one, two = make[into](), make[other]()
    before = one.to_dense().clone(), two.to_dense().clone()
    store, more = holding(params, one), holding(params, two)
    address = store[params[0]].data_ptr() if into is dense else None
    store.extend_(more, alpha=alpha, consume=consume)
    got = store[params[0]]
    torch.testing.assert_close(got.to_dense(), before[0] + alpha * before[1], rtol=0, atol=1e-14)
    assert got.is_sparse == (into is other is sparse)
    assert address is None or got.data_ptr() == address
    assert torch.equal(one.to_dense(), before[0])
    assert torch.equal(two.to_dense(), before[1])
    assert consume or torch.equal(more[params[0]].to_dense(), before[1])


@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("make", [dense(8, 3), sparse()])
@pytest.mark.parametrize("into", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("other", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_type_is_that_of_the_store(into, other, make, consume):
    params = [nn.Parameter(torch.zeros(8, 3)) for _ in range(2)]
    one, two = make(), make()
    store = GradStore(dtype=into).add_(params[0], one)
    more = GradStore(dtype=other).add_(params[0], two).add_(params[1], two)
    store.extend_(more, consume=consume)
    assert {each.dtype for each in store.values()} == {into}
    bound = 2e-2 if torch.bfloat16 in (into, other) else 1e-6
    for param, want in ((params[0], one.to_dense() + two.to_dense()), (params[1], two.to_dense())):
        got = store[param].to_dense().double()
        torch.testing.assert_close(got, want.double(), rtol=bound, atol=bound)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [*WAYS, "extend_", "add_"])
@pytest.mark.parametrize("num_rows", [10, 1000])
def test_sparse_sums_stay_small(num_rows, way):
    """However many there are, and sparse, however many rows they cover."""
    layer = nn.Embedding(num_rows, 2, sparse=True).double()
    store, total = GradStore(layer.parameters()), torch.zeros(num_rows, 2, dtype=torch.float64)
    most = 0
    for step in range(1000):
        tokens = torch.randint(num_rows if step > 500 else 8, (4,))
        total.index_add_(0, tokens, torch.ones(4, 2, dtype=torch.float64))
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
    assert most <= (num_rows + 4) * (2 * 8 + 8)  # two entries and an index a row
    assert store[layer.weight].is_sparse


def test_a_merge_that_fails_half_way_is_said_by_both():
    """One of them holds a part of the sum, and the other only what was left."""
    params = [nn.Parameter(torch.zeros(8, 3, dtype=torch.float64)) for _ in range(2)]
    entries = torch.sparse_coo_tensor([[0], [1]], [1.0], (8, 3), check_invariants=True)
    for consume in (False, True):
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


@pytest.mark.parametrize("change", ["coalesce_", "densify_"])
def test_what_is_replaced_goes_before_the_next_comes(change):
    params = [nn.Parameter(torch.zeros(64, 64)) for _ in range(8)]
    rows = torch.arange(64)[None] // 2

    def make_and_change():
        store = GradStore()
        for param in params:
            values = torch.ones(64, 64)
            listed = torch.sparse_coo_tensor(rows, values, (64, 64), check_invariants=True)
            del values
            store.add_(param, listed, own=True)
        return getattr(store, change)()

    got = recoup.measure(make_and_change, device="cpu", repeats=0)
    assert got.peak_bytes <= 10.5 * params[0].nbytes, "16 when all are kept until the end"
    for gradient in make_and_change().values():
        want = torch.zeros(64, 64)
        want[:32] = 2.0
        assert torch.equal(gradient.to_dense(), want)
        values = gradient._values() if gradient.is_sparse else gradient
        assert values.untyped_storage().nbytes() == values.nbytes
        assert gradient.is_sparse == (change == "coalesce_")


# -- clipping --------------------------------------------------------------------------------------


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


# -- surgery ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("what", ["norm", "dot", "cosine"])
def test_second_derivatives_through_numbers(what, is_sparse):
    """A penalty on a norm must not be a constant in silence."""
    table = nn.Embedding(6, 3, sparse=is_sparse).double()
    shift = nn.Parameter(torch.randn(3).double())
    params, others = [table.weight, shift], torch.randn(21).double()
    store = GradStore(params)
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


def pcgrad(stores):
    """Yu et al., https://arxiv.org/abs/2001.06782, with stores."""
    projected = [store.clone() for store in stores]
    for place, mine in enumerate(projected):
        for other_place, other in enumerate(stores):
            product = mine.dot(other)
            if other_place != place and product < 0:
                mine -= product / other.dot(other) * other
    return GradStore().extend_(*projected)


def pcgrad_of_vectors(vectors):
    projected = [vector.clone() for vector in vectors]
    for place, mine in enumerate(projected):
        for other_place, other in enumerate(vectors):
            if other_place != place and mine @ other < 0:
                mine -= mine @ other / (other @ other) * other
    return sum(projected)


def test_surgery_leaves_the_weight_alone():
    """A correction changes the direction of a gradient, not how many batches it stands for."""
    params = targets("one")
    for change in (
        lambda a, b: a.extend_(b, alpha=-0.4, consume=False),
        lambda a, b: a.__isub__(0.4 * b),
        lambda a, b: a.scale_(2.0),
        lambda a, b: a.clip_norm_(0.5),
    ):
        mine, other = (holding(params, torch.randn(4), weight=w) for w in (3.0, 2.0))
        change(mine, other)
        assert (mine.weight, other.weight) == (3.0, 2.0)
        assert (mine + other).weight == 5.0, "what was collected is summed"
    rows = torch.tensor([[1.0, 0, 0, 1], [-1.0, 1, 0, 1], [0.0, -1, 1, -1]], dtype=torch.float64)
    total = pcgrad([holding(params, vector) for vector in rows])
    assert total.weight == 3.0
    close(flat(total.mean_(), params), pcgrad_of_vectors(list(rows)) / 3)
