"""Stores are summed in place, whatever the layouts and types, and take the room of one."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import recoup
from recoup import GradStore
from tests.unit.gradients.cases import MODES, assert_holds, plain


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """These tensors are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameter(*size, dtype=torch.float64):
    return nn.Parameter(torch.randn(*(size or (4, 3)), dtype=dtype))


def dense(target):
    return torch.randn(target.shape, dtype=target.dtype)


def sparse(target, nnz=2):
    """Of a row twice."""
    rows = torch.randint(len(target), (1, nnz))
    rows[0, 0] = rows[0, -1]
    values = torch.randn(nnz, *target.shape[1:], dtype=target.dtype)
    return torch.sparse_coo_tensor(rows, values, target.shape, check_invariants=True)


def store_of(*pairs, **kwargs):
    store = GradStore(**kwargs)
    for target, gradient in pairs:
        store.add_(target, gradient)
    store.weight = 1.0
    return store


def values_of(store):
    return {target: gradient.to_dense().clone() for target, gradient in store.items()}


def assert_same(store, want, rtol=0.0):
    assert list(store) == list(want)
    for target, value in want.items():
        torch.testing.assert_close(store[target].to_dense(), value, rtol=rtol, atol=rtol)


# -- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("merge", ["extend_", "merge_"])
def test_sums_the_same_and_inserts_others(merge, consume):
    a, b, c = parameter(), parameter(), parameter()
    one, two, three, four = dense(a), dense(b), dense(b), dense(c)
    store, other = store_of((a, one), (b, two)), store_of((b, three), (c, four))
    watched = [weakref.ref(each.untyped_storage()) for each in other.values()]
    assert getattr(store, merge)(other, consume=consume) is store
    assert_same(store, {a: one, b: two + three, c: four})
    assert store.weight == 2
    if not consume:
        assert_same(other, {b: three, c: four})
        assert other.weight == 1
        store.scale_(0.0)
        assert_same(other, {b: three, c: four})
        return
    assert len(other) == 0
    assert other.weight == 0
    gc.disable()
    try:
        assert watched[0]() is None
        assert store.pop(c).untyped_storage() is not None
        assert watched[1]() is None
    finally:
        gc.enable()


def test_itself():
    a = parameter()
    gradient = dense(a)
    store = store_of((a, gradient))
    assert_same(store.extend_(store), {a: 2 * gradient})
    assert store.weight == 2
    assert_same(store.extend_(store, alpha=-0.5), {a: gradient})
    assert store.weight == 2
    store += store
    assert_same(store, {a: 2 * gradient})
    store -= store
    assert_same(store, {a: 0 * gradient})
    assert store.weight == 4


@pytest.mark.parametrize("layout", [dense, sparse])
def test_an_empty_one(layout):
    a = parameter()
    gradient = layout(a)
    want = {a: gradient.to_dense()}
    assert_same(store_of((a, gradient)).extend_(GradStore()), want)
    assert_same(GradStore().extend_(store_of((a, gradient))), want)
    assert_same(GradStore().extend_(GradStore()), {})
    assert_same(store_of((a, gradient)).extend_(), want)


def test_order_does_not_matter():
    targets = [parameter() for _ in range(3)]
    stores = [store_of(*((t, kind(t)) for t in targets)) for kind in (dense, sparse, dense, sparse)]
    want = {t: sum(store[t].to_dense() for store in stores) for t in targets}
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        left = GradStore().extend_(*(stores[place] for place in order), consume=False)
        assert_same(left, want, 1e-14)
        pairs = [stores[order[0]] + stores[order[1]], stores[order[2]] + stores[order[3]]]
        assert_same(pairs[0].extend_(pairs[1]), want, 1e-14)


