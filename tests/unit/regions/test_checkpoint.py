from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import recoup
from recoup._core.storage_tracking import StorageTracker
from tests.zoo import leaf

MODULE = nn.BatchNorm1d(4).double()


def of_globals(x):
    return MODULE(x).sin()


def call_it(module, x):
    return module(x).sin()


class Trainer:
    def __init__(self, norm):
        self.norm = norm

    def step(self, x):
        return self.norm(x).sin()


HELD = {
    "module": lambda norm: norm,
    "closure": lambda norm: lambda x: norm(x).sin(),
    "list": lambda norm: lambda x, group=[norm]: group[0](x).sin(),
    "partial": lambda norm: functools.partial(call_it, norm),
    "argument": lambda norm: lambda x: recoup.checkpoint(call_it, norm, x),
    "method": lambda norm: norm.forward,
    "object": lambda norm: Trainer(norm).step,
    "within an object": lambda norm: (lambda trainer: lambda x: trainer.step(x))(Trainer(norm)),
    "global": lambda norm: of_globals,
}


@pytest.mark.parametrize("held", HELD)
def test_norms_are_counted_once(held):
    norm = MODULE if held == "global" else nn.BatchNorm1d(4).double()
    norm.reset_running_stats()
    for num_steps in (1, 2):
        recoup.checkpoint(HELD[held](norm), leaf(5, 4)).square().sum().backward()
        assert int(norm.num_batches_tracked) == num_steps


class Cache:
    def __init__(self):
        self.seen, self.keys = 0, []


def attend(x, cache, beside):
    cache.seen += 1
    cache.keys.append(x.sin())
    beside.append(cache.seen)
    return (torch.cat(cache.keys) * cache.seen * len(beside)).exp()


def test_caches_and_lists_among_arguments_are_as_the_first_run_found_them():
    """And the caller finds what that run did to them, once."""
    found = []
    for call in (recoup.checkpoint, lambda fn, *args: fn(*args)):
        torch.manual_seed(0)
        x, cache, beside = leaf(4), Cache(), []
        loss = sum(call(attend, part, cache, beside).sum() for part in (x, x * 2, x.cos()))
        found.append(torch.autograd.grad(loss, x)[0])
        assert (cache.seen, len(cache.keys), beside) == (3, 3, [1, 2, 3])
    assert torch.equal(*found)


def test_what_is_kept_is_the_arguments():
    x = leaf(64, 64)
    h = x * 1.0
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        recoup.checkpoint(lambda h: h.sin().exp().tanh(), h)
    assert [t.data_ptr() for t in packed] == [h.data_ptr()]


class _Out:
    def __init__(self, value):
        self.value = value


def test_results_that_cannot_be_seen_into_and_values_put_elsewhere_are_let_go():
    seen, layer = [], nn.Linear(4, 4).double()

    def call(x):
        seen.append(layer(x).sin())
        return _Out(seen[-1].exp())

    gc.collect()
    gc.disable()
    try:
        with StorageTracker() as tracker:
            for does_end in (True, False):
                out = recoup.checkpoint(call, leaf(3, 4))
                if does_end:
                    torch.autograd.grad(out.value.sum(), layer.weight)
                seen.clear()
                del out
        assert tracker.current_bytes == 0
    finally:
        gc.enable()


# -- the keywords of torch (F8) --------------------------------------------------------------------

ACCEPTED = [
    *({"preserve_rng_state": each} for each in (True, False)),
    *({"determinism_check": each} for each in ("default", "none")),
    *({"early_stop": each} for each in (True, False)),
    *({"use_reentrant": each} for each in (None, False)),
    {"context_fn": torch.utils.checkpoint.noop_context_fn, "debug": False},
]


@pytest.mark.parametrize("given", ACCEPTED, ids=lambda each: next(iter(each)))
def test_keywords_of_torch_are_taken(given):
    """F8: none of them reaches the function, and what it draws is repeated."""
    layer, x = nn.Linear(4, 4).double(), leaf(3, 4)

    def fn(x, *, power):
        return torch.dropout(layer(x).sin(), 0.5, True) ** power

    def step(call):
        torch.manual_seed(3)
        out = call()
        return [out, *torch.autograd.grad(out.sum(), [x, *layer.parameters()]), torch.rand(3)]

    want = step(lambda: fn(x, power=2))
    got = step(lambda: recoup.checkpoint(fn, x, power=2, **given))
    assert all(map(torch.equal, got, want))


def test_contexts_around_each_run():
    """F8: the first is entered once, the second once for each run in backward."""
    entered = []

    class Within(contextlib.ContextDecorator):
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *_):
            entered.append(f"{self.name} left")

    x = leaf(3)
    y = recoup.checkpoint(
        lambda x: x.sin().exp(), x, context_fn=lambda: (Within("first"), Within("again"))
    )
    assert entered == ["first", "first left"]
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert entered[2:] == ["again", "again left"] * 2


@pytest.mark.parametrize("early_stop", [True, False])
def test_selective_checkpoints_run_products_once(early_stop):
    """F8: `create_selective_checkpoint_contexts` keeps what its policy says, in our regions too."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts
    from torch.utils.flop_counter import FlopCounterMode

    first, second = nn.Linear(64, 64).double(), nn.Linear(64, 64).double()
    x = leaf(8, 64)

    def step(call):
        leaves = [x, *first.parameters(), *second.parameters()]
        for each in leaves:
            each.grad = None
        with FlopCounterMode(display=False) as counter:
            call(lambda x: second(first(x).tanh()).sin(), x).sum().backward()
        return counter.get_total_flops(), [each.grad for each in leaves]

    products = [torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, products)
    flops, want = step(lambda fn, x: fn(x))
    more, again = step(functools.partial(recoup.checkpoint, early_stop=early_stop))
    same, got = step(
        functools.partial(recoup.checkpoint, context_fn=contexts, early_stop=early_stop)
    )
    assert all(map(torch.equal, again, want))
    assert all(map(torch.equal, got, want))
    assert more > flops
    assert same == flops


@pytest.mark.parametrize(("early_stop", "within"), [(True, False), (False, None), (False, True)])
def test_where_the_second_run_ends(early_stop, within):
    """F8: with the last residual, unless it is told to go on; torch's context decides first."""
    ends = []

    def fn(x):
        y = x.sin().exp()
        ends.append(1)
        return y

    x = leaf(100, 100)
    around = contextlib.nullcontext()
    if within is not None:
        around = torch.utils.checkpoint.set_checkpoint_early_stop(within)
    with around:
        recoup.checkpoint(fn, x, early_stop=early_stop).sum().backward()
    stops = early_stop if within is None else within
    assert len(ends) == (1 if stops else 2)


# -- arguments and modules -------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [False, True])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_an_argument_that_is_given_twice_is_one_tensor_again(is_parameter, keywords):
    """Code may ask: an attention has another projection for a query that is its key."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = nn.Parameter(torch.randn(2, 3, 8)) if is_parameter else leaf(2, 3, 8).double().float()
    other = torch.randn(2, 3, 8)
    found = []
    for query, key, value in ((x, x, x), (x, other, other), (other, x, other)):
        for call in (recoup.checkpoint, lambda fn, *args, **kwargs: fn(*args, **kwargs)):
            given = {"query": query, "key": key, "value": value}
            args = () if keywords else (query, key, value)
            output, _ = call(attention, *args, **(given if keywords else {}))
            loss = output.square().sum()
            found.append(torch.autograd.grad(loss, (x, *attention.parameters())))
        assert all(map(torch.equal, *found[-2:]))
