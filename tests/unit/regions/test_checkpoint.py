from __future__ import annotations

import contextlib
import functools
import gc
from typing import NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError
from tests.oracle import hooks_in_force
from tests.zoo import leaf


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def mixed(x, pair, *, scale, options):
    y = (x * pair.a).sin() + options["shift"][0] * scale
    return {"y": y.exp(), "pair": Pair(y.tanh(), pair.b.sin()), "name": options["name"]}


def run(call):
    torch.manual_seed(0)
    x, a, b, shift = (leaf(4) for _ in range(4))
    out = call(mixed, x, Pair(a, b), scale=3.0, options={"shift": [shift, None], "name": "n"})
    assert out["name"] == "n"
    assert type(out["pair"]) is Pair
    (out["y"].sum() + out["pair"].a.sum() + out["pair"].b.sum()).backward()
    return [value.grad for value in (x, a, b, shift)]


def test_nested_arguments_and_results():
    got, want = run(recoup.checkpoint), run(lambda fn, *args, **kwargs: fn(*args, **kwargs))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_without_gradients():
    seen = []

    def fn(x):
        seen.append(hooks_in_force())
        return x.sin(), x.detach(), x.argmax(), None

    with torch.no_grad():
        recoup.checkpoint(fn, leaf(3))
    out = recoup.checkpoint(fn, x := leaf(3))
    out[0].sum().backward()
    assert torch.equal(x.grad, x.cos())
    assert out[3] is None
    assert seen[0] is None
    assert seen[1] is not None
    assert not recoup.checkpoint(torch.sin, torch.ones(3)).requires_grad
    assert recoup.checkpoint(lambda: 7) == 7


def test_a_list_whose_element_is_replaced_is_no_change():
    x, given = leaf(4), [torch.ones(4).double()]
    y = recoup.checkpoint(lambda t: (x + t[0]).sin(), given)
    want = (x + given[0]).cos().detach()
    given[0] = given[0] * 5
    y.sum().backward()
    assert torch.equal(x.grad, want)


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


def test_sparse_matrices():
    a, layer, x = torch.eye(5).double().to_sparse(), nn.Linear(4, 4).double(), leaf(5, 4)

    def product(a, x):
        return torch.sparse.mm(a, layer(x)).sin()

    (want,) = torch.autograd.grad(product(a, x).sum(), x)
    for y in (recoup.checkpoint(lambda x: product(a, x), x), recoup.checkpoint(product, a, x)):
        assert torch.equal(*torch.autograd.grad(y.sum(), x), want)


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


REFUSED = [
    (recoup.checkpoint, {"use_reentrant": True}, r"`use_reentrant` is True"),
    (recoup.checkpoint, {"determinism_check": "some"}, r"`determinism_check` is 'some'"),
    (recoup.checkpoint, {"debug": True}, r"`debug` is True"),
    (recoup.checkpoint, {"preserve_rng_state": 3}, r"`preserve_rng_state` is 3"),
    (recoup.checkpoint, {"context_fn": lambda: None}, r"`context_fn` returned None"),
    (lambda *_: recoup.recompute(3), {}, r"is 3, but must be a function or module"),
    (lambda *_: recoup.checkpoint(3, leaf(2)), {}, r"is 3, but must be a function or module"),
]


@pytest.mark.parametrize(("call", "given", "message"), REFUSED)
def test_what_is_refused(call, given, message):
    """F8, N13"""
    with pytest.raises(ValueError, match=message):
        call(torch.sin, leaf(3), **given)


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


def test_a_keyword_of_the_function_by_a_name_of_torch():
    """F8: as in torch it is not passed on; a partial binds it."""

    def fn(x, debug=True):
        return x.sin() if debug else x.cos()

    x = leaf(3)
    assert torch.equal(recoup.checkpoint(fn, x, debug=False), x.sin())
    assert torch.equal(recoup.checkpoint(functools.partial(fn, debug=False), x), x.cos())


# -- arguments and modules -------------------------------------------------------------------------


def test_a_module_that_the_first_run_binds():
    layer = None

    def lazy(x):
        nonlocal layer
        layer = nn.Identity() if layer is None else layer
        return layer(x).exp()

    x = torch.randn(5, requires_grad=True)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(recoup.checkpoint(lazy, x).sum(), x)
        torch.testing.assert_close(gradient, x.detach().exp())


@pytest.mark.parametrize("memory", ["checkpoint", "inputs", "sqrt"])
def test_an_input_changed_between_two_backwards(memory):
    x = torch.randn(5, requires_grad=True)
    h = x * 1
    stages = [nn.Sequential(nn.Tanh(), nn.Softplus()) for _ in range(4)]
    if memory == "checkpoint":
        y = recoup.checkpoint(stages[0], h).sum()
    else:
        y = recoup.Sequential(*stages, memory=memory)(h).sum()
    torch.autograd.grad(y, h, retain_graph=True)
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(ChangedError, match="changed in place"):
        torch.autograd.grad(y, h)


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


def test_a_first_run_within_a_mode_is_repeated_within_one():
    """Within a mode, as in the check of its first run, torch adds this bias out of place."""

    def versions(fn, x):
        seen = []

        class Sees(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                seen.append(y._version)
                return y.clone()

            @staticmethod
            def backward(ctx, g):
                return g

        recoup.checkpoint(lambda x: Sees.apply(fn(x)).exp().sin(), x).sum().backward()
        return seen

    layer, x = nn.Linear(8, 8).double(), leaf(2, 6, 8)[:, :3]
    first, second = versions(layer, x)
    assert first == second