# -- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, -0.5])
@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("into", [dense, sparse])
@pytest.mark.parametrize("other", [dense, sparse])
def test_layouts(into, other, dtype, consume, alpha):
    target = parameter(40, 3, dtype=dtype)
    one, two = into(target), other(target)
    before = one.to_dense().clone(), two.to_dense().clone()
    store, more = store_of((target, one)), store_of((target, two))
    address = store[target].data_ptr() if into is dense else None
    store.extend_(more, alpha=alpha, consume=consume)
    want = before[0] + alpha * before[1]
    assert_same(store, {target: want}, 1e-14)
    if address is not None:
        assert store[target].data_ptr() == address
    assert store[target].is_sparse == (into is other is sparse)
    norm = torch.linalg.vector_norm(want)
    torch.testing.assert_close(store.norm(), norm)
    assert torch.equal(one.to_dense(), before[0])
    assert torch.equal(two.to_dense(), before[1])
    if not consume:
        assert_same(more, {target: before[1]})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [*MODES, "collecting", "extend_", "add_"])
@pytest.mark.parametrize("num_rows", [10, 1000])
def test_sparse_sums_stay_small(num_rows, way):
    """However many there are, and sparse, however many rows they cover."""
    layer = nn.Embedding(num_rows, 2, sparse=True).double()
    store, total = GradStore(layer.parameters()), torch.zeros(num_rows, 2, dtype=torch.float64)
    most = 0
    for step in range(1000):
        tokens = torch.randint(num_rows if step > 500 else 8, (4,))
        output = layer(tokens)
        total.index_add_(0, tokens, torch.ones(4, 2, dtype=torch.float64))
        if way == "collecting":
            with store.collecting():
                output.sum().backward()
        elif way in ("extend_", "add_"):
            other = GradStore.from_backward(output.sum(), layer.parameters())
            if way == "extend_":
                store.extend_(other)
            else:
                store.add_(layer.weight, other.pop(layer.weight), own=True)
        else:
            store.backward(output.sum(), mode=way)
        most = max(most, store.nbytes())
    assert torch.equal(store[layer.weight].to_dense(), total)
    assert most <= (num_rows + 4) * (2 * 8 + 8)  # two entries and an index a row
    assert store[layer.weight].is_sparse


# -- types, devices, shapes ------------------------------------------------------------------------


@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("layout", [dense, sparse])
@pytest.mark.parametrize("into", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("other", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_type_is_that_of_the_store(into, other, layout, consume):
    target = parameter(40, 3, dtype=torch.float32)
    one, two = layout(target), layout(target)
    store = store_of((target, one), dtype=into)
    store.extend_(store_of((target, two), dtype=other), consume=consume)
    more = parameter(40, 3, dtype=torch.float32)
    store.extend_(store_of((more, two), dtype=other), consume=consume)
    assert {each.dtype for each in store.values()} == {into}
    low = torch.bfloat16 in (into, other)
    want = one.to_dense() + two.to_dense()
    got = store[target].to_dense().float()
    torch.testing.assert_close(got, want, rtol=2e-2 if low else 1e-6, atol=2e-2 if low else 1e-6)


def test_low_precision_is_summed_in_float32():
    target = parameter(64, dtype=torch.bfloat16)
    gradients = torch.rand(512, 64).bfloat16()
    store = GradStore([target])
    for gradient in gradients:
        store.extend_(store_of((target, gradient), dtype=torch.bfloat16))
    want = torch.zeros(64)
    for gradient in gradients:
        want += gradient
    assert torch.equal(store[target], want)


def test_what_does_not_fit_changes_nothing():
    target = parameter()
    gradient = dense(target)
    store = store_of((target, gradient))
    for wrong, match in [
        (torch.ones(4), r"shape \(4,\)"),
        (torch.ones(4, 3, dtype=torch.complex128), "is complex"),
    ]:
        with pytest.raises(ValueError, match=match):
            store.add_(target, wrong)
    assert_same(store, {target: gradient})


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 1, 7], [8, 8, 3]])
def test_mean_of_unequal_parts(sizes, mode):
    """Also of a last window that is not full."""
    module = nn.Linear(4, 3).double()
    batch = torch.randn(sum(sizes), 4, dtype=torch.float64)
    want = plain(module, [batch], lambda y: y.sin().mean())
    store, halves = GradStore(module.parameters()), []
    for part in batch.split(sizes):
        store.backward(module(part).sin().mean(), weight=len(part), mode=mode)
        half = GradStore.from_backward(module(part).sin().mean(), module.parameters())
        halves.append((half, len(part)))
    assert_holds(store.mean_(), module, want, 1e-14)
    assert store.weight == 1
    total = GradStore()
    for half, weight in halves:
        total.extend_(half, weight=weight)
    assert_holds(total.mean_(), module, want, 1e-14)


