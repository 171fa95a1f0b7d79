"""segments_backward against one backward through the whole chain."""

from __future__ import annotations

import copy
import functools
import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import ChangedError, NotInvertibleError, ReplayError
from recoup.invertible import AdditiveCoupling
from tests.oracle import assert_same_tensor
from tests.unit.gradients.cases import MODES

MEMORIES = ["inputs", "linear", "sqrt", "log", 1, 3, recoup.schedules.revolve(6, 2)]


def block(dropout=0.0, norm=False, dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, *([nn.BatchNorm1d(6)] if norm else [])).to(dtype)


def twice(cell):
    return lambda x: cell(cell(x))


def loss_fn(y):
    return y.square().mean()


def whole(segments, x, loss_fn=loss_fn):
    for segment in segments:
        x = segment(x)
    return loss_fn(x)


def in_segments(cell, segments, x, memory="inputs", loss_fn=loss_fn, **kwargs):
    store = recoup.GradStore(cell.parameters())
    loss = recoup.segments_backward(segments, x, loss_fn, store, memory=memory, **kwargs)
    return store, loss


def assert_same(store, cell, plain):
    for got, want in zip(cell.parameters(), plain.parameters(), strict=True):
        assert_same_tensor("gradient", store.get(got), want.grad)
        assert got.grad is None


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("wrap", [lambda cell: cell, twice], ids=["once", "twice"])
def test_shared_segments_equal_one_backward(memory, wrap):
    cell, x = block(dropout=0.3, norm=True), torch.randn(4, 6)
    plain = copy.deepcopy(cell)
    seen, versions = [], [each._version for each in cell.parameters()]
    for each in (plain, cell):
        each[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    torch.manual_seed(1)
    want = whole([wrap(plain)] * 6, x)
    want.backward()
    stream = torch.get_rng_state()
    torch.manual_seed(1)
    store, loss = in_segments(cell, [wrap(cell)] * 6, x, memory)
    assert torch.equal(*seen), "hooks of parameters are called once, too"
    assert [each._version for each in cell.parameters()] == versions
    assert torch.equal(loss, want)
    assert not loss.requires_grad
    assert_same(store, cell, plain)
    assert torch.equal(torch.get_rng_state(), stream)
    for got, expected in zip(cell.buffers(), plain.buffers(), strict=True):
        assert torch.equal(got, expected)  # statistics are counted once


OPTIMIZERS = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("memory", ["inputs", "sqrt"])
def test_ten_steps_equal_ten_plain_steps(name, memory):
    cell = block(dropout=0.2)
    plain = copy.deepcopy(cell)
    ours, theirs = (OPTIMIZERS[name](model.parameters()) for model in (cell, plain))
    for step in range(10):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)
        theirs.zero_grad()
        whole([plain] * 8, x).backward()
        theirs.step()
        torch.manual_seed(step)
        store, _ = in_segments(cell, [cell] * 8, x, memory)
        store.step(ours)
    for got, want in zip(cell.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got, want)


