"""A store's gradients are its own, whatever autograd delivers; and its own is not copied again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup import GradStore
from tests.unit.gradients.cases import MODES, WAYS, collect


def leaf(*size):
    return torch.randn(*size, dtype=torch.float64, requires_grad=True)


def in_one_buffer(a, b):
    first, second = torch.cat([a, b]).sin().split(4)
    return first + second


# What autograd delivers twice, in pieces, expanded, or as what backward began with.
ALIASED = {
    "plus": lambda a, b: a + b,
    "square of sum": lambda a, b: (a + b).square(),
    "summed": lambda a, b: a.sum() * b.sum() * 3,
    "same": lambda a, b: a.view_as(a),
    "viewed": lambda a, b: a.view(-1) + b.view(-1),
    "transposed": lambda a, b: a.t(),
    "concatenated": lambda a, b: torch.cat([a, b]).sin(),
    "stacked": lambda a, b: torch.stack([a, b], 2).sin(),
    "expanded": lambda a, b: (a * 1).expand(5, 4, 4) + b[:1].expand(4, 4),
    "itself and more": lambda a, b: (a + a * b) + a,
    "in one buffer": in_one_buffer,
}


@pytest.mark.parametrize("way", [*WAYS, "create_graph", "from_grad"])
@pytest.mark.parametrize("name", ALIASED)
def test_gradients_may_be_changed_in_place(name, way):
    """The seed, too, is the caller's."""
    a, b = leaf(4, 4), leaf(4, 4)
    output = ALIASED[name](a, b)
    seed = torch.randn_like(output).detach()
    given = seed.clone()
    want = torch.autograd.grad(output, [a, b], seed, allow_unused=True, retain_graph=True)
    want = {t: g.clone() for t, g in zip((a, b), want, strict=True) if g is not None}
    store = GradStore([a, b])
    for _ in range(2):
        if way == "from_grad":
            output.backward(seed.clone(), retain_graph=True)
            store.extend_(GradStore.from_grad([a, b]))
        elif way == "create_graph":
            store.backward(output, seed, create_graph=True)
        else:  # in `.grad`, torch itself may have given the seed away
            own = seed.clone() if way == "collecting" else seed
            collect(store, output, way, seed=own, retain_graph=True)
    store.detach_()
    storages = [gradient.untyped_storage() for gradient in store.values()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert [storage.nbytes() for storage in storages] == [each.nbytes for each in store.values()]
    store.scale_(0.5)
    total = store.clip_norm_(1e-3)
    for target, gradient in want.items():
        wanted = gradient * (1e-3 / (total + 1e-6))
        torch.testing.assert_close(store[target], wanted, rtol=1e-12, atol=1e-16)
    assert torch.equal(seed, given)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_graph", [False, True])
def test_gradients_of_inputs_are_the_callers(has_graph, mode):
    a, b, seed = leaf(4), leaf(4), leaf(4)
    before = seed.detach().clone()
    store = GradStore([a])
    (db,) = store.backward(a + b, seed if has_graph else seed.detach(), inputs=b, mode=mode)
    store.scale_(2.0)
    assert torch.equal(db, before)
    db.zero_()
    assert torch.equal(store[a], 2 * before)
    assert torch.equal(seed.detach(), before)


@pytest.mark.parametrize("mode", MODES)
def test_a_sparse_seed_is_the_callers(mode):
    values, other = leaf(3), leaf(5)
    indices = torch.tensor([[0, 2, 4]])
    rows = torch.sparse_coo_tensor(indices, values, (5,), check_invariants=True)
    seed = torch.arange(1.0, 6.0).double().to_sparse()
    store = GradStore([values, other])
    store.backward([rows, other * 1], [seed, seed], mode=mode)
    store.scale_(2.0)
    assert torch.equal(store[values], torch.tensor([2.0, 6.0, 10.0]).double())
    assert torch.equal(store[other].to_dense(), 2 * seed.to_dense())
    assert torch.equal(seed.to_dense(), torch.arange(1.0, 6.0).double())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_of_what_others_hold(is_sparse, way):
    """A hook keeps it; a sparse one has the tokens for indices, and the seed for values."""
    weight, tokens, kept = nn.Parameter(torch.randn(9, 3)), torch.tensor([1, 4, 1]), []
    handle = weight.register_hook(lambda gradient: kept.append(gradient))
    output = F.embedding(tokens, weight, sparse=is_sparse)
    seed = torch.randn_like(output).detach()
    want = torch.zeros(9, 3).index_add_(0, tokens, seed)
    store = GradStore([weight])
    collect(store, output, way, seed=seed)
    handle.remove()
    before = tokens.clone(), seed.clone()
    store.scale_(2.0)
    assert torch.equal(tokens, before[0])
    assert torch.equal(seed, before[1])
    assert torch.equal(kept[0].to_dense(), want)
    tokens.zero_()
    seed.zero_()
    assert torch.equal(store[weight].to_dense(), 2 * want)


CHANGES = {
    "backward": lambda store, a: store.backward(a.exp().sum()),
    "extend_": lambda store, a: store.extend_(GradStore.from_backward(a.exp().sum(), [a])),
    "add_": lambda store, a: store.add_(a, torch.ones_like(a)),
    "scale_": lambda store, a: store.scale_(0.1),
}


@pytest.mark.parametrize("add", CHANGES)
def test_gradients_with_a_graph_are_not_changed_in_place(add):
    """Others may have saved them for their own backward."""
    a = leaf(4)
    store = GradStore([a])
    store.backward(a.pow(3).sum(), create_graph=True)
    first = store[a]
    before, penalty = first.detach().clone(), first.square().sum()
    CHANGES[add](store, a)
    assert torch.equal(first, before)
    second = GradStore.from_backward(penalty, [a])
    torch.testing.assert_close(second[a], (36 * a**3).detach())


def test_one_gradient_of_two_is_copied_when_its_graph_is_cut():
    a, b = leaf(4), leaf(4)
    store = GradStore.from_backward((a + b).square().sum(), [a, b], create_graph=True).detach_()
    store[a].zero_()
    assert store[b].all()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_from_grad(is_sparse):
    layer = nn.Embedding(9, 3, sparse=is_sparse)
    layer(torch.tensor([1, 4, 1])).sin().sum().backward()
    gradient = layer.weight.grad
    before = gradient.to_dense().clone()
    store = GradStore.from_grad(layer.parameters(), take=False).scale_(2.0)
    assert layer.weight.grad is gradient
    assert torch.equal(gradient.to_dense(), before)
    taken = GradStore.from_grad(layer.parameters())
    assert layer.weight.grad is None
    for each, factor in ((store, 2), (taken, 1)):
        assert each.weight == 1
        assert torch.equal(each[layer.weight].to_dense(), factor * before)


# -- and no copy where it is not needed ------------------------------------------------------------


@pytest.mark.parametrize("way", ["auto", "harvest", "collecting", "from_grad"])
def test_the_first_gradient_is_adopted(way):
    """A store of fresh gradients takes what plain backward takes, and no temporary besides."""
    weight, x = nn.Parameter(torch.randn(256, 256)), torch.randn(4, 256)
    num_bytes = weight.nbytes

    def run():
        store = GradStore([weight])
        if way == "from_grad":
            (x @ weight).sum().backward()
            return store.extend_(GradStore.from_grad([weight]))
        collect(store, (x @ weight).sum(), way)
        return store

    got = recoup.measure(run, device="cpu", repeats=0)
    assert num_bytes <= got.held_bytes < 1.1 * num_bytes
    assert got.peak_bytes < 1.1 * num_bytes


@pytest.mark.parametrize("own", [True, False])
def test_what_is_added_is_taken_over_or_copied_once(own):
    weight, buffer = nn.Parameter(torch.zeros(3)), torch.ones(6)
    pieces = buffer[:3], buffer[:1].expand(3), buffer.view(2, 3)[1], buffer[::2]
    for gradient in (*pieces, torch.ones(3)[:1].expand(3)):
        store = GradStore().add_(weight, gradient, own=own).scale_(5.0)
        assert torch.equal(store[weight], torch.full((3,), 5.0))
    assert torch.equal(buffer, torch.ones(6))
    table = nn.Parameter(torch.zeros(9, 3))
    rows = torch.sparse_coo_tensor([[1, 4]], torch.ones(2, 3), (9, 3), check_invariants=True)
    for gradient, parts in ((torch.ones(9, 3), lambda g: g), (rows, torch.Tensor._values)):
        store = GradStore().add_(table, gradient, own=own)
        assert (parts(store[table]).data_ptr() == parts(gradient).data_ptr()) is own
    large, low = nn.Parameter(torch.zeros(256, 256)), torch.ones(256, 256, dtype=torch.bfloat16)
    for dtype in (torch.float64, torch.float32):
        got = recoup.measure(
            lambda dtype=dtype: GradStore(dtype=dtype).add_(large, low, own=own),
            device="cpu",
            repeats=0,
        )
        assert got.peak_bytes == got.held_bytes == 256 * 256 * dtype.itemsize
