"""segments_backward against one backward through the whole chain."""

from __future__ import annotations

import functools
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import ChangedError, NotInvertibleError, ReplayError
from recoup.invertible import AdditiveCoupling
from tests.alive import no_collector
from tests.oracle import assert_same_tensor, assert_same_tensors
from tests.unit.gradients.cases import MODES, Breaks, same

MEMORIES = ["inputs", "linear", "sqrt", "log", 1, 3, recoup.schedules.revolve(6, 2)]


def block(dropout=0.0, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, *([nn.BatchNorm1d(6)] if norm else []))


def loss_fn(y):
    return y.square().mean()


def whole(segments, x, loss_fn=loss_fn):
    return loss_fn(functools.reduce(lambda x, segment: segment(x), segments, x))


def in_segments(model, segments, x, memory="inputs", loss_fn=loss_fn, **how):
    store = recoup.GradStore([*model.parameters(), *([x] if torch.is_tensor(x) else [])])
    return store, recoup.segments_backward(segments, x, loss_fn, store, memory=memory, **how)


def shared():
    cell = block(dropout=0.3, norm=True)
    return cell, [cell, lambda x: cell(cell(x))] * 3, torch.randn(4, 6)


def mixed():
    first, cell, frozen = (nn.Linear(6, 6) for _ in range(3))
    frozen.requires_grad_(False)
    chain = [first, cell, torch.tanh, frozen, cell, lambda x: 2 * x]
    return nn.ModuleList([first, cell, frozen]), chain, torch.randn(4, 6)


def noisy():
    cell = recoup.weight_dropout(block(), r"0\.weight", p=0.4)
    return cell, [cell] * 6, torch.randn(4, 6, requires_grad=True) * 1  # within a graph


def recurrent():
    cell, series, zeros = nn.LSTMCell(3, 5), torch.randn(6, 2, 3), torch.zeros(2, 5)

    def segment(state):
        h, c = cell(series[int(state["time"])], state["hidden"])
        loss = state["loss"] + h.square().mean()
        return {"time": state["time"] + 1, "hidden": (h, c), "loss": loss, "unused": None}

    start = {"time": torch.tensor(0), "hidden": (zeros, zeros), "loss": torch.zeros(())}
    return cell, [segment] * 6, start | {"unused": None}


@pytest.mark.sampled(37)
@pytest.mark.parametrize(
    "around", [nullcontext, functools.partial(torch.autocast, "cpu", torch.bfloat16)]
)
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("build", [shared, mixed, noisy, recurrent])
def test_segments_equal_one_backward(build, memory, around):
    loss_of = (lambda state: state["loss"]) if build is recurrent else loss_fn
    ends = []
    for is_ours in (False, True):
        torch.manual_seed(5)
        model, segments, x = build()
        leaves = [*model.parameters(), *([x] if torch.is_tensor(x) and x.requires_grad else [])]
        hooked, versions = [], [each._version for each in leaves]
        leaves[0].register_hook(lambda g, into=hooked: into.append(g.clone()))
        torch.manual_seed(1)
        if is_ours:
            with torch.no_grad(), around():
                store, loss = in_segments(model, segments, x, memory, loss_of)
            assert not loss.requires_grad
            assert all(each.grad is None for each in leaves if each.is_leaf)
            assert [each._version for each in leaves] == versions
            grads = [store.get(each) for each in leaves]
        else:
            if not leaves[-1].is_leaf:
                leaves[-1].retain_grad()
            with around():
                loss = whole(segments, x, loss_of)
            loss.backward()
            grads = [each.grad for each in leaves]
        ends.append([loss.detach(), *grads, *model.buffers(), *hooked, torch.get_rng_state()])
    assert any(each is None for each in ends[0]) == (build is mixed)
    for got, want in zip(ends[1], ends[0], strict=True):
        assert_same_tensor("what a step left behind", got, want)


