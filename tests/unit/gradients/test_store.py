"""Stores as vectors and as mappings, in another type or place, in files, in copies of a model."""

from __future__ import annotations

import copy
import io
import math
from operator import iadd, imul, isub, itruediv  # noqa: F401 - in the table

import pytest
import torch
from torch import nn

from recoup import GradStore
from recoup.errors import GradientError
from tests.unit.gradients.cases import assert_holds, collect, holding, loss_of, made

ROWS = torch.tensor([[0, 2, 0, 5]])


def dense(*shape, dtype=torch.float64):
    return lambda: torch.randn(shape, dtype=dtype)


def sparse(dtype=torch.float64, rows=ROWS):
    return lambda: torch.sparse_coo_tensor(
        rows, torch.randn(rows.shape[1], 3, dtype=dtype), (8, 3), check_invariants=True
    )


KINDS = {  # of a store, and of another one where that is of other kinds
    "one": [dense(4)],
    "shapes": [dense(4, 3), dense(), dense(2, 1, 5), dense(0, 3)],
    "types": [dense(4), dense(3, dtype=torch.float32), dense(5, dtype=torch.bfloat16)],
    "complex": [dense(4, dtype=torch.complex128), dense(3), dense(2, dtype=torch.complex64)],
    "sparse": [sparse(), dense(4, 3), sparse(rows=torch.zeros(1, 0, dtype=torch.long))],
    "sparse complex": [sparse(torch.complex128)],
    "layouts": [sparse(), dense(8, 3), sparse(rows=torch.tensor([[1, 0]])), sparse()],
    "empty": [],
}
OTHERS = {
    "types": [dense(4, dtype=torch.float32), dense(3), dense(5, dtype=torch.float32)],
    "layouts": [dense(8, 3), sparse(), sparse(), sparse(rows=torch.zeros(1, 0, dtype=torch.long))],
}
# Where the type with the fewest digits sets what can be asked.
ROUGH = {"types": 1e-2, "complex": 1e-6}


def targets(kind):
    return [nn.Parameter(torch.zeros_like(make().to_dense())) for make in KINDS[kind]]


def store_of(kind, params, weight=1.0, kinds=KINDS):
    store = GradStore(params)
    for param, make in zip(params, kinds.get(kind, KINDS[kind]), strict=True):
        store.add_(param, make())
    store.weight = weight
    return store


def flat(gradients):
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


# What becomes of a store `a` of weight 2 and of `b`, of weight 4: how often each is in the result,
# its weight, and whether `b` is consumed. In place:
CHANGES = {
    "a.extend_(a, a, weight=0.5)": (2, 0, 4),
    "a.extend_(a, alpha=-0.5)": (0.5, 0, 2),
    "a.extend_(b, b, consume=False)": (1, 2, 10),
    "a.extend_(b, alpha=-0.4, consume=False)": (1, -0.4, 2),
    "a.extend_(a, b)": (2, 1, 8, True),
    "a.extend_(b, alpha=0.25)": (1, 0.25, 2, True),
    "a.extend_(b, weight=torch.tensor(0.5))": (1, 0.5, 4, True),
    "a.extend_()": (1, 0, 2),
    "iadd(a, b)": (1, 1, 6),
    "isub(a, 2 * b)": (1, -2, 2),
    "imul(a, torch.tensor([3.0]))": (3, 0, 2),
    "itruediv(a, 4)": (0.25, 0, 2),
    "a.mean_()": (0.5, 0, 1),
}
NEW = {
    "torch.tensor(0.5) * a": (0.5, 0, 2),
    "a / torch.tensor(4.0)": (0.25, 0, 2),
    "-a - b": (-1, -1, 2),
    "a + 0.5 * b - a / 2": (0.5, 0.5, 6),
    "sum([a, b, GradStore()])": (1, 1, 6),
}


@pytest.mark.sampled(51)
@pytest.mark.parametrize("call", [*CHANGES, *NEW])
def test_a_store_is_a_vector_and_counts_as_often_as_it_is_named(call, kind):
    params = targets(kind)
    a, b = store_of(kind, params, 2.0), store_of(kind, params, 4.0, OTHERS)
    dtypes = [each.dtype for each in a.values()]
    one, other = numbers_of(a, params), numbers_of(b, params)
    in_place = [param for param in params if not a[param].is_sparse]
    places = [a[param].data_ptr() for param in in_place]
    got = eval(call, globals(), {"a": a, "b": b})
    own, factor, weight, *is_consumed = (CHANGES | NEW)[call]
    close(numbers_of(got, params), own * one + factor * other, kind)
    if kind != "empty" or call != "a.mean_()":
        assert (got.weight, type(got.weight)) == (weight, float)
    assert (len(b), b.weight) == ((0, 0) if is_consumed else (len(params), 4))
    assert (got is a) == (call in CHANGES)
    assert [got[param].dtype for param in params] == dtypes
    if got is a:
        assert [a[param].data_ptr() for param in in_place] == places
    else:
        got.scale_(7.0).extend_(a, b, consume=False).clip_norm_(1e-3)
        assert torch.equal(numbers_of(a, params), one)
    assert is_consumed or torch.equal(numbers_of(b, params), other)


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
    a, b = store_of(kind, params), store_of(kind, params, kinds=OTHERS)
    for one, other in ((a, b), (b, a)):
        close(number(one, other), want(numbers_of(one, params), numbers_of(other, params)), kind)
    if kind == "shapes":  # what is not a number is not hidden
        a[params[0]][0, 0] = math.nan
        assert number(a, b).isnan()
        assert not a.isfinite()
        assert b.isfinite()


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("name", ["norm 2", "dot", "cosine"])
def test_second_derivatives_through_numbers(name, is_sparse):
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


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize(
    ("dtype", "max_norm"),
    [(torch.float32, 0.7), (torch.float64, 1e6), (torch.bfloat16, 1e-3), (torch.complex64, 0.7)],
)
def test_clip_norm_is_torchs_bit_by_bit(order, dtype, max_norm):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(7, 5), (13,), ()]]
    store = GradStore(params, dtype=None if dtype.is_complex else dtype)
    for param in params:
        param.grad = torch.randn_like(param)
        store.add_(param, param.grad)
    want = torch.nn.utils.clip_grad_norm_(params, max_norm, order)
    assert torch.equal(store.clip_norm_(max_norm, order), want)
    assert all(torch.equal(store[param], param.grad) for param in params)