# -- room ------------------------------------------------------------------------------------------


MOST = {"auto": 1.5, "harvest": 1.5, "grad": 2.5}


@pytest.mark.parametrize("way", [*MODES, "list of stores"])
def test_the_peak_of_16_sums_over_shared_weights(way):
    """Of a few layers, so that one gradient is a part of the whole; at least 10 for a list."""
    module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(8)))
    x = torch.randn(2, 128)
    num_bytes = sum(each.nbytes for each in module.parameters())

    def collect():
        if way == "list of stores":
            return [
                GradStore.from_backward(module(x).sum(), module.parameters()) for _ in range(16)
            ]
        store = GradStore(module.parameters())
        for _ in range(16):
            store.backward(module(x).sum(), mode=way)
        return store

    collect()
    got = recoup.measure(collect, device="cpu", repeats=0)
    if way == "list of stores":
        assert got.peak_bytes > 10 * num_bytes
        return
    assert got.peak_bytes <= MOST[way] * num_bytes
    assert got.held_bytes <= 1.01 * num_bytes


@pytest.mark.parametrize("consume", [True, False])
def test_merging_takes_no_room(consume):
    targets = [parameter(64, 64) for _ in range(8)]
    store, other = (store_of(*((t, dense(t)) for t in targets)) for _ in range(2))
    got = recoup.measure(lambda: store.extend_(other, consume=consume), device="cpu", repeats=0)
    assert got.peak_bytes == 0
    parts = [copy.copy(store) for _ in range(2)]
    got = recoup.measure(lambda: parts[0].extend_(parts[1]), device="cpu", repeats=0)
    assert got.peak_bytes == 0


@pytest.mark.parametrize("change", ["coalesce_", "densify_"])
def test_what_is_replaced_goes_before_the_next_comes(change):
    targets = [parameter(64, 64) for _ in range(8)]
    num_bytes = targets[0].nbytes

    def make_and_change():
        store = GradStore()
        for target in targets:
            store.add_(target, sparse(target, 64), own=True)
        return getattr(store, change)()

    got = recoup.measure(make_and_change, device="cpu", repeats=0)
    assert got.peak_bytes <= 10.5 * num_bytes, "16 when all are kept until the end"


def test_sum_of_stores_is_the_store_of_the_sum():
    torch.manual_seed(0)
    w, b = parameter(), parameter(3)
    stores = [store_of((w, dense(w))), store_of((w, dense(w)), (b, dense(b))), store_of()]
    want = {w: stores[0][w] + stores[1][w], b: stores[1][b].clone()}
    before = [values_of(store) for store in stores]
    total = sum(stores)
    assert_same(total, want)
    assert total.weight == 3
    for store, values in zip(stores, before, strict=True):  # none is emptied, as `+` does not
        assert_same(store, values)
    one = sum(stores[:1])
    assert one is not stores[0]
    assert one[w].data_ptr() != stores[0][w].data_ptr()


def test_sums_begin_with_zero_and_no_other_number():
    store = store_of()
    for start in (1, 0.5, None):
        with pytest.raises(TypeError, match="unsupported operand"):
            start + store
