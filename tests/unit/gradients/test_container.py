"""A store as a mapping: its laws, its copies, its files, and the room it takes."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from recoup import GradStore
from recoup.errors import GradientError
from tests.unit.gradients.cases import LAYERS, MODES, Undisturbed, assert_holds, loss_of, made


def filled(*targets, value=2.0):
    store = GradStore(targets)
    for target in targets:
        store.add_(target, torch.full_like(target, value))
    return store


def parameters(*sizes):
    return [nn.Parameter(torch.ones(size)) for size in sizes]


# -- replacing and removing ------------------------------------------------------------------------


def test_an_assigned_gradient_replaces_and_is_a_copy():
    w, b = parameters((2, 3), 3)
    store = filled(w, b)
    store.weight = 5.0
    given = torch.arange(6.0).reshape(2, 3)
    store[w] = given
    given.zero_()
    assert torch.equal(store[w], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(store[b], torch.full((3,), 2.0))
    assert store.weight == 5.0
    store.backward((w * 1).sum())  # later gradients are added to it
    assert torch.equal(store[w], torch.arange(6.0).reshape(2, 3) + 1)


def test_gradients_may_be_assigned_while_they_are_looped_over():
    w, b = parameters((2, 3), 3)
    store = filled(w, b)
    for target, gradient in store.items():
        store[target] = gradient * 3
    assert [float(gradient.mean()) for gradient in store.values()] == [6.0, 6.0]


def test_an_assigned_gradient_has_the_type_of_the_store_and_no_graph():
    w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    store = GradStore([w])
    store[w] = (w * 2).double()
    assert store[w].dtype is torch.float32  # that of sums of 16-bit gradients
    assert not store[w].requires_grad
    rows = torch.sparse_coo_tensor([[1]], torch.ones(1), (3,), check_invariants=True)
    store[w] = rows
    rows._values().zero_()
    assert store[w].is_sparse
    assert store[w].to_dense().tolist() == [0, 1, 0]


def test_a_gradient_that_does_not_fit_cannot_be_assigned():
    (w,) = parameters((2, 3))
    store = filled(w)
    for wrong, words in (
        (torch.ones(3), r"has shape \(3,\)"),
        (torch.ones(2, 3, dtype=torch.complex64), "is complex"),
        (torch.ones(2, 3, device="meta"), r"meta device, .* Give one on cpu"),
        ([1.0], "`grad`"),
    ):
        with pytest.raises(ValueError, match=words):
            store[w] = wrong
    with pytest.raises(ValueError, match="`param`"):
        store["w"] = torch.ones(2, 3)
    assert torch.equal(store[w], torch.full((2, 3), 2.0))


def test_a_gradient_is_deleted_and_others_are_taken_over():
    w, b = parameters((2, 3), 3)
    store, other = filled(w, b), filled(w, value=7.0)
    del store[b]
    assert list(store) == [w]
    with pytest.raises(KeyError, match="no gradient"):
        del store[b]
    store.update(other)
    assert torch.equal(store[w], torch.full((2, 3), 7.0))
    assert store[w].untyped_storage().data_ptr() != other[w].untyped_storage().data_ptr()


# -- an empty one ----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "params"])
def test_an_empty_store(given):
    (w,) = parameters(3)
    store = GradStore(None if given is None else [w])
    assert len(store) == store.nbytes() == store.weight == 0
    assert not store
    assert list(store) == list(store.items()) == []
    assert w not in store
    assert store.get(w) is None
    assert float(store.norm()) == float(store.clip_norm_(1.0)) == 0
    assert bool(store.isfinite())
    for call in (store.mean_, store.clone, store.detach_, store.coalesce_, store.densify_):
        assert len(call()) == 0
    assert len(store.scale_(2.0)) == 0
    assert "0 gradients" in repr(store)
    with pytest.raises(KeyError):
        store.pop(w)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_stepping_with_an_empty_store_does_nothing(make):
    (w,) = parameters(3)
    optimizer = make([w], lr=0.1, weight_decay=0.5)
    w.grad = torch.full_like(w, 7)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    before = copy.deepcopy(optimizer.state_dict())
    with Undisturbed(w):
        assert GradStore([w]).step(optimizer) is None
    assert torch.equal(w, torch.ones(3))
    assert optimizer.state_dict() == before
    assert calls == []


# -- laws of a mapping -----------------------------------------------------------------------------


def test_equal_tensors_are_two_keys():
    a, b = parameters(3, 3)
    store = filled(a)
    assert a in store
    assert b not in store
    assert a.detach() not in store
    assert "a" not in store
    with pytest.raises(KeyError):
        store[b]
    store.add_(b, torch.zeros(3))
    assert [id(each) for each in store] == [id(a), id(b)]
    assert float(store[a].sum()) == 6
    assert float(store[b].sum()) == 0


def test_stores_are_themselves_only():
    a, b = filled(*parameters(3)), filled(*parameters(3))
    assert a == a
    assert a != b
    assert a != a.clone()
    assert len({a, b, a}) == 2


def test_taking_out():
    a, b, c = parameters(3, 4, 5)
    store = filled(a, b, c)
    first = store.pop(a)
    assert first.shape == (3,)
    assert store.pop(a, None) is None
    target, last = store.popitem()
    assert target is c
    assert last.shape == (5,)
    store.discard(b)
    store.discard(b)
    assert len(store) == 0
    with pytest.raises(KeyError):
        store.popitem()


def test_filter_and_split():
    a, b, c = parameters(3, 4, 5)
    store = filled(a, b, c)
    part = store.filter([c, a])
    assert [len(each) for each in part] == [3, 5]
    part.scale_(0.0)
    assert float(store[a].sum()) == 6
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [c]}], lr=0.1)
    addresses = {each: gradient.data_ptr() for each, gradient in store.items()}
    for groups, match in [([[a, b]], "0 of the 1"), ([[a, b, c], optimizer], "2 of the 2")]:
        with pytest.raises(GradientError, match=match):
            store.split(*groups)
    assert len(store) == 3
    one, two = store.split(optimizer, [b])
    assert [len(each) for each in one] == [3, 5]
    assert [len(each) for each in two] == [4]
    assert len(store) == 0
    assert {e: g.data_ptr() for part in (one, two) for e, g in part.items()} == addresses


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (nn.Parameter(torch.ones(3)), r"`params` is a Parameter.*\[tensor\]"),
        (nn.Linear(2, 2), r"`params` is a Linear.*module\.parameters\(\)"),
        ([1], "`params` has a int"),
        ({"a": nn.Parameter(torch.ones(3))}, "`params` has a str"),
    ],
)
def test_what_is_no_list_of_tensors(params, match):
    with pytest.raises(ValueError, match=match):
        GradStore(params)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_types_that_hold_no_gradients(dtype):
    with pytest.raises(ValueError, match="`dtype` is"):
        GradStore(dtype=dtype)


# -- copies and files ------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_copies(layer):
    module, inputs = made(layer)
    store = GradStore(module.parameters())
    store.backward(loss_of(module(inputs[0])), weight=3.0)
    want = {name: gradient.to_dense().clone() for name, gradient in store.named(module).items()}
    twin, twins = copy.deepcopy((module, store))
    assert set(twins) == set(twin.parameters())
    assert list(map(id, twins.params)) == list(map(id, twin.parameters()))
    for other, owner in ((store.clone(), module), (copy.copy(store), module), (twins, twin)):
        assert_holds(other, owner, want)
        assert other.weight == 3
        other.scale_(0.0)
    assert_holds(store, module, want)
    twins.backward(loss_of(twin(inputs[0])))
    assert not set(twins) & set(store)


@pytest.mark.parametrize("layer", LAYERS)
def test_files(layer):
    module, inputs = made(layer)
    store = GradStore(module.parameters())
    store.backward(loss_of(module(inputs[0])), weight=3.0)
    for save in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(GradientError, match=r"state_dict\(module\)"):
            save(store)
    file = io.BytesIO()
    torch.save(store.state_dict(module), file)
    file.seek(0)
    other = copy.deepcopy(module)
    loaded = GradStore(other.parameters())
    loaded.load_state_dict(torch.load(file, weights_only=True), other)
    want = {name: gradient.to_dense() for name, gradient in store.named(module).items()}
    assert_holds(loaded, other, want)
    assert loaded.weight == 3
    assert [g.dtype for g in loaded.values()] == [g.dtype for g in store.values()]
    assert [g.layout for g in loaded.values()] == [g.layout for g in store.values()]
    assert set(loaded) == set(other.parameters())


def test_names_that_do_not_fit():
    module, (x, _) = made("linear")
    store = GradStore(module.parameters())
    store.backward(loss_of(module(x)))
    state = store.state_dict(module)
    other = nn.Linear(4, 3, bias=False).double()
    with pytest.raises(GradientError, match="no parameter 'bias'"):
        store.load_state_dict(state, other)
    assert set(store) == set(module.parameters())
    loaded = GradStore()
    loaded.load_state_dict(state, other, strict=False)
    assert list(loaded) == [other.weight]
    with pytest.raises(GradientError, match="`weight` has shape"):
        store.load_state_dict(state, nn.Linear(4, 5))
    with pytest.raises(GradientError, match="Linear has no parameter"):
        store.named(nn.Linear(4, 3))


# -- room ------------------------------------------------------------------------------------------


def test_coalescing_frees_what_was_listed_twice():
    layer = nn.Embedding(1000, 3, sparse=True)
    store = GradStore.from_backward(layer(torch.zeros(400, dtype=torch.long)).sum(), [layer.weight])
    store.coalesce_()
    address = store[layer.weight]._values().data_ptr()
    assert float(store.norm()) == pytest.approx(400 * 3**0.5)
    assert store[layer.weight]._values().data_ptr() == address
    assert store[layer.weight]._values().untyped_storage().nbytes() == 3 * 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
def test_bytes_are_those_of_the_storages(layer, mode):
    module, inputs = made(layer)
    store = GradStore(module.parameters())
    for x in inputs:
        store.backward(loss_of(module(x)), mode=mode)
    parts = []
    for gradient in store.values():
        parts += [gradient._indices(), gradient._values()] if gradient.is_sparse else [gradient]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}
    assert sum(each.nbytes() for each in storages.values()) == store.nbytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("take_out", ["pop", "popitem", "discard", "clear"])
def test_what_is_taken_out_is_freed(take_out, mode):
    """Also if it came as a piece of something larger."""
    a, b = parameters(64, 64)
    store = GradStore([a, b])
    store.backward(torch.cat([a, b]).sin().sum(), mode=mode)
    watched = [weakref.ref(gradient.untyped_storage()) for gradient in store.values()]
    gc.disable()
    try:
        if take_out == "clear":
            store.clear()
        else:
            target = getattr(store, take_out)(*([b] if take_out != "popitem" else []))
            del target
        assert watched[1]() is None
        assert (watched[0]() is None) is (take_out == "clear")
    finally:
        gc.enable()
