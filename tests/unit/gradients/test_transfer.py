"""Gradients elsewhere: in another type or place, under names, in files, in copies of a model."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import GradientError
from recoup.gradients.container import UNSCALED


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


IDS = torch.tensor([[1, 2, 2], [5, 0, 1]])
NAMES = ["encoder.weight", "phase", "rows.weight", "low.weight", "low.bias"]


def collected(model, **settings):
    store = recoup.GradStore(model.parameters(), **settings)
    store.backward(model(IDS), weight=3.0)
    return store


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    with warnings.catch_warnings():
        # torch 2.13 looks into sparse tensors when it loads them, and says so.
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(file, weights_only=True)


def dense(gradients):
    return {name: value.to_dense() for name, value in gradients.items()}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].layout == value.layout, name
        assert torch.equal(got[name].to_dense(), value.to_dense()), name


def memory(gradients):
    def parts(gradient):
        return (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,)

    return {
        part.untyped_storage().data_ptr() for each in gradients.values() for part in parts(each)
    }


# -- to --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"device": "cpu"}, {"device": "cpu", "pin_memory": True}, {"non_blocking": True}],
)
def test_a_copy_shares_nothing(settings):
    model = Words()
    store = collected(model)
    copied = store.to(**settings)
    assert_equal(copied.named(model), store.named(model))
    assert memory(copied).isdisjoint(memory(store))
    assert (copied.weight, copied.params) == (store.weight, store.params)
    before = dense(store.clone().named(model))
    copied.scale_(0.0)
    assert_equal(dense(store.named(model)), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_type_is_that_of_later_sums_too(dtype):
    model = Words()
    store = collected(model)
    copied = store.to(dtype=dtype)
    kinds = {name: value.dtype for name, value in copied.named(model).items()}
    # What a complex gradient of 16-bit parts would be is not to be had from autograd.
    assert {kinds[name] for name in NAMES if name != "phase"} == {dtype}
    assert kinds["phase"].is_complex
    for name, value in copied.named(model).items():
        kind = kinds[name]
        assert torch.equal(value.to_dense(), store.named(model)[name].to_dense().to(kind))


def test_sums_go_on_in_another_type():
    model = nn.Linear(4, 4)
    x = torch.randn(5, 4)
    store = recoup.GradStore(model.parameters())
    store.backward(model(x).square().sum())
    copied = store.to(dtype=torch.float64)
    copied.backward(model(x).square().sum())
    for each, value in store.items():
        assert copied[each].dtype == torch.float64
        torch.testing.assert_close(copied[each], 2 * value.double(), rtol=1e-6, atol=1e-6)


def test_what_is_elsewhere_is_summed_there():
    """No memory, no values: only that a gradient leaves, and that the next one follows."""
    model = nn.Linear(4, 4)
    store = recoup.GradStore(model.parameters())
    store.backward(model(torch.ones(2, 4)).sum())
    away = store.to("meta")
    away.backward(model(torch.ones(2, 4)).sum())
    assert {value.device.type for value in away.values()} == {"meta"}
    assert {value.device.type for value in store.values()} == {"cpu"}
    assert away.weight == 2


def test_strides_stay():
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    store = recoup.GradStore(conv.parameters())
    store.backward(conv(torch.randn(2, 3, 8, 8)).square().sum())
    copied = store.to(dtype=torch.float64)
    assert copied[conv.weight].stride() == store[conv.weight].stride()


def test_the_scale_goes_along():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    store = recoup.GradStore(model.parameters())
    store.backward(model(torch.ones(2, 4)).sum(), scaler=scaler)
    copies = [store.to("cpu"), copy.deepcopy((model, store))[1], recoup.GradStore()]
    copies[2].load_state_dict(through_file(store.state_dict(model)), model)
    for copied in (copies[0], copies[2]):
        with pytest.raises(GradientError, match="scaled by 8"):
            copied.step(optimizer)
    assert [copied._scale for copied in copies] == [8.0] * 3
    store.unscale_(scaler, optimizer)
    assert store.to("cpu")._scale == UNSCALED
    with pytest.raises(GradientError, match="unscaled"):
        store.to("cpu").unscale_(scaler, optimizer)


def test_pinned_memory_is_that_of_the_cpu():
    store = collected(Words())
    with pytest.raises(ValueError, match=r"`pin_memory`.*device=\"cpu\""):
        store.to("meta", pin_memory=True)


# -- names and files -------------------------------------------------------------------------------


def test_names_are_those_of_the_parameters():
    model = Words()
    store = collected(model)
    named = store.named(model)
    assert sorted(named) == sorted(NAMES)
    for name, value in named.items():
        assert value is store[model.get_parameter(name)]


def test_gradients_of_what_a_module_does_not_have_are_an_error():
    model = Words()
    store = collected(model)
    with pytest.raises(GradientError, match=r"Embedding has no parameter.*\(4,\).*`filter`"):
        store.named(model.rows)
    assert list(store.filter(model.rows.parameters()).named(model.rows)) == ["weight"]


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_file_brings_back_what_was_saved(dtype):
    model = Words()
    store = collected(model, dtype=dtype)
    state = through_file(store.state_dict(model))
    again = copy.deepcopy(model)
    loaded = recoup.GradStore(again.parameters(), dtype=dtype)
    loaded.load_state_dict(state, again)
    assert_equal(loaded.named(again), store.named(model))
    assert loaded.weight == 3
    assert memory(loaded).isdisjoint(memory(state["gradients"]))


def test_what_was_loaded_is_summed_and_applied():
    """Half of the batches, a file, another process, the other half."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    batches = torch.randn(4, 5, 4).double()
    plain = copy.deepcopy(model)
    for x in batches:
        plain(x).square().sum().div(4).backward()
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()

    first = recoup.GradStore(model.parameters())
    for x in batches[:2]:
        first.backward(model(x).square().sum())
    state = through_file({"model": model.state_dict(), "store": first.state_dict(model)})
    other = copy.deepcopy(model)
    other.load_state_dict(state["model"])
    second = recoup.GradStore(other.parameters())
    second.load_state_dict(state["store"], other)
    for x in batches[2:]:
        second.backward(other(x).square().sum())
    second.mean_().step(torch.optim.AdamW(other.parameters(), lr=0.1))
    for got, want in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_loading_replaces():
    model = Words()
    state = collected(model).state_dict(model)
    other = recoup.GradStore(model.parameters())
    other.add_(model.rests.weight, torch.ones(4, 4))
    other.load_state_dict(state, model)
    assert model.rests.weight not in other
    assert other.weight == 3


