"""Law 2 for values that are named: what `recompute` returns is not held, whoever saves it."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup._core.storage_tracking import StorageTracker
from tests.alive import Remade, held_after, no_collector
from tests.oracle import assert_same_tensor, hooks_in_force, tensors
from tests.weight_zoo import around

pytestmark = pytest.mark.usefixtures("measured")

SIZE = (64, 256)
VALUE = 64 * 256 * 4
STATE = torch.get_rng_state().nbytes


def leaf():
    return torch.randn(*SIZE, requires_grad=True)


def weight(precision="float32"):
    dtype = torch.bfloat16 if precision == "autocast" else torch.float32  # not copied, therefore
    return (torch.randn(256, 32) / 16).to(dtype).requires_grad_()


def of_views(y, w):
    parts = [part @ w[:128] for part in y.chunk(2, 1)]
    ones = torch.ones(3, 64, dtype=w.dtype)
    return y.view(-1, 64) @ w[:64], y[:, :128] @ w[128:], y[8:16] @ w, *parts, ones @ y


def of_parts(y, w):
    parts = y.view(256, 64).chunk(4)
    return parts[0] @ parts[1]  # one operator, and one node of the graph, for two of them


CONSUMERS = {
    "matmul": lambda y, w: y @ w,
    "linear": lambda y, w: F.linear(y, w.t()),
    "einsum": lambda y, w: torch.einsum("bi,io->bo", y, w),
    "bmm": lambda y, w: torch.bmm(y.view(2, 32, 256), w.expand(2, -1, -1)),
    "itself": lambda y, w: y * y,
    "sine": lambda y, w: y.sin(),
    "two": lambda y, w: (y @ w, y.sin()),
    "one after the other": lambda y, w: [y @ w for _ in range(5)],
    "transposed": lambda y, w: w.t() @ y.t(),
    "views": of_views,
    "parts": of_parts,
    "a row": lambda y, w: y[3] * y[5],
}


def held_bytes(run, precision="float32"):
    """What is held beside the outputs themselves."""
    own: dict[int, int] = {}

    def run_and_count():
        outputs = run()
        for storage in (output.untyped_storage() for output in tensors(outputs)):
            own[storage._cdata] = storage.nbytes()
        return outputs

    held = held_after(run_and_count, (), functools.partial(around, precision))
    return held.num_bytes - sum(own.values())


# -- after forward ---------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("name", CONSUMERS)
def test_only_what_it_was_made_of_is_held(name, precision):
    consume, x, w = CONSUMERS[name], leaf(), weight(precision)
    ones = 3 * 64 * w.element_size() if name == "views" else 0
    plain = held_bytes(lambda: consume(F.gelu(x), w), precision)
    held = held_bytes(lambda: consume(recoup.recompute(F.gelu)(x), w), precision)
    assert plain >= VALUE // 4  # at least a copy of a half, in the other type
    assert held <= ones


@pytest.mark.parametrize("name", CONSUMERS)
def test_gradients_are_the_same(name):
    consume, x, w = CONSUMERS[name], leaf(), weight()
    for precision in ("float32", "autocast"):
        gradients = []
        for fn in (F.gelu, recoup.recompute(F.gelu)):
            with around(precision):
                loss = sum(part.double().square().sum() for part in tensors(consume(fn(x), w)))
            gradients.append(torch.autograd.grad(loss, (x, w), allow_unused=True))
        for got, want in zip(*gradients, strict=True):
            assert_same_tensor(f"{name}, {precision}", got, want)


def test_its_input_is_held_once():
    x, w = leaf(), weight()

    def run(fn):
        hidden = x * 2
        return fn(hidden) @ w, hidden.sin()

    assert held_bytes(lambda: run(F.gelu)) == 2 * VALUE
    assert held_bytes(lambda: run(recoup.recompute(F.gelu))) == VALUE


def test_draws_cost_their_state():
    def noise(x):
        return x + torch.randn_like(x)

    x, w = leaf(), weight()
    assert held_bytes(lambda: noise(x) @ w) == VALUE
    assert held_bytes(lambda: recoup.recompute(noise)(x) @ w) <= STATE


def test_a_module_whose_parameters_make_the_value():
    module, x, w = nn.Linear(256, 256), leaf(), weight()
    assert held_bytes(lambda: module(x) @ w) == VALUE
    assert held_bytes(lambda: recoup.recompute(module)(x) @ w) == 0


def test_several_outputs_and_one_that_is_not_used():
    def several(x):
        return x.sin(), {"cosine": x.cos(), "whole": 3}

    def run(fn):
        sine, others = fn(x)
        return sine @ w, others["cosine"] @ w

    x, w = leaf(), weight()
    assert held_bytes(lambda: run(several)) == 2 * VALUE
    assert held_bytes(lambda: run(recoup.recompute(several))) == 0
    assert held_bytes(lambda: recoup.recompute(several)(x)[0] @ w) == 0


def test_a_value_made_of_a_value():
    x, w = leaf(), weight()
    inner, outer = recoup.recompute(F.gelu), recoup.recompute(torch.sin)
    assert held_bytes(lambda: F.gelu(x).sin() @ w) == 2 * VALUE
    # The input of the outer one is a tensor that is kept for it.
    assert held_bytes(lambda: outer(inner(x)) @ w) <= VALUE
    assert held_bytes(lambda: recoup.recompute(lambda x: F.gelu(x).sin())(x) @ w) == 0


def test_ten_values_alive_at_once():
    x, w = leaf(), weight()
    with no_collector(), StorageTracker() as tracker:
        scaled = [recoup.recompute(lambda x, place=place: x * place) for place in range(1, 11)]
        values = {place: fn(x) for place, fn in enumerate(scaled)}
        assert tracker.current_bytes == 10 * VALUE
        outputs = []
        for place in (3, 7, 0, 9, 1, 8, 2, 6, 4, 5):
            outputs.append(values.pop(place) @ w)
            own = sum(output.nbytes for output in outputs)
            assert tracker.current_bytes == own + len(values) * VALUE
        sum(outputs).sum().backward()
        del outputs
        x.grad = w.grad = None
        assert tracker.current_bytes == 0


def test_what_the_user_holds_is_held_by_the_user_alone():
    x, w = leaf(), weight()
    with no_collector(), StorageTracker() as tracker:
        y = recoup.recompute(F.gelu)(x)
        output = y @ w
        view = y[:3]
        assert tracker.current_bytes == VALUE + output.nbytes
        del y
        assert tracker.current_bytes == VALUE + output.nbytes
        del view
        assert tracker.current_bytes == output.nbytes
        del output
        assert tracker.current_bytes == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_nothing_is_held(mode):
    x, w = torch.randn(*SIZE), torch.randn(256, 32)
    with mode():
        assert held_bytes(lambda: recoup.recompute(F.gelu)(x) @ w) == 0


# -- torch's checkpoint ----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "autocast"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(use_reentrant, precision):
    x, w = leaf(), weight(precision)
    run = functools.partial(
        checkpoint, lambda x: recoup.recompute(F.gelu)(x) @ w, x, use_reentrant=use_reentrant
    )
    assert held_bytes(run, precision) == 0
    with no_collector(), StorageTracker() as tracker:
        with around(precision):
            loss = run().sum()
        loss.backward()
        del loss
        x.grad = w.grad = None
        assert tracker.current_bytes == 0


def test_a_checkpoint_inside():
    x, w = leaf(), weight()

    def fn(x):
        return checkpoint(lambda x: F.gelu(x.sin()), x, use_reentrant=False)

    assert held_bytes(lambda: fn(x) @ w) == VALUE
    assert held_bytes(lambda: recoup.recompute(fn)(x) @ w) == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_of_a_value_keeps_its_argument(use_reentrant):
    x, w = leaf(), weight()

    def run(fn):
        return checkpoint(lambda y: (y @ w).sin(), fn(x), use_reentrant=use_reentrant)

    # Torch holds on to what it is given, as it would to any other tensor; and to nothing more.
    assert held_bytes(lambda: run(recoup.recompute(F.gelu))) <= held_bytes(lambda: run(F.gelu))


# -- in backward, and after it ---------------------------------------------------------------------


def deep(fn, x, weights):
    for w in weights:
        x = fn(x) @ w
    return x


def test_a_deep_chain_makes_one_value_at_a_time():
    depth, x = 30, leaf()
    weights = [(torch.randn(256, 256) / 16).requires_grad_() for _ in range(depth)]
    for w in weights:
        w.grad = torch.zeros_like(w)
    x.grad = torch.zeros_like(x)
    peaks, held = [], []
    for fn in (F.gelu, recoup.recompute(F.gelu)):
        with Remade() as remade, no_collector(), StorageTracker() as tracker:
            loss = deep(fn, x, weights).sum()
            held.append(tracker.current_bytes)
            tracker.peak_bytes = 0
            loss.backward()
            del loss
            peaks.append(tracker.peak_bytes)
            assert tracker.current_bytes == 0
    assert (remade.num_made, remade.most_alive) == (depth, 1)
    # Both hold the input of each gelu, which the first one has from outside.
    assert held[0] - held[1] == depth * VALUE
    assert peaks[1] <= peaks[0] - (depth - 2) * VALUE


@pytest.mark.parametrize("name", CONSUMERS)
def test_nothing_is_left(name):
    consume, x, w = CONSUMERS[name], leaf(), weight()

    def run():
        output = consume(recoup.recompute(F.gelu)(x), w)
        return sum(part.sum() for part in tensors(output))

    def step(**kwargs):
        torch.autograd.grad(run(), (x, w), allow_unused=True, **kwargs)

    step()
    with no_collector(), StorageTracker() as tracker:
        peaks = []
        for _ in range(20):
            tracker.peak_bytes = 0
            step()
            assert tracker.current_bytes == 0
            peaks.append(tracker.peak_bytes)
        assert len(set(peaks)) == 1
        run()
        assert tracker.current_bytes == 0  # of a forward alone
        assert gc.collect() == 0
    assert hooks_in_force() is None


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("name", ["matmul", "two", "one after the other", "views"])
def test_the_gradient_of_a_part_of_a_retained_graph(name, part):
    consume, x, w = CONSUMERS[name], leaf(), weight()
    with no_collector(), StorageTracker() as tracker:
        output = consume(recoup.recompute(F.gelu)(x), w)
        loss = sum(value.sum() for value in tensors(output))
        held = tracker.current_bytes
        for _ in range(2):
            torch.autograd.grad(loss, (x, w)[part], retain_graph=True)
            assert tracker.current_bytes == held
        del loss, output
        assert tracker.current_bytes == 0


def test_nothing_is_left_of_what_breaks():
    def breaks(x):
        x = x.sin().cos()
        raise KeyError(str(x.shape))

    x, w = leaf(), weight()
    with no_collector(), StorageTracker() as tracker:
        with pytest.raises(KeyError):
            recoup.recompute(breaks)(x)
        assert tracker.current_bytes == 0
        y = recoup.recompute(F.gelu)(x)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            y @ w.t()
        assert tracker.current_bytes == VALUE
        del y
        assert tracker.current_bytes == 0
    assert hooks_in_force() is None


# -- values of values (R8) -------------------------------------------------------------------------


def counted(op, runs):
    def fn(x):
        runs.append(op.__name__)
        return op(x)

    return recoup.recompute(fn)


@pytest.mark.parametrize("length", [2, 5])
def test_a_value_of_a_value_is_made_from_the_first(length):
    """R8: what lies in between is not kept, and each function runs again once."""
    x, w, runs = leaf(), weight(), []
    ops = [torch.sin, torch.exp, torch.tanh, torch.sigmoid, torch.cos][:length]

    def step(y):
        for op in ops:
            y = counted(op, runs)(y)
        return y @ w

    with no_collector(), StorageTracker() as tracker:
        h = x * 1.0
        y = step(h)
        assert tracker.current_bytes == VALUE + y.nbytes  # h and y
        runs.clear()
        grads = torch.autograd.grad(y.sin().sum(), (x, w))
        assert runs == [op.__name__ for op in ops]
    h = x * 1.0
    for op in ops:
        h = op(h)
    want = torch.autograd.grad((h @ w).sin().sum(), (x, w))
    assert all(map(torch.equal, grads, want))


def test_a_value_that_two_values_and_a_region_use():
    """R8: it is made once in backward, whoever asks first."""
    x, w, runs = leaf(), weight(), []

    def step(x, make, checkpointed):
        first = make(torch.sin)(x * 1.0)
        one, two = make(torch.exp)(first), make(torch.tanh)(first)
        three = checkpointed(lambda first: first.cos().sin(), first)
        return one @ w, two @ w, three @ w

    want = step(x, lambda op: op, lambda fn, *args: fn(*args))
    want = torch.autograd.grad(sum(y.sin().sum() for y in want), (x, w))
    with no_collector(), StorageTracker() as tracker:
        ys = step(x, lambda op: counted(op, runs), recoup.checkpoint)
        # x * 1.0, what the products return, and what the last one saves
        assert tracker.current_bytes == 2 * VALUE + sum(y.nbytes for y in ys)
        runs.clear()
        loss = sum(y.sin().sum() for y in ys)
        got = torch.autograd.grad(loss, (x, w), retain_graph=True)
        assert sorted(runs) == ["exp", "sin", "tanh"]
        again = torch.autograd.grad(loss, (x, w))
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, again, want))


USERS = {
    "checkpoint": lambda y: recoup.checkpoint(torch.cos, y),
    "recompute": lambda y: recoup.recompute(torch.cos)(y),
    "Sequential": lambda y: recoup.Sequential(nn.Tanh(), nn.Sigmoid(), memory="sqrt")(y),
    "Chain": lambda y: recoup.Sequential(nn.Tanh(), memory="log")(y),
    "measure": lambda y: recoup.measure(lambda: y.sin()),
    "residuals": lambda y: recoup.residuals(lambda: y.sin()),
}


@pytest.mark.parametrize("user", USERS)
def test_none_of_ours_takes_a_value_for_exposed(user):
    """R8: to ask for its address is no reason to keep it."""
    y = recoup.recompute(torch.sin)(leaf())
    USERS[user](y)
    assert not y._recoup_source._is_exposed
