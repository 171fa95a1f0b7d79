"""What is collected is what plain autograd gives, in each way, and the store's own; or an error."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup import GradStore
from recoup._core.tensors import nodes_of
from recoup.errors import GradientError
from tests.alive import no_collector
from tests.unit.gradients import cases
from tests.unit.gradients.cases import LAYERS, WAYS, assert_holds, collect, loss_of, made, plain
from tests.zoo import Fn


def leaf(*size):
    return torch.randn(*(size or (3, 3)), dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", LAYERS)
def test_collecting_equals_plain_backward(layer, way):
    module, inputs = made(layer)
    want, store = plain(module, inputs), GradStore(module.parameters())
    torch.manual_seed(3)
    with cases.undisturbed(*module.parameters()):
        for x in inputs:
            collect(store, loss_of(module(x)), way)
    assert_holds(store, module, want, 1e-14 if "sparse" in layer else 0.0)
    assert store.weight == 2
    assert {g.dtype for g in store.values()} == {value.dtype for value in want.values()}
    parts = [g for g in store.values() if not g.is_sparse]
    parts += [part for g in store.values() if g.is_sparse for part in (g._indices(), g._values())]
    assert sum(part.untyped_storage().nbytes() for part in parts) == store.nbytes()


@pytest.mark.parametrize("mode", cases.MODES)
def test_leaves_that_are_no_targets(mode):
    w, other, x, other_x, unused, frozen = (leaf() for _ in range(6))
    frozen.requires_grad_(False)
    store = GradStore([("a", w), ("b", w), w, unused, frozen])
    with cases.undisturbed(w, other, x, unused):
        (dx, none) = store.backward((x @ w @ other).sum(), inputs=[x, other_x], mode=mode)
    want_x, want_w = torch.autograd.grad((x @ w @ other).sum(), [x, w])
    assert (list(store), none) == ([w], None)
    assert torch.equal(dx, want_x)
    store.backward(x.sum(), params=[unused], mode=mode, allow_empty=True)
    store.backward((frozen * x).sum(), params=[frozen], mode=mode, allow_empty=True)
    (dx,) = store.backward((frozen * x).sum(), params=[frozen], inputs=x, mode=mode)
    assert torch.equal(dx, frozen)
    assert torch.equal(store[w], want_w)


@pytest.mark.parametrize("layer", ["linear", "sparse"])
def test_collecting_within_collecting(layer):
    module, (x, y) = made(layer)
    outer, inner = GradStore(module.parameters()), GradStore(module.parameters())
    for _ in range(2):
        with cases.undisturbed(*module.parameters()), outer.collecting():
            loss_of(module(x)).backward()
            with inner.collecting():
                loss_of(module(y)).backward()
            inner.backward(loss_of(module(y)))
            outer.backward(loss_of(module(y)))
            loss_of(module(x)).backward()
    assert_holds(outer, module, plain(module, [x, y, x] * 2), 1e-14)
    assert_holds(inner, module, plain(module, [y] * 4), 1e-14)


@pytest.mark.parametrize("mode", cases.MODES)
def test_mean_of_unequal_parts(mode):
    module, batch = nn.Linear(4, 3).double(), torch.randn(13, 4, dtype=torch.float64)
    want = plain(module, [batch], lambda y: y.sin().mean())
    one, merged = (GradStore(module.parameters()) for _ in range(2))
    for part in batch.split((5, 1, 7)):
        y = module(part).sin()
        one.backward(y, torch.full_like(y, 1 / y.numel()), weight=len(part), mode=mode)
        other = GradStore.from_backward(module(part).sin().mean(), module.parameters())
        merged.extend_(other, weight=len(part))
    for store in (one, merged):
        assert store.weight == 13
        assert_holds(store.mean_(), module, want, 1e-14)
        assert store.weight == 1


@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("first", ["plain", "graph"])
@pytest.mark.parametrize("layer", ["linear", "sparse"])
def test_gradients_with_and_without_a_graph_are_summed(layer, first, mode):
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


def nesterov(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


CHANGES = {
    "backward": lambda store, a, _: store.backward(a.exp().sum()),
    "extend_": lambda store, a, _: store.extend_(GradStore.from_backward(a.exp().sum(), [a])),
    "add_": lambda store, a, _: store.add_(a, torch.ones_like(a)),
    "scale_": lambda store, a, _: store.scale_(0.1),
    "step": lambda store, a, _: store.step(nesterov([*store])),
    "a step that keeps": lambda store, a, _: store.step(nesterov([*store]), consume=False),
    "unscale_": lambda store, a, scaler: store.unscale_(scaler, nesterov([*store])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_with_a_graph_are_not_changed_in_place(change):
    """Others may have saved them for their own backward, and two targets may have one."""
    x, a, b = leaf(4), nn.Parameter(torch.zeros(4).double()), nn.Parameter(torch.zeros(4).double())
    store, scaler = GradStore([a, b]), cases.scaler_of() if change == "unscale_" else None
    store.backward(((a + b) * x**3).sum(), create_graph=True, scaler=scaler)
    first = store[a]
    before, penalty = first.detach().clone(), first.square().sum()
    CHANGES[change](store, a, scaler)
    assert torch.equal(first, before)
    scale = 64 if scaler else 1
    torch.testing.assert_close(*torch.autograd.grad(penalty, x), (6 * scale * x**5).detach())
    if "step" in change:  # with a momentum that is the first gradient
        torch.testing.assert_close([a, b], [-0.1 * 1.9 * before] * 2)
    if scaler:
        torch.testing.assert_close([*store.values()], [x**3, x**3])
    store = GradStore.from_backward((a + b + 1).square().sum(), [a, b], create_graph=True).detach_()
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


ALIASED = (  # what autograd delivers twice, in pieces, expanded, or as what backward began with
    lambda a, b: a + b,
    lambda a, b: a.sum() * b.sum() * 3,
    lambda a, b: a.view_as(a),
    lambda a, b: a.view(-1) + b.view(-1),
    lambda a, b: a.t(),
    lambda a, b: torch.stack([a, b], 2).sin(),
    lambda a, b: (a * 1).expand(5, 4, 4) + b[:1].expand(4, 4),
    lambda a, b: (a + a * b) + a,
    lambda a, b: torch.add(*torch.cat([a, b]).sin().split(4)),
)


@pytest.mark.parametrize("way", [*WAYS, "create_graph", "from_grad"])
@pytest.mark.parametrize("make", ALIASED)
def test_gradients_may_be_changed_in_place(make, way):
    a, b = leaf(4, 4), leaf(4, 4)
    output = make(a, b)
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_gradients_of_what_others_hold(is_sparse, way):
    weight, tokens, kept = nn.Parameter(torch.randn(9, 3)), torch.tensor([1, 4, 1]), []
    weight.register_hook(kept.append)
    output = F.embedding(tokens, weight, sparse=is_sparse)
    seed = torch.randn_like(output).detach()
    want, before = torch.zeros(9, 3).index_add_(0, tokens, seed), seed.clone()
    store = GradStore([weight])
    collect(store, output, way, seed=seed)
    store.scale_(2.0)
    assert tokens.tolist() == [1, 4, 1]
    assert torch.equal(seed, before)
    assert torch.equal(kept[0].to_dense(), want)
    tokens.zero_()
    seed.zero_()
    assert torch.equal(store[weight].to_dense(), 2 * want)


@pytest.mark.parametrize("own", [True, False])
def test_what_is_added_is_taken_over_or_copied_once(own):
    weight, buffer = nn.Parameter(torch.zeros(3)), torch.ones(6)
    for gradient in (buffer[:3], buffer[:1].expand(3), buffer.view(2, 3)[1], buffer[::2]):
        store = GradStore().add_(weight, gradient, own=own).scale_(5.0)
        assert torch.equal(store[weight], torch.full((3,), 5.0))
    assert torch.equal(buffer, torch.ones(6))
    table = nn.Parameter(torch.zeros(9, 3))
    rows = torch.sparse_coo_tensor([[1, 4]], torch.ones(2, 3), (9, 3), check_invariants=True)
    for gradient, parts in ((torch.ones(9, 3), lambda g: g), (rows, torch.Tensor._values)):
        store = GradStore().add_(table, gradient, own=own)
        assert (parts(store[table]).data_ptr() == parts(gradient).data_ptr()) is own
    large, low = nn.Parameter(torch.zeros(256, 256)), torch.ones(256, 256, dtype=torch.bfloat16)
    got = recoup.measure(lambda: GradStore().add_(large, low, own=own), device="cpu", repeats=0)
    assert got.peak_bytes == got.held_bytes == large.nbytes


@pytest.fixture
def x():
    return torch.randn(5, 4, dtype=torch.float64, requires_grad=True)


def checkpointed(is_reentrant, is_tied):
    """A head over a checkpointed body; where they share a layer, there is a checkpoint within."""
    call = partial(checkpoint, use_reentrant=is_reentrant)

    def run(x, body, deeper, head):
        deeper = partial(call, deeper) if is_tied else deeper
        return head(call(lambda x: deeper(body(x).tanh()), x))

    body = nn.Linear(4, 4)
    return Fn(run, body, nn.Linear(4, 4), body if is_tied else nn.Linear(4, 4)).double()


# Of torch: a checkpoint within a reentrant one runs without a graph at first.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("mode", cases.MODES)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_deliver_all_or_are_refused(is_reentrant, is_tied, mode, x):
    module = checkpointed(is_reentrant, is_tied)
    want, store = plain(module, [x, x]), GradStore(module.parameters())
    is_refused = is_reentrant and mode == "grad"
    refused = pytest.raises(GradientError, match=r'use_reentrant=False.*mode="harvest"')
    with cases.undisturbed(*module.parameters(), x), refused if is_refused else nullcontext():
        for _ in range(2):
            store.backward(loss_of(module(x)), mode=mode)
    assert_holds(store, module, {} if is_refused else want, 1e-14)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_tensors_run_once_and_those_after_accumulation_never(way):
    module, inputs = made("tied")
    calls, want = [], plain(module, inputs)
    module.embedding.weight.register_hook(lambda g: (calls.append(g), g * 10)[1])
    store = GradStore(module.parameters())
    for x in inputs:
        collect(store, loss_of(module(x)), way)
    assert len(calls) == 2
    want["embedding.weight"] *= 10
    assert_holds(store, module, want, 1e-14)
    module, (x, _) = made("linear")
    module.weight.register_post_accumulate_grad_hook(calls.append)
    store = GradStore(module.parameters())
    if way in ("harvest", "collecting"):
        with pytest.raises(GradientError, match=r'post-accumulate hook.*Use (mode="grad"|`back)'):
            collect(store, module(x).sum(), way)
        assert len(store) == 0
    else:
        collect(store, module(x).sum(), way)
        assert_holds(store, module, plain(module, [x], torch.sum))
    assert len(calls) == 2


@pytest.mark.parametrize("was_empty", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_an_error_half_way(way, was_empty, x):
    module = cases.Breaks()
    store = GradStore(module.parameters(), dtype=torch.float32)
    if not was_empty:
        collect(store, loss_of(module(x)), way)
    before = {name: each.clone() for name, each in store.named(module).items()}
    module.fails = True
    with cases.undisturbed(*module.parameters()), pytest.raises(RuntimeError, match="on purpose"):
        collect(store, loss_of(module(x)), way)
    module.fails = False
    if was_empty or way in ("grad", "collecting"):
        assert_holds(store, module, before)
    else:
        for use in (
            lambda: collect(store, loss_of(module(x)), way), store.norm,
            lambda: store[module.last.weight], lambda: GradStore().extend_(store),
            lambda: store.step(torch.optim.SGD(module.parameters())),
        ):  # fmt: skip
            with pytest.raises(GradientError, match=r"RuntimeError: on purpose.*Call `clear"):
                use()
        store.clear()
        before = {}
    weight = store.weight
    collect(store, loss_of(module(x)), way)
    assert store.weight == weight + 1
    want = plain(module, [x])
    for name, gradient in store.named(module).items():
        wanted = want[name] + before.get(name, 0)
        torch.testing.assert_close(gradient, wanted.float(), rtol=1e-5, atol=1e-6)


def test_gradients_that_are_lost_within_collecting():
    module, (x, _) = made("linear")
    store = GradStore(module.parameters())

    def lose():
        with store.collecting():
            module(x).sum().backward()
            module.zero_grad()

    with pytest.raises(GradientError, match=r"Within `collecting`.*lost"):
        lose()


@pytest.mark.parametrize("way", WAYS)
def test_while_another_thread_collects(way):
    module, (x, _) = made("linear")
    outer, inner = GradStore(module.parameters()), GradStore(module.parameters())
    want, is_refused = plain(module, [x]), way != "grad"
    refused = pytest.raises(GradientError, match=r'nother thread.*Use mode="grad"')

    def in_a_thread():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(collect, inner, loss_of(module(x)), way).result()

    with cases.undisturbed(*module.parameters()), outer.collecting():
        with refused if is_refused else nullcontext():
            in_a_thread()
        loss_of(module(x)).backward()
    assert_holds(outer, module, want)
    assert_holds(inner, module, {} if is_refused else want)
    inner.clear()
    in_a_thread()  # `.grad` is free again
    assert_holds(inner, module, want)
