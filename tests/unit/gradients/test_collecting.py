"""What is collected is what plain autograd gives, in each way, and nothing else is touched."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from recoup import GradStore
from recoup._core.graph_ends import nodes_of
from tests.alive import no_collector
from tests.unit.gradients.cases import (
    LAYERS,
    MADE_AGAIN,
    MODES,
    WAYS,
    Elsewhere,
    Undisturbed,
    assert_holds,
    collect,
    loss_of,
    made,
    plain,
)


def parameter(*size):
    return nn.Parameter(torch.randn(*(size or (3, 3)), dtype=torch.float64))


def collected(module, inputs, way, **settings):
    """A store over all parameters; `.grad` is as before."""
    store = GradStore(module.parameters(), **settings)
    torch.manual_seed(3)
    with Undisturbed(*module.parameters()):
        for x in inputs:
            collect(store, loss_of(module(x)), way)
    return store


# -- equal to plain autograd -----------------------------------------------------------------------


@pytest.mark.parametrize("way", [*WAYS, Elsewhere("collecting")])
@pytest.mark.parametrize("layer", LAYERS | MADE_AGAIN)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", ["linear", "bfloat16", "complex", "sparse"])
def test_in_another_type(layer, way, dtype):
    module, inputs = made(layer)
    want = plain(module, inputs)
    for name, gradient in collected(module, inputs, way, dtype=dtype).named(module).items():
        kind = dtype.to_complex() if layer == "complex" else dtype
        assert gradient.dtype is kind
        torch.testing.assert_close(gradient.to_dense(), want[name].to(kind), rtol=1e-5, atol=1e-6)


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


# -- which targets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_leaves_that_are_no_targets(mode):
    """Nor are inputs, whose gradients are returned; what took no part, or is frozen, is absent."""
    w, other, x, other_x, unused, frozen = (parameter() for _ in range(6))
    frozen.requires_grad_(False)
    store = GradStore([w, unused, frozen])
    with Undisturbed(w, other, x, unused):
        (dx, none) = store.backward((x @ w @ other).sum(), inputs=[x, other_x], mode=mode)
    want_x, want_w = torch.autograd.grad((x @ w @ other).sum(), [x, w])
    assert (list(store), none) == ([w], None)
    assert torch.equal(dx, want_x)
    store.backward(x.sum(), params=[unused], mode=mode, allow_empty=True)
    store.backward((frozen * x).sum(), params=[frozen], mode=mode, allow_empty=True)
    (dx,) = store.backward((frozen * x).sum(), params=[frozen], inputs=x, mode=mode)
    assert torch.equal(dx, frozen)
    assert torch.equal(store[w], want_w)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("named", [False, True])
def test_one_parameter_counts_once(named, way):
    w, x = parameter(), parameter()
    (want,) = torch.autograd.grad((x @ w @ w).sum(), [w])
    store = GradStore([("a", w), ("b", w)] if named else [w, w])
    collect(store, (x @ w @ w).sum(), way)
    assert list(store) == [w]
    assert torch.equal(store[w], want)


# -- several backwards -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_two_losses_of_one_graph(mode):
    module, (x, _) = made("linear")
    y, losses = module(x), (lambda y: y.sin().sum(), lambda y: y.exp().sum())
    for loss in losses:
        store = GradStore(module.parameters())
        store.backward(loss(y), mode=mode, retain_graph=loss is losses[0])
        assert_holds(store, module, plain(module, [x], loss))


@pytest.mark.parametrize("layer", ["linear", "sparse"])
def test_collecting_within_collecting(layer):
    """Of another store, and backward into the same one."""
    module, (x, y) = made(layer)
    outer, inner = GradStore(module.parameters()), GradStore(module.parameters())
    for _ in range(2):
        with Undisturbed(*module.parameters()), outer.collecting():
            loss_of(module(x)).backward()
            with inner.collecting():
                loss_of(module(y)).backward()
            inner.backward(loss_of(module(y)))
            outer.backward(loss_of(module(y)))
            loss_of(module(x)).backward()
    assert_holds(outer, module, plain(module, [x, y, x] * 2), 1e-14)
    assert_holds(inner, module, plain(module, [y] * 4), 1e-14)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [[4, 4, 4], [5, 1, 7]])
def test_mean_of_unequal_parts(sizes, mode):
    """By weights of backwards, of stores that are merged, and of both."""
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


def test_hessian_times_vector():
    w, v = parameter(4), torch.randn(4, dtype=torch.float64)

    def loss(w):
        return (w.sin() * w.roll(1) ** 2).sum()

    want = torch.autograd.functional.hvp(loss, w, v)[1]
    store = GradStore([w])
    store.backward(loss(w) / 2, create_graph=True)
    store.extend_(GradStore.from_backward(loss(w), [w], create_graph=True), alpha=0.5)
    second = GradStore.from_backward((store[w] * v).sum(), [w])
    torch.testing.assert_close(second[w], want)
    assert store[w].requires_grad
    assert not store.detach_()[w].requires_grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["plain", "graph"])
@pytest.mark.parametrize("layer", ["linear", "sparse"])
def test_gradients_with_and_without_a_graph_are_summed(layer, first, mode):
    module, (x, _) = made(layer)
    store = GradStore(module.parameters())
    calls = [lambda: store.backward(loss_of(module(x)), mode=mode)]
    calls.append(lambda: store.backward((module.weight**3).sum(), create_graph=True))
    for call in calls if first == "plain" else reversed(calls):
        call()
    want = plain(module, [x])["weight"] + 3 * module.weight.detach() ** 2
    torch.testing.assert_close(store[module.weight].detach(), want, rtol=1e-14, atol=1e-14)
    assert store[module.weight].requires_grad


# -- what lives on ---------------------------------------------------------------------------------


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
