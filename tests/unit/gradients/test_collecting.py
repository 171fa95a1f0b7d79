"""What is collected is what plain autograd gives, in each way; it is the store's own, and no copy.

Nothing else is touched, and a gradient is copied only where others have its memory.
"""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup import GradStore
from recoup._core.tensors import nodes_of
from tests.alive import no_collector
from tests.unit.gradients.cases import (
    LAYERS,
    MODES,
    WAYS,
    assert_holds,
    collect,
    loss_of,
    made,
    plain,
    undisturbed,
)


def leaf(*size):
    return torch.randn(*(size or (3, 3)), dtype=torch.float64, requires_grad=True)


def collected(module, inputs, way, **settings):
    """A store over all parameters; `.grad` is as before."""
    store = GradStore(module.parameters(), **settings)
    torch.manual_seed(3)
    with undisturbed(*module.parameters()):
        for x in inputs:
            collect(store, loss_of(module(x)), way)
    return store


# -- equal to plain autograd -----------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_collecting_equals_plain_backward(layer, way):
    module, inputs = made(layer)
    want = plain(module, inputs)
    store = collected(module, inputs, way)
    assert_holds(store, module, want, 1e-14 if "sparse" in layer else 0.0)
    assert store.weight == 2
    assert {g.dtype for g in store.values()} == {value.dtype for value in want.values()}
    parts = [g for g in store.values() if not g.is_sparse]
    parts += [part for g in store.values() if g.is_sparse for part in (g._indices(), g._values())]
    assert sum(part.untyped_storage().nbytes() for part in parts) == store.nbytes()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("preset", [torch.float32, torch.float64, None], ids=str)
def test_grad_dtype_that_was_set(preset, way):
    module, inputs = made("bfloat16")
    want = plain(module, inputs)
    want["weight"] = want["weight"].to(preset or torch.float32)
    module.weight.grad_dtype = preset
    store = collected(module, inputs, way)
    assert module.weight.grad_dtype is preset
    assert_holds(store, module, want)
    other, ones = nn.Linear(3, 2), torch.ones(1, 3)
    store = GradStore.from_backward(other(ones).sum(), other.parameters())
    other.double()(ones.double()).sum().backward()  # a `grad_dtype` that was set would not follow
    assert other.weight.grad.dtype is torch.float64
    collect(store, other(ones.double()).sum(), way)
    assert torch.equal(store[other.weight], torch.full((2, 3), 2.0))


@pytest.mark.parametrize("mode", MODES)
def test_leaves_that_are_no_targets(mode):
    """Nor are inputs, whose gradients are returned; what took no part, or is frozen, is absent.

    What is named twice counts once.
    """
    w, other, x, other_x, unused, frozen = (leaf() for _ in range(6))
    frozen.requires_grad_(False)
    store = GradStore([("a", w), ("b", w), w, unused, frozen])
    with undisturbed(w, other, x, unused):
        (dx, none) = store.backward((x @ w @ other).sum(), inputs=[x, other_x], mode=mode)
    want_x, want_w = torch.autograd.grad((x @ w @ other).sum(), [x, w])
    assert (list(store), none) == ([w], None)
    assert torch.equal(dx, want_x)
    store.backward(x.sum(), params=[unused], mode=mode, allow_empty=True)
    store.backward((frozen * x).sum(), params=[frozen], mode=mode, allow_empty=True)
    (dx,) = store.backward((frozen * x).sum(), params=[frozen], inputs=x, mode=mode)
    assert torch.equal(dx, frozen)
    assert torch.equal(store[w], want_w)