@pytest.mark.parametrize(("num_rows", "way"), [(10, "extend_"), (10, "collecting"), (300, "auto")])
def test_sparse_sums_stay_small(num_rows, way):
    layer = nn.Embedding(num_rows, 2, sparse=True)
    store, most = GradStore(layer.parameters()), 0
    for step in range(150):
        loss = layer(torch.randint(num_rows if step > 40 else 8, (8,))).sum()
        if way == "extend_":
            store.extend_(GradStore.from_backward(loss, layer.parameters()))
        else:
            collect(store, loss, way)
        most = max(most, store.nbytes())
    assert store[layer.weight].is_sparse
    assert store[layer.weight].to_dense().sum() == 150 * 8 * 2
    assert most <= (num_rows + 8) * (2 * 4 + 8)  # two entries and an index a row


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
    return {part.untyped_storage().data_ptr() for part in parts if part.numel()}


def test_laws_of_a_mapping():
    a, b, c = (nn.Parameter(torch.ones(size)) for size in (3, 3, 5))
    store, other = holding([a, c], 2.0, 2.0), holding([b, c], 7.0, 7.0)
    assert a in store
    assert not any(each in store for each in (b, "a", a.detach()))
    assert store.get(b) is None
    store.update(other)
    assert [id(each) for each in store] == [id(a), id(c), id(b)]
    assert memory(store).isdisjoint(memory(other))
    assert [float(value[0]) for value in store.values()] == [2.0, 7.0, 7.0]
    low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    store[low] = (low * 2).double()
    assert store.pop(low).dtype is torch.float32  # that of sums of 16-bit gradients
    assert len({store, other, store, store.clone()}) == 3
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
        assert (other.weight, len(other.params)) == (3, len(store.params))
        other.scale_(0.0)
    assert_holds(store, module, want)
    twins.backward(loss_of(twin(inputs[0])))
    assert not set(twins) & set(store)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_type_is_that_of_later_sums_too(kind, dtype):
    store = store_of(kind, targets(kind))
    for param, value in store.to(dtype=dtype).items():
        # What a complex gradient of 16-bit parts would be is not to be had from autograd.
        assert value.is_complex() if param.is_complex() else value.dtype is dtype
        assert torch.equal(value.to_dense(), store[param].to(value.dtype).to_dense())
    layer, x = nn.Linear(3, 4), torch.ones(2, 3)
    store = GradStore.from_backward(layer(x).sum(), layer.parameters())
    moved, away = store.to(dtype=dtype), store.to("meta")  # without memory and values
    for each in (moved, away):
        each.backward(layer(x).sum())
        assert each.weight == 2
    assert {value.dtype for value in moved.values()} == {dtype}
    assert torch.equal(moved[layer.weight], torch.full((4, 3), 4, dtype=dtype))
    assert {value.device.type for value in away.values()} == {"meta"}


# Torch 2.13 looks into sparse tensors when it loads them, and says so.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_files(kind, dtype):
    params = targets(kind)
    model = nn.ParameterList([*params, *params[:1], torch.ones(4)])  # two names, and one that rests
    store = store_of(kind, params, 3.0).to(dtype=dtype)
    assert sorted(store.named(model)) == [str(place) for place in range(len(params))]
    assert all(value is store[model.get_parameter(n)] for n, value in store.named(model).items())
    state, again = through_file(store.state_dict(model)), copy.deepcopy(model)
    loaded = GradStore(again.parameters(), dtype=dtype)
    loaded.add_(again[-1], torch.ones(4))  # which is replaced
    loaded._damage = "broken"
    loaded.load_state_dict(state, again)
    assert_equal(loaded.named(again), store.named(model))
    assert loaded.weight == 3
    assert memory(loaded).isdisjoint(memory(state["gradients"]))
    want = store.clone().named(model)
    store.load_state_dict(store.state_dict(model), model)  # its own
    assert_equal(store.named(model), want)
    state["gradients"]["other"] = torch.ones(2)  # what is unknown may be left out
    loaded.load_state_dict(state, again, strict=False)
    assert_equal(loaded.named(again), want)


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
