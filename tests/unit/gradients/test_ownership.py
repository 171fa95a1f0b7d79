"""A store's gradients are its own; and nothing is copied that is its own already."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup import GradStore
from tests.unit.gradients.cases import MODES, NAMES

KINDS = {"dtype": torch.float64, "requires_grad": True}


def leaf(*size):
    return torch.randn(*size, **KINDS)


def sparse(rows, values, num_rows):
    size = (num_rows, *values.shape[1:])
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, size, check_invariants=True)


def held(tensor):
    return torch.randn_like(tensor).detach()


# -- what autograd delivers twice, or in pieces ----------------------------------------------------


def plus(a, b):
    return a + b


def summed(a, b):
    return a.sum() * b.sum() * 3


def same(a, b):
    return a.view_as(a)


def viewed(a, b):
    return a.view(-1)


def transposed(a, b):
    return a.t()


def concatenated(a, b):
    return torch.cat([a, b]).sin()


def stacked(a, b):
    return torch.stack([a, b], 2).sin()


def expanded(a, b):
    return (a * 1).expand(5, 4, 4) + b[:1].expand(4, 4)


def number_of_a_buffer(a, b):
    return torch.stack([a.sum(), *torch.ones(15, dtype=a.dtype)]).square()


def itself_and_more(a, b):
    return (a + a * b) + a


def in_one_buffer(a, b):
    first, second = torch.cat([a, b]).sin().split(4)
    return first + second


def square_of_sum(a, b):
    return (a + b).square()


ALIASED = [
    plus,
    square_of_sum,
    summed,
    same,
    viewed,
    transposed,
    concatenated,
    stacked,
    expanded,
    number_of_a_buffer,
    itself_and_more,
    in_one_buffer,
]


@pytest.mark.parametrize("way", [*MODES, "collecting", "create_graph", "from_grad"])
@pytest.mark.parametrize("make", ALIASED)
def test_gradients_may_be_changed_in_place(make, way):
    a, b = leaf(4, 4), leaf(4, 4)
    output = make(a, b)
    seed = held(output)
    given = seed.clone()
    want = torch.autograd.grad(output, [a, b], seed, allow_unused=True, retain_graph=True)
    want = {t: g.clone() for t, g in zip((a, b), want, strict=True) if g is not None}
    store = GradStore([a, b])
    for _ in range(2):
        if way == "collecting":
            with store.collecting():
                output.backward(seed, retain_graph=True)
        elif way == "from_grad":
            output.backward(seed, retain_graph=True)
            kept = [(t.grad, t.grad.clone()) for t in want]
            store.extend_(GradStore.from_grad([a, b]))
        else:
            mode = "auto" if way == "create_graph" else way
            is_graph = way == "create_graph"
            store.backward(output, seed, mode=mode, retain_graph=True, create_graph=is_graph)
    store.detach_()
    check_is_alone(store)
    for target, gradient in want.items():
        torch.testing.assert_close(store[target], 2 * gradient, rtol=1e-14, atol=1e-14)
    store.scale_(0.5).clip_value_(1e9)
    total = store.clip_norm_(1e-3)
    torch.testing.assert_close(store.norm(), torch.full_like(total, 1e-3), rtol=1e-3, atol=0)
    for target, gradient in want.items():
        wanted = gradient * (1e-3 / (total + 1e-6))
        torch.testing.assert_close(store[target], wanted, rtol=1e-12, atol=1e-16)
    assert torch.equal(seed, given)
    if way == "from_grad":
        assert all(torch.equal(*pair) for pair in kept)


def check_is_alone(store):
    """No two gradients share memory, and none is a piece of something larger."""
    storages = [gradient.untyped_storage() for gradient in store.values()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert sum(storage.nbytes() for storage in storages) == store.nbytes()


def test_one_gradient_of_two_is_not_when_its_graph_is_cut():
    a, b = leaf(4), leaf(4)
    store = GradStore([a, b])
    store.backward((a + b).square().sum(), create_graph=True)
    want = 2 * (a + b).detach()
    store.detach_().scale_(0.5)
    assert torch.equal(store[a], 0.5 * want)
    assert torch.equal(store[b], 0.5 * want)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_inputs_are_the_callers(mode):
    a, b = leaf(4), leaf(4)
    seed = held(a)
    store = GradStore([a])
    (db,) = store.backward(a + b, seed, inputs=b, mode=mode)
    before = db.clone()
    store.scale_(2.0)
    assert torch.equal(db, before)
    db.zero_()
    assert torch.equal(store[a], 2 * seed)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_seed_with_a_graph(create_graph):
    """The gradient is the seed itself."""
    a, seed = leaf(4), leaf(4)
    store = GradStore([a])
    store.backward(a.view_as(a), seed, create_graph=create_graph, mode="auto")
    before = seed.detach().clone()
    store.detach_().scale_(2.0)
    assert torch.equal(seed.detach(), before)
    assert torch.equal(store[a], 2 * before)


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients_of_what_the_caller_holds(mode):
    """Its indices may be the tokens, and its values the seed."""
    weight, tokens = nn.Parameter(torch.randn(9, 3)), torch.tensor([1, 4, 1])
    output = F.embedding(tokens, weight, sparse=True)
    seed = held(output)
    store = GradStore([weight])
    store.backward(output, seed, mode=mode)
    want = torch.zeros(9, 3).index_add_(0, tokens, seed)
    before = tokens.clone(), seed.clone()
    store.scale_(2.0)
    assert torch.equal(tokens, before[0])
    assert torch.equal(seed, before[1])
    tokens.zero_()
    seed.zero_()
    assert torch.equal(store[weight].to_dense(), 2 * want)


@pytest.mark.parametrize("mode", [*MODES, "collecting"])
def test_sparse_gradients_whose_indices_are_the_tokens(mode):
    layer, tokens = nn.Embedding(9, 3, sparse=True), torch.tensor([1, 4, 1])
    store = GradStore(layer.parameters())
    if mode == "collecting":
        with store.collecting():
            layer(tokens).sin().sum().backward()
    else:
        store.backward(layer(tokens).sin().sum(), mode=mode)
    want = store[layer.weight].to_dense()
    tokens.zero_()
    assert torch.equal(store[layer.weight].to_dense(), want)


@pytest.mark.parametrize("add", ["backward", "extend_", "add_", "scale_", "clip_value_"])
def test_gradients_with_a_graph_are_not_changed_in_place(add):
    """Others may have saved them for their own backward."""
    a = leaf(4)
    store = GradStore([a])
    store.backward(a.pow(3).sum(), create_graph=True)
    first = store[a]
    before, penalty = first.detach().clone(), first.square().sum()
    if add == "backward":
        store.backward(a.exp().sum())
    elif add == "extend_":
        store.extend_(GradStore.from_backward(a.exp().sum(), [a]))
    elif add == "add_":
        store.add_(a, torch.ones_like(a))
    else:
        getattr(store, add)(0.1)
    assert torch.equal(first, before)
    second = GradStore.from_backward(penalty, [a])
    torch.testing.assert_close(second[a], (36 * a**3).detach())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_that_a_hook_keeps(is_sparse, mode):
    layer, kept = nn.Embedding(9, 3, sparse=is_sparse), []
    handle = layer.weight.register_hook(lambda gradient: kept.append(gradient))
    store = GradStore(layer.parameters())
    store.backward(layer(torch.tensor([1, 4, 1])).sin().sum(), mode=mode)
    handle.remove()
    before = kept[0].clone()
    store.scale_(2.0)
    assert torch.equal(kept[0].to_dense(), before.to_dense())
    assert torch.equal(store[layer.weight].to_dense(), 2 * before.to_dense())


@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_that_are_looked_at_in_collecting(is_sparse):
    layer = nn.Embedding(9, 3, sparse=is_sparse)
    store = GradStore(layer.parameters())
    with store.collecting():
        layer(torch.tensor([1, 4, 1])).sin().sum().backward()
        kept = layer.weight.grad
    before = kept.to_dense().clone()
    store.scale_(2.0)
    assert torch.equal(kept.to_dense(), before)
    assert torch.equal(store[layer.weight].to_dense(), 2 * before)


@pytest.mark.parametrize("take", [True, False])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_from_grad(is_sparse, take):
    layer = nn.Embedding(9, 3, sparse=is_sparse)
    layer(torch.tensor([1, 4, 1])).sin().sum().backward()
    gradient = layer.weight.grad
    before = gradient.clone()
    store = GradStore.from_grad(layer.parameters(), take=take)
    assert layer.weight.grad is (None if take else gradient)
    store.scale_(2.0)
    assert torch.equal(gradient.to_dense(), before.to_dense())
    assert torch.equal(store[layer.weight].to_dense(), 2 * before.to_dense())


# -- and no copy where it is not needed ------------------------------------------------------------


@pytest.mark.parametrize("mode", [*MODES, "collecting", "from_grad"])
def test_the_first_gradient_is_adopted(mode):
    """A store of fresh gradients takes what plain backward takes, and no temporary besides."""
    weight, x = nn.Parameter(torch.randn(256, 256)), torch.randn(4, 256)
    num_bytes = weight.nbytes

    def collect():
        store = GradStore([weight])
        if mode == "collecting":
            with store.collecting():
                (x @ weight).sum().backward()
        elif mode == "from_grad":
            (x @ weight).sum().backward()
            store.extend_(GradStore.from_grad([weight]))
        else:
            store.backward((x @ weight).sum(), mode=mode)
        return store

    got = recoup.measure(collect, device="cpu", repeats=0)
    assert num_bytes <= got.held_bytes < 1.1 * num_bytes
    assert got.peak_bytes < 1.1 * num_bytes


@pytest.mark.parametrize("mode", ["auto", "harvest"])
def test_the_buffer_stays_the_same(mode):
    weight, x = nn.Parameter(torch.randn(256, 256)), torch.randn(4, 256)
    store = GradStore([weight])
    store.backward((x @ weight).sum(), mode=mode)
    address = store[weight].data_ptr()
    for way in NAMES:
        store.backward((x @ weight).sum(), mode=way)
    assert store[weight].data_ptr() == address
    torch.testing.assert_close(store[weight], 4 * x.sum(0)[:, None].expand(256, 256))


@pytest.mark.parametrize("layout", ["dense", "sparse"])
@pytest.mark.parametrize("own", [True, False])
def test_add(own, layout):
    weight = nn.Parameter(torch.zeros(9, 3))
    gradient = torch.randn(9, 3)
    if layout == "sparse":
        gradient = sparse([1, 4], torch.randn(2, 3), 9)
    values = gradient._values() if layout == "sparse" else gradient
    address, before = values.data_ptr(), gradient.to_dense()
    del values
    store = GradStore().add_(weight, gradient, own=own)
    del gradient
    got = store[weight]._values() if layout == "sparse" else store[weight]
    assert (got.data_ptr() == address) is own
    assert torch.equal(store[weight].to_dense(), before)


@pytest.mark.parametrize("own", [True, False])
def test_add_of_what_others_see(own):
    weight, buffer = nn.Parameter(torch.zeros(3)), torch.ones(6)
    for gradient in (buffer[:3], buffer[:1].expand(3), buffer.view(2, 3)[1], buffer[::2]):
        store = GradStore().add_(weight, gradient, own=own).scale_(5.0)
        assert torch.equal(store[weight], torch.full((3,), 5.0))
    assert torch.equal(buffer, torch.ones(6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("own", [True, False])
def test_a_cast_is_the_only_copy(own, dtype):
    weight = nn.Parameter(torch.zeros(256, 256))
    gradient = torch.ones(256, 256, dtype=torch.bfloat16)

    def add():
        return GradStore(dtype=dtype).add_(weight, gradient, own=own)

    got = recoup.measure(add, device="cpu", repeats=0)
    assert got.peak_bytes == got.held_bytes == 256 * 256 * dtype.itemsize