def test_a_store_may_load_its_own_state():
    model = Words()
    store = collected(model)
    want = store.clone().named(model)
    store.load_state_dict(store.state_dict(model), model)
    assert_equal(store.named(model), want)


def test_loading_makes_a_broken_store_usable():
    model = nn.Linear(2, 2)
    store = recoup.GradStore(model.parameters())
    store.add_(model.weight, torch.ones(2, 2))
    state = through_file(store.state_dict(model))
    store._damage = "broken"
    store.load_state_dict(state, model)
    assert torch.equal(store[model.weight], torch.ones(2, 2))


def wrong(state, **changes):
    gradients = {**state["gradients"], **changes}
    return {**state, "gradients": {n: g for n, g in gradients.items() if g is not None}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"other": torch.ones(2), "another": torch.ones(2)}, "'other', 'another'.*strict=False"),
        ({"low.bias": torch.ones(5)}, r"`low.bias` has shape \(5,\).*\(4,\)"),
        ({"low.bias": torch.ones(4, dtype=torch.complex64)}, "complex"),
        ({"decoder.weight": torch.ones(6, 4)}, "`encoder.weight` and `decoder.weight` are one"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(changes, words):
    model = Words()
    store = collected(model)
    want = store.clone().named(model)
    with pytest.raises((GradientError, ValueError), match=words):
        store.load_state_dict(wrong(store.state_dict(model), **changes), model)
    assert_equal(store.named(model), want)
    assert store.weight == 3


def test_names_that_are_unknown_may_be_left_out():
    model = Words()
    store = collected(model)
    state = wrong(store.state_dict(model), other=torch.ones(2))
    loaded = recoup.GradStore(model.parameters())
    loaded.load_state_dict(state, model, strict=False)
    assert_equal(loaded.named(model), store.named(model))


def test_gradients_alone_are_no_state():
    model = Words()
    store = collected(model)
    with pytest.raises(GradientError, match=r"no 'gradients'.*state_dict"):
        store.load_state_dict(store.named(model), model)


def test_a_state_comes_first_as_for_modules():
    model = Words()
    store = collected(model)
    state = store.state_dict(model)
    for given, name in (((model, state), "state_dict"), ((state, None), "module")):
        with pytest.raises(ValueError, match=rf"`{name}`.*load_state_dict\(state_dict, module\)"):
            store.load_state_dict(*given)
    assert store.weight == 3


def test_either_name_of_a_tied_weight_will_do():
    model = Words()
    state = collected(model).state_dict(model)
    gradient = state["gradients"]["encoder.weight"]
    state = wrong(state, **{"encoder.weight": None, "decoder.weight": gradient})
    loaded = recoup.GradStore(model.parameters())
    loaded.load_state_dict(state, model)
    assert torch.equal(loaded[model.encoder.weight], gradient)


@pytest.mark.parametrize("save", [pickle.dumps, lambda store: torch.save(store, io.BytesIO())])
def test_a_store_is_no_file(save):
    store = collected(Words())
    with pytest.raises(GradientError, match=r"`store\.state_dict\(module\)`"):
        save(store)


# -- identity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("model", "store"), ("store", "model")])
def test_copied_together_they_belong_together(order):
    pair = {"model": Words()}
    pair["store"] = collected(pair["model"])
    copied = copy.deepcopy({key: pair[key] for key in order})
    model, store = copied["model"], copied["store"]
    assert all(each in {*model.parameters()} for each in (*store, *store.params))
    assert_equal(store.named(model), pair["store"].named(pair["model"]))
    assert memory(store).isdisjoint(memory(pair["store"]))
    store.backward(model(IDS))
    assert (store.weight, pair["store"].weight) == (4, 3)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.to("cpu"),
        lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
        lambda model: nn.utils.parametrize.register_parametrization(model, "weight", nn.Identity()),
    ],
    ids=["double", "to", "load_state_dict", "parametrize"],
)
def test_parameters_that_stay_keep_their_gradients(change):
    model = nn.Linear(4, 4)
    store = recoup.GradStore(model.parameters())
    store.backward(model(torch.ones(2, 4)).sum())
    before = [each.clone() for each in store.values()]
    change(model)
    store.step(torch.optim.SGD(model.parameters(), lr=1.0))
    assert len(store) == 0
    assert len(before) == 2