def test_the_loop_by_hand_is_one_backward_under_dropout_and_noise():
    """R6: the loop that docs/gradients.md prints, whose second runs used to draw anew."""
    page = (Path(__file__).parents[3] / "docs" / "gradients.md").read_text(encoding="utf-8")
    printed = re.search(r"loop over segments by hand.*?```python\n(.*?)```", page, re.DOTALL)[1]
    start, loop = printed.split("for _ in range", 1)
    names = {}
    torch.manual_seed(0)
    exec(start, names)
    plain, x = copy.deepcopy(names["cell"]), names["x"]
    assert any(isinstance(module, nn.Dropout) and module.p for module in plain)
    assert recoup.weights.applied(plain), "it is to be right under weight noise, too"
    stream = torch.get_rng_state()
    exec(f"for _ in range{loop}", names)
    after = torch.get_rng_state()
    torch.set_rng_state(stream)
    whole([plain] * 16, x).backward()
    assert torch.equal(torch.get_rng_state(), after)
    for got, want in zip(names["cell"].parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(names["store"][got], want.grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(names["gradient"], x.grad, rtol=1e-5, atol=1e-7)


def test_distinct_mixed_and_frozen_segments():
    torch.manual_seed(0)
    first, shared, frozen = (nn.Linear(6, 6) for _ in range(3))
    frozen.requires_grad_(False)
    chain = [first, shared, torch.tanh, frozen, shared, nn.Identity(), lambda x: 2 * x]
    model = nn.ModuleList([first, shared, frozen])
    x = torch.randn(3, 6)
    plain = copy.deepcopy(model)
    whole([plain[0], plain[1], torch.tanh, plain[2], plain[1], lambda x: 2 * x], x).backward()
    store, _ = in_segments(model, chain, x)
    assert_same(store, model, plain)


@pytest.mark.parametrize("memory", ["inputs", "sqrt", 2])
def test_nested_states_with_integers_and_none(memory):
    """A recurrent net: the time, a sum of losses and the hidden state go from cell to cell."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(3, 5)
    series = torch.randn(7, 2, 3)

    def segment(state):
        h, c = cell(series[int(state["time"])], state["hidden"])
        loss = state["loss"] + h.square().mean()
        return {"time": state["time"] + 1, "hidden": (h, c), "loss": loss, "unused": None}

    start = {
        "time": torch.tensor(0),
        "hidden": (torch.zeros(2, 5), torch.zeros(2, 5)),
        "loss": torch.zeros(()),
        "unused": None,
    }
    plain = copy.deepcopy(cell)
    hidden, total = (torch.zeros(2, 5), torch.zeros(2, 5)), torch.zeros(())
    for x in series:
        hidden = plain(x, hidden)
        total = total + hidden[0].square().mean()
    total.backward()
    store, loss = in_segments(cell, [segment] * 7, start, memory, lambda state: state["loss"])
    assert torch.equal(loss, total)
    assert_same(store, cell, plain)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_the_gradient_of_the_input(is_leaf):
    cell = block()
    x = torch.randn(4, 6, requires_grad=True)
    given = x if is_leaf else x * 1
    (want,) = torch.autograd.grad(whole([cell] * 3, given), [given])
    given = x if is_leaf else x * 1
    store = recoup.GradStore([*cell.parameters(), given])
    recoup.segments_backward([cell] * 3, given, loss_fn, store)
    assert torch.equal(store.pop(given), want)
    assert x.grad is None


@pytest.mark.parametrize("otherwise", ["recompute", "keep"])
def test_inverted_segments(otherwise):
    torch.manual_seed(0)
    half = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    model = nn.ModuleList([AdditiveCoupling(half), AdditiveCoupling(half), nn.Linear(6, 6)])
    model, x = model.double(), torch.randn(4, 6).double()
    plain = copy.deepcopy(model)
    y = x
    for module in plain:
        y = module(y)
        y = y[0] if isinstance(y, tuple) else y
    loss_fn(y).backward()
    store, _ = in_segments(model, model, x, "constant", otherwise=otherwise)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_tensor("gradient", store[got], want.grad, 1e-10)
    with pytest.raises(NotInvertibleError, match=r"segment 2 \(Linear\) has no inverse"):
        in_segments(model, model, x, "constant")


def test_kept_inputs_can_be_offloaded():
    cell, x = block(), torch.randn(4, 6)
    want, _ = in_segments(cell, [cell] * 5, x)
    offloaded = []

    def pack(tensor):
        offloaded.append(tensor.shape)
        return tensor.numpy(force=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        store, _ = in_segments(cell, [cell] * 5, x)
    assert offloaded.count(x.shape) >= 4
    with torch.autograd.graph.save_on_cpu():
        again, _ = in_segments(cell, [cell] * 5, x)
    for each in cell.parameters():
        assert torch.equal(store[each], want[each])
        assert torch.equal(again[each], want[each])


@pytest.mark.parametrize("memory", ["inputs", "sqrt"])
def test_noisy_weights_and_autocast_and_no_grad_around(memory):
    cell = recoup.weight_dropout(block(), r"0\.weight", p=0.4)
    plain, x = copy.deepcopy(cell), torch.randn(4, 6)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        want = whole([plain] * 4, x)
    want.backward()
    torch.manual_seed(3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        store, loss = in_segments(cell, [cell] * 4, x, memory)
    assert torch.equal(loss, want)
    assert_same(store, cell, plain)


def test_nothing_outlives_the_call():
    cell = block()
    alive = []

    def watched(x):
        y = cell(x)
        alive.append(weakref.ref(y))
        return y

    gc.collect()
    gc.disable()
    try:
        in_segments(cell, [watched] * 4, torch.randn(2, 6))
        assert len(alive) == 7
        assert all(ref() is None for ref in alive)
    finally:
        gc.enable()


def breaking(when):
    """A segment that breaks in its run of that number; backward runs it a second time."""
    calls = []

    class Breaks(nn.Module):
        def forward(self, x):
            calls.append(1)
            if len(calls) == when:
                raise ZeroDivisionError("broken")
            return x

    return Breaks()


@pytest.mark.parametrize("when", [1, 2])
def test_an_exception_leaves_all_as_it_was(when):
    cell, x = block(), torch.randn(2, 6)
    store = recoup.GradStore(cell.parameters())
    with pytest.raises(ZeroDivisionError):
        recoup.segments_backward([cell, breaking(when), cell, cell], x, loss_fn, store)
    assert len(store) == 0
    assert all(each.grad is None for each in cell.parameters())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    recoup.segments_backward([cell] * 2, x, loss_fn, store)
    assert len(store) == 2


class BreaksInBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fails = True

    def forward(self, x):
        x = x * 1.0
        x.register_hook(self.hook)
        return x

    def hook(self, gradient):
        if self.fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("was_empty", [True, False])
def test_an_error_in_backward_leaves_the_store_as_it_was(mode, was_empty):
    """R7: gradients of the segments that were reversed before it stay out of the store."""
    first, last, middle, x = block(), block(), BreaksInBackward(), torch.randn(2, 6)
    params = [*first.parameters(), *last.parameters()]
    store = recoup.GradStore(params)
    if not was_empty:
        recoup.segments_backward([first, last], x, loss_fn, store, weight=3.0)
    before, weight = {each: value.clone() for each, value in store.items()}, store.weight
    with pytest.raises(ZeroDivisionError):
        recoup.segments_backward([first, middle, last], x, loss_fn, store, mode=mode)
    assert store.weight == weight
    assert set(store) == set(before)
    assert all(torch.equal(store[each], value) for each, value in before.items())
    assert all(each.grad is None for each in params)
    middle.fails = False
    recoup.segments_backward([first, middle, last], x, loss_fn, store, mode=mode)
    assert store.weight == weight + 1
    want = torch.autograd.grad(loss_fn(last(first(x))), params)
    for each, gradient in zip(params, want, strict=True):
        torch.testing.assert_close(store[each], gradient * 4 if before else gradient)


@pytest.mark.parametrize("memory", ["inputs", "linear"])
def test_a_loss_with_more_beside_it(memory):
    """R7: the loss alone is reversed; what is beside it comes back without a graph."""
    cell, x = block(dropout=0.3), torch.randn(4, 6)
    torch.manual_seed(1)
    want, _ = in_segments(cell, [cell] * 3, x, memory)
    torch.manual_seed(1)
    store = recoup.GradStore(cell.parameters())
    loss, aux = recoup.segments_backward(
        [cell] * 3, x, lambda y: (loss_fn(y), {"y": y, "n": 3}), store, memory=memory, has_aux=True
    )
    assert all(torch.equal(store[each], want[each]) for each in cell.parameters())
    assert torch.equal(loss, loss_fn(aux["y"]))
    assert aux["n"] == 3
    assert not aux["y"].requires_grad


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
