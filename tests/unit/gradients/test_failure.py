"""What stands in the way of a backward: hooks, checkpoints, threads, and errors half way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recoup import GradStore
from recoup.errors import GradientError
from tests.unit.gradients.cases import (
    MODES,
    WAYS,
    Breaks,
    assert_holds,
    collect,
    made,
    plain,
    undisturbed,
)
from tests.zoo import Fn


@pytest.fixture
def x():
    return torch.randn(5, 4, dtype=torch.float64, requires_grad=True)


def sine(y):
    return y.sin().sum()


# -- checkpoints and hooks -------------------------------------------------------------------------


def checkpointed(kind, *, is_tied=False, is_nested=False):
    """A head over a checkpointed body; a layer may be in both, and a checkpoint in the body."""
    call = partial(checkpoint, use_reentrant=kind == "reentrant")

    def run(x, body, deeper, head):
        deeper = partial(call, deeper) if is_nested else deeper
        return head(call(lambda x: deeper(body(x).tanh()), x))

    body = nn.Linear(4, 4)
    return Fn(run, body, nn.Linear(4, 4), body if is_tied else nn.Linear(4, 4)).double()


# Of torch: a checkpoint within a reentrant one runs without a graph at first.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", ["reentrant", "other"])
def test_checkpoints_deliver_all_or_are_refused(kind, is_tied, mode, x):
    module = checkpointed(kind, is_tied=is_tied, is_nested=is_tied)
    want = plain(module, [x, x], sine)
    store = GradStore(module.parameters())
    with undisturbed(*module.parameters(), x):
        for _ in range(2):
            loss = sine(module(x))
            if kind == "reentrant" and mode == "grad":
                with pytest.raises(GradientError, match=r'use_reentrant=False.*mode="harvest"'):
                    store.backward(loss, mode=mode)
                assert len(store) == 0
                return
            store.backward(loss, mode=mode)
    assert_holds(store, module, want, 1e-14)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_tensors_run_once_and_those_after_accumulation_never(way):
    module, inputs = made("tied")
    calls, want = [], plain(module, inputs)
    handle = module.a.weight.register_hook(lambda g: (calls.append(g), g * 10)[1])
    store = GradStore(module.parameters())
    for x in inputs:
        collect(store, module(x).double().sin().sum(), way)
    handle.remove()
    assert len(calls) == 2
    want["a.weight"] *= 10
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


# -- errors half way -------------------------------------------------------------------------------


@pytest.mark.parametrize("was_empty", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_an_error_half_way(way, was_empty, x):
    module = Breaks()
    store = GradStore(module.parameters(), dtype=torch.float32)
    if not was_empty:
        collect(store, sine(module(x)), way)
    before = {name: each.clone() for name, each in store.named(module).items()}
    with undisturbed(*module.parameters()), pytest.raises(KeyError), store.collecting():
        raise KeyError  # before any backward
    assert_holds(store, module, before)
    module.fails = True
    with undisturbed(*module.parameters()), pytest.raises(RuntimeError, match="on purpose"):
        collect(store, sine(module(x)), way)
    module.fails = False
    if was_empty or way in ("grad", "collecting"):
        assert_holds(store, module, before)
    else:
        for use in (
            lambda: collect(store, sine(module(x)), way),
            store.norm,
            lambda: store[module.last.weight],
            lambda: GradStore().extend_(store),
            lambda: store.step(torch.optim.SGD(module.parameters())),
        ):
            with pytest.raises(GradientError, match=r"RuntimeError: on purpose.*Call `clear"):
                use()
        assert "not usable" in repr(store)
        store.clear()
        before = {}
    weight = store.weight
    collect(store, sine(module(x)), way)
    assert store.weight == weight + 1
    want = plain(module, [x], sine)
    for name, gradient in store.named(module).items():
        wanted = want[name] + before.get(name, 0)
        torch.testing.assert_close(gradient, wanted.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_code_within_collecting_reads_and_scales_what_is_in_grad():
    module, (x, _) = made("linear")
    weight, want = module.weight, plain(module, [x], torch.sum)
    store = GradStore.from_backward(module(x).sum(), module.parameters())
    with undisturbed(*module.parameters()), store.collecting():
        module.zero_grad()
        module(x).sum().backward()
        (weight**3).sum().backward(create_graph=True)
        found = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    wanted = {"weight": want["weight"] + 3 * weight**2, "bias": want["bias"]}
    norm = torch.nn.utils.get_total_norm(wanted.values())
    torch.testing.assert_close(found, norm)
    for name, gradient in store.named(module).items():
        torch.testing.assert_close(gradient, want[name] + wanted[name] * 1e-3 / (norm + 1e-6))

    def lose():
        with store.collecting():
            module(x).sum().backward()
            module.zero_grad()

    with pytest.raises(GradientError, match=r"Within `collecting`.*lost"):
        lose()


def test_a_tensor_that_was_resized():
    module, (x, _) = made("linear")
    store = GradStore.from_backward(module(x).sum(), module.parameters())
    module.weight.data, module.bias.data = torch.ones(7, 4).double(), torch.ones(7).double()
    for way in WAYS:
        with pytest.raises(ValueError, match=r"shape \(3.* is a tensor of shape \(7.*`discard`"):
            collect(store, module(x).sum(), way)
    with pytest.raises(ValueError, match=r"has shape \(3"):
        GradStore(module.parameters()).extend_(store)
    assert len(store) == 2


# -- threads ---------------------------------------------------------------------------------------


def in_a_thread(call):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


@pytest.mark.parametrize("way", WAYS)
def test_while_another_thread_collects(way):
    """It may begin at the last moment, and what does not need `.grad` goes on."""
    module, (x, _) = made("linear")
    outer, inner = GradStore(module.parameters()), GradStore(module.parameters())
    is_refused = way != "grad"
    refused = pytest.raises(GradientError, match=r'nother thread.*Use mode="grad"')

    def other():
        with refused if is_refused else nullcontext():
            collect(inner, module(x).sum(), way)

    with undisturbed(*module.parameters()), outer.collecting():
        in_a_thread(other)
        module(x).exp().sum().backward()
    assert_holds(outer, module, plain(module, [x], lambda y: y.exp().sum()))
    assert_holds(inner, module, {} if is_refused else plain(module, [x], torch.sum))
    inner.clear()
    in_a_thread(lambda: collect(inner, module(x).sum(), way))  # `.grad` is free again
    assert_holds(inner, module, plain(module, [x], torch.sum))