def test_parameters_that_are_replaced_take_theirs_over_by_name():
    model = nn.Linear(4, 4)
    store = recoup.GradStore(model.parameters())
    store.backward(model(torch.ones(2, 4)).sum())
    want = {name: value.clone() for name, value in store.named(model).items()}
    state = store.state_dict(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(GradientError, match=r"assign=True.*state_dict"):
        store.step(optimizer)
    with pytest.raises(GradientError, match="no parameter"):
        store.named(model)
    carried = recoup.GradStore(model.parameters())
    carried.load_state_dict(state, model)
    assert_equal(carried.named(model), want)
    before = model.weight.detach().clone()
    carried.step(optimizer)
    assert torch.equal(model.weight, before - want["weight"])


def test_nothing_of_the_graph_is_kept():
    """A node that accumulates is bound to the stream that made it: it must not outlive backward."""
    weight = nn.Parameter(torch.ones(3))
    store = recoup.GradStore([weight])
    for mode in ("auto", "grad", "harvest"):
        loss = F.relu(weight * 2).sum()
        node = loss.grad_fn.next_functions[0][0].next_functions[0][0].next_functions[0][0]
        node.metadata["seen"] = mode
        store.backward(loss, mode=mode)
        del loss, node
        fresh = (weight * 2).grad_fn.next_functions[0][0]
        assert "seen" not in fresh.metadata
        del fresh