# -- several backwards -----------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["linear", "sparse"])
def test_collecting_within_collecting(layer):
    """Of another store, and backward into the same one."""
    module, (x, y) = made(layer)
    outer, inner = GradStore(module.parameters()), GradStore(module.parameters())
    for _ in range(2):
        with undisturbed(*module.parameters()), outer.collecting():
            loss_of(module(x)).backward()
            with inner.collecting():
                loss_of(module(y)).backward()
            inner.backward(loss_of(module(y)))
            outer.backward(loss_of(module(y)))
            loss_of(module(x)).backward()
    assert_holds(outer, module, plain(module, [x, y, x] * 2), 1e-14)
    assert_holds(inner, module, plain(module, [y] * 4), 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_mean_of_unequal_parts(mode):
    """By weights of backwards, of stores that are merged, and of both."""
    sizes = (5, 1, 7)
    module = nn.Linear(4, 3).double()
    batch = torch.randn(sum(sizes), 4, dtype=torch.float64)
    want = plain(module, [batch], lambda y: y.sin().mean())
    stores = [GradStore(module.parameters()) for _ in range(3)]
    for part in batch.split(sizes):
        ones = [GradStore(module.parameters()) for _ in range(2)]
        for store, weight in zip((stores[0], *ones), (len(part), 1, len(part)), strict=True):
            store.backward(module(part).sin().mean(), weight=weight, mode=mode)
        stores[1].extend_(ones[0], weight=len(part))
        stores[2].extend_(ones[1])
    for store in stores:
        assert store.weight == sum(sizes)
        assert_holds(store.mean_(), module, want, 1e-14)
        assert store.weight == 1


# -- graphs of gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["plain", "graph"])
@pytest.mark.parametrize("layer", ["linear", "sparse"])
def test_gradients_with_and_without_a_graph_are_summed(layer, first, mode):
    """And can be differentiated again."""
    module, (x, _) = made(layer)
    weight, store = module.weight, GradStore(module.parameters())
    more = GradStore.from_backward((weight**4).sum(), [weight], create_graph=True)
    calls = [
        lambda: store.backward(loss_of(module(x)), mode=mode),
        lambda: store.backward((weight**3).sum(), create_graph=True),
        lambda: store.extend_(more, alpha=0.5),
    ]
    for call in calls if first == "plain" else reversed(calls):
        call()
    want = plain(module, [x])["weight"] + 3 * weight**2 + 2 * weight**3
    torch.testing.assert_close(store[weight], want, rtol=1e-14, atol=1e-14)
    second = [torch.autograd.grad(each.sum(), weight)[0] for each in (store[weight], want)]
    torch.testing.assert_close(*second)


CHANGES = {
    "backward": lambda store, a: store.backward(a.exp().sum()),
    "extend_": lambda store, a: store.extend_(GradStore.from_backward(a.exp().sum(), [a])),
    "add_": lambda store, a: store.add_(a, torch.ones_like(a)),
    "scale_": lambda store, a: store.scale_(0.1),
}


@pytest.mark.parametrize("add", CHANGES)
def test_gradients_with_a_graph_are_not_changed_in_place(add):
    """Others may have saved them for their own backward, and two targets may have one."""
    a, b = leaf(4), leaf(4)
    store = GradStore.from_backward(a.pow(3).sum(), [a], create_graph=True)
    first = store[a]
    before, penalty = first.detach().clone(), first.square().sum()
    CHANGES[add](store, a)
    assert torch.equal(first, before)
    second = GradStore.from_backward(penalty, [a])
    torch.testing.assert_close(second[a], (36 * a**3).detach())
    store = GradStore.from_backward((a + b).square().sum(), [a, b], create_graph=True).detach_()
    assert not store[a].requires_grad
    store[a].zero_()
    assert store[b].all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", ["linear", "lstm", "sparse"])
def test_nothing_of_the_graph_lives_on(layer, way):
    module, (x, _) = made(layer)
    store = GradStore(module.parameters())
    with no_collector():
        y = module(x)
        loss = loss_of(y)
        # A node that accumulates is bound to the stream that made it.
        (node, *_) = (each for each in nodes_of([y]) if hasattr(each, "variable"))
        node.metadata["seen"] = True
        watched = [weakref.ref(each) for each in (y, loss, y.untyped_storage())]
        collect(store, loss, way)
        del y, loss, node, _
        assert [each() for each in watched] == [None] * 3
        for each in module.parameters():
            assert "seen" not in each.view_as(each).grad_fn.next_functions[0][0].metadata


# -- whose a gradient is ---------------------------------------------------------------------------


# What autograd delivers twice, in pieces, expanded, or as what backward began with.
ALIASED = {
    "plus": lambda a, b: a + b,
    "summed": lambda a, b: a.sum() * b.sum() * 3,
    "same": lambda a, b: a.view_as(a),
    "viewed": lambda a, b: a.view(-1) + b.view(-1),
    "transposed": lambda a, b: a.t(),
    "stacked": lambda a, b: torch.stack([a, b], 2).sin(),
    "expanded": lambda a, b: (a * 1).expand(5, 4, 4) + b[:1].expand(4, 4),
    "itself and more": lambda a, b: (a + a * b) + a,
    "in one buffer": lambda a, b: torch.add(*torch.cat([a, b]).sin().split(4)),
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
def test_gradients_of_inputs_and_sparse_seeds_are_the_callers(mode):
    a, b = leaf(4), leaf(4)
    for seed in (leaf(4), leaf(4).detach()):
        before, store = seed.detach().clone(), GradStore([a])
        (db,) = store.backward(a + b, seed, inputs=b, mode=mode)
        store.scale_(2.0)
        assert torch.equal(db, before)
        db.zero_()
        assert torch.equal(store[a], 2 * before)
        assert torch.equal(seed.detach(), before)
    values, other = leaf(3), leaf(5)
    rows = torch.sparse_coo_tensor([[0, 2, 4]], values, (5,), check_invariants=True)
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
    want, before = torch.zeros(9, 3).index_add_(0, tokens, seed), seed.clone()
    store = GradStore([weight])
    collect(store, output, way, seed=seed)
    handle.remove()
    store.scale_(2.0)
    assert tokens.tolist() == [1, 4, 1]
    assert torch.equal(seed, before)
    assert torch.equal(kept[0].to_dense(), want)
    tokens.zero_()
    seed.zero_()
    assert torch.equal(store[weight].to_dense(), 2 * want)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_from_grad(is_sparse):
    layer = nn.Embedding(9, 3, sparse=is_sparse)
    layer(torch.tensor([1, 4, 1])).sin().sum().backward()
    before = layer.weight.grad.to_dense().clone()
    store = GradStore.from_grad(layer.parameters()).scale_(2.0)
    assert layer.weight.grad is None
    assert store.weight == 1
    assert torch.equal(store[layer.weight].to_dense(), 2 * before)


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
        add = lambda dtype=dtype: GradStore(dtype=dtype).add_(large, low, own=own)  # noqa: E731
        got = recoup.measure(add, device="cpu", repeats=0)
        assert got.peak_bytes == got.held_bytes == 256 * 256 * dtype.itemsize
