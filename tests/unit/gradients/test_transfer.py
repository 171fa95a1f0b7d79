"""A store as a mapping, in another type or place, under names, in files, in copies of a model."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from recoup import GradStore
from tests.unit.gradients.cases import assert_holds, holding, loss_of, made


class Words(nn.Module):
    """One weight under two names, a sparse one, a complex one, one of 16 bits, one that rests."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(6, 4)
        self.decoder = nn.Linear(4, 6, bias=False)
        self.decoder.weight = self.encoder.weight
        self.rows = nn.Embedding(50, 4, sparse=True)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.low = nn.Linear(4, 4).bfloat16()
        self.rests = nn.Linear(4, 4)

    def forward(self, ids):
        x = self.encoder(ids) + self.rows(ids + 7)
        x = x + self.low(x.bfloat16()).float()
        return self.decoder((x * self.phase).abs()).square().mean()


NAMES = ["encoder.weight", "phase", "rows.weight", "low.weight", "low.bias"]


def collected(model, **settings):
    store = GradStore(model.parameters(), **settings)
    store.backward(model(torch.tensor([[1, 2, 2], [5, 0, 1]])), weight=3.0)
    return store


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name].dtype, got[name].layout) == (value.dtype, value.layout), name
        assert torch.equal(got[name].to_dense(), value.to_dense()), name


def memory(gradients):
    parts = [g._values() if g.is_sparse else g for g in gradients.values()]
    parts += [g._indices() for g in gradients.values() if g.is_sparse]
    return {part.untyped_storage().data_ptr() for part in parts}


# -- a mapping -------------------------------------------------------------------------------------


def parameters(*sizes):
    return [nn.Parameter(torch.ones(size)) for size in sizes]


def test_an_assigned_gradient_replaces_and_is_a_copy():
    (w,) = parameters(3)
    store, given = holding([w], 2.0, weight=5.0), torch.arange(3.0)
    store[w] = given
    given.zero_()
    assert store[w].tolist() == [0.0, 1.0, 2.0]
    assert store.weight == 5.0
    store.backward((w * 1).sum())  # later gradients are added to it
    assert store[w].tolist() == [1.0, 2.0, 3.0]
    low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    store[low] = (low * 2).double()
    assert store[low].dtype is torch.float32  # that of sums of 16-bit gradients
    assert not store[low].requires_grad


def test_laws_of_a_mapping():
    a, b, c = parameters(3, 3, 5)
    store, other = holding([a, c], 2.0, 2.0), holding([b, c], 7.0, 7.0)
    assert a in store
    assert not any(each in store for each in (b, "a", a.detach()))
    assert store.get(b) is None
    store.update(other)
    assert [id(each) for each in store] == [id(a), id(c), id(b)]
    assert memory(store).isdisjoint(memory(other))
    assert [float(value[0]) for value in store.values()] == [2.0, 7.0, 7.0]
    assert store == store
    assert store != store.clone()
    assert len({store, other, store}) == 2
    part = store.filter([c, a])
    assert list(part) == [a, c]
    part.scale_(0.0)
    assert float(store[a].sum()) == 6
    assert store.pop(a).shape == (3,)
    assert store.pop(a, None) is None
    assert store.popitem()[0] is c
    del store[b]
    store.discard(c)
    assert len(store) == 0


# -- copies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("model", "store"), ("store", "model")])
@pytest.mark.parametrize("layer", ["conv", "sparse", "tied"])
def test_copied_together_they_belong_together(layer, order):
    module, inputs = made(layer)
    store = GradStore(module.parameters())
    store.backward(loss_of(module(inputs[0])), weight=3.0)
    want = {name: gradient.to_dense().clone() for name, gradient in store.named(module).items()}
    pair = {"model": module, "store": store}
    copied = copy.deepcopy({key: pair[key] for key in order} | {"again": store})
    twin, twins = copied["model"], copied["store"]
    assert copied["again"] is twins
    assert [*map(id, twins.params)] == [*map(id, twin.parameters())]
    copies = [(each, module) for each in (store.clone(), copy.copy(store), store.to())]
    for other, owner in (*copies, (twins, twin)):
        assert_holds(other, owner, want)
        assert memory(other).isdisjoint(memory(store))
        assert (other.weight, len(other.params)) == (3, len(store.params))
        other.scale_(0.0)
    assert_holds(store, module, want)
    twins.backward(loss_of(twin(inputs[0])))
    assert not set(twins) & set(store)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_type_is_that_of_later_sums_too(dtype):
    model = Words()
    model.phase.data = model.phase.data.abs().to(torch.complex64)
    store = collected(model)
    named = store.to(dtype=dtype).named(model)
    # What a complex gradient of 16-bit parts would be is not to be had from autograd.
    assert {named[name].dtype for name in NAMES if name != "phase"} == {dtype}
    assert named["phase"].is_complex()
    for name, value in named.items():
        assert torch.equal(value.to_dense(), store.named(model)[name].to_dense().to(value.dtype))
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    store = GradStore.from_backward(conv(x).square().sum(), conv.parameters())
    moved = store.to(dtype=torch.float64)
    moved.backward(conv(x).square().sum())
    for each, value in store.items():
        torch.testing.assert_close(moved[each], 2 * value.double(), rtol=1e-6, atol=1e-6)
    away = store.to("meta")  # no memory, no values: only that the next one follows
    away.backward(conv(x).sum())
    places = [{value.device.type for value in each.values()} for each in (store, away)]
    assert places == [{"cpu"}, {"meta"}]
    assert away.weight == 2


# -- names and files -------------------------------------------------------------------------------


# Torch 2.13 looks into sparse tensors when it loads them, and says so.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_files(dtype):
    model = Words()
    store = collected(model, dtype=dtype)
    assert sorted(store.named(model)) == sorted(NAMES)
    assert all(value is store[model.get_parameter(n)] for n, value in store.named(model).items())
    assert list(store.filter(model.rows.parameters()).named(model.rows)) == ["weight"]
    state, again = through_file(store.state_dict(model)), copy.deepcopy(model)
    loaded = GradStore(again.parameters(), dtype=dtype)
    loaded.add_(again.rests.weight, torch.ones(4, 4))  # which is replaced
    loaded._damage = "broken"
    loaded.load_state_dict(state, again)
    assert_equal(loaded.named(again), store.named(model))
    assert loaded.weight == 3
    assert memory(loaded).isdisjoint(memory(state["gradients"]))
    want = store.clone().named(model)
    store.load_state_dict(store.state_dict(model), model)  # its own
    assert_equal(store.named(model), want)
    gradients = {**state["gradients"], "other": torch.ones(2)}  # what is unknown may be left out
    loaded.load_state_dict({**state, "gradients": gradients}, again, strict=False)
    assert_equal(loaded.named(again), store.named(model))