@pytest.mark.parametrize("otherwise", ["recompute", "keep"])
def test_inverted_segments(otherwise):
    half = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    model = nn.ModuleList([AdditiveCoupling(half), AdditiveCoupling(half), nn.Linear(6, 6)])
    model, x = model.double(), torch.randn(4, 6).double()
    want, _ = in_segments(model, model, x, "linear")
    store, _ = in_segments(model, model, x, "constant", otherwise=otherwise)
    assert_same_tensors(store.named(model), want.named(model), 1e-10)
    with pytest.raises(NotInvertibleError, match=r"segment 2 \(Linear\) has no inverse"):
        in_segments(model, model, x, "constant")


def test_kept_inputs_can_be_offloaded_and_nothing_outlives_the_call():
    cell, x, seen, alive = block(), torch.randn(4, 6), [], []
    want, _ = in_segments(cell, [cell] * 5, x)
    pair = lambda t: seen.append(t.shape) or t.numpy(force=True), torch.from_numpy
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        store, _ = in_segments(cell, [cell] * 5, x)
    assert seen.count(x.shape) >= 4

    def watched(x):
        alive.append(weakref.ref(y := cell(x)))
        return y

    with no_collector():
        in_segments(cell, [watched] * 4, x)
        assert [ref() for ref in alive] == [None] * 7
    assert same(map(store.get, cell.parameters()), map(want.get, cell.parameters()))


@pytest.mark.parametrize("memory", ["inputs", "linear"])
def test_a_loss_with_more_beside_it(memory):
    cell, x = block(dropout=0.3), torch.randn(4, 6)
    found = []
    for how in ({}, {"has_aux": True, "loss_fn": lambda y: (loss_fn(y), {"y": y, "n": 3})}):
        torch.manual_seed(1)
        found.append(in_segments(cell, [cell] * 3, x, memory, **how))
    (want, _), (store, (loss, aux)) = found
    assert same(map(store.get, cell.parameters()), map(want.get, cell.parameters()))
    assert torch.equal(loss, loss_fn(aux["y"]))
    assert aux["n"] == 3
    assert not aux["y"].requires_grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("was_empty", [True, False])
@pytest.mark.parametrize("when", [1, 2, "backward"])  # the number of a run, or later
def test_an_error_leaves_the_store_as_it_was(when, was_empty, mode):
    model, x, calls = Breaks(), torch.randn(2, 4, dtype=torch.float64), []
    params = [*model.parameters()]

    def middle(x):
        calls.append(1)
        if model.fails and len(calls) == when:
            raise RuntimeError("on purpose")
        return model.between(x) if when == "backward" else x.sin()

    segments, store = [model.first, middle, model.last], recoup.GradStore(params)
    if not was_empty:
        recoup.segments_backward(segments, x, loss_fn, store, weight=3.0)
        calls.clear()
    before, weight = {each: value.clone() for each, value in store.items()}, store.weight
    model.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        recoup.segments_backward(segments, x, loss_fn, store, mode=mode)
    assert (store.weight, [*store]) == (weight, [*before])
    assert all(each.grad is None for each in params)
    assert same(store.values(), before.values())
    model.fails = False
    recoup.segments_backward(segments, x, loss_fn, store, mode=mode)
    assert store.weight == weight + 1
    want = torch.autograd.grad(whole(segments, x), params)
    for each, gradient in zip(params, want, strict=True):
        torch.testing.assert_close(store[each], gradient * 4 if before else gradient)


def test_what_cannot_be_repeated_raises():
    cell, x, generator = block(), torch.randn(2, 6), torch.Generator()
    store = recoup.GradStore(cell.parameters())
    noisy = [cell, lambda x: x * torch.rand(x.shape, generator=generator), cell]
    with pytest.raises(ReplayError, match="did not repeat"):
        recoup.segments_backward(noisy, x, loss_fn, store)

    def stepped(y):
        with torch.no_grad():
            cell[0].weight.add_(1)
        return loss_fn(y)

    with pytest.raises((ChangedError, RuntimeError), match=r"changed|modified"):
        recoup.segments_backward([cell, cell], x, stepped, store)
    assert len(store) == 0
