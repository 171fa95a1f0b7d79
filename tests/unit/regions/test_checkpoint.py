from __future__ import annotations

import contextlib
import functools
import gc
import random
import re
import types
from typing import NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError, RecoupError, ReplayError
from tests.oracle import hooks_in_force
from tests.zoo import dense, leaf


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


def test_without_gradients_nothing_is_done():
    seen = []

    def fn(x):
        seen.append(hooks_in_force())
        return x.sin()

    with torch.no_grad():
        recoup.checkpoint(fn, leaf(3))
    recoup.checkpoint(fn, leaf(3))
    assert seen[0] is None
    assert seen[1] is not None


def test_tensors_that_nothing_differentiates():
    assert not recoup.checkpoint(torch.sin, torch.ones(3)).requires_grad
    assert recoup.checkpoint(lambda: 7) == 7
    x = leaf(3)
    out = recoup.checkpoint(lambda x: (x, x.detach(), x.argmax(), None), x)
    out[0].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert out[3] is None


ARGUMENTS = {
    "positional": lambda t: ((t,), {}),
    "keyword": lambda t: ((), {"t": t}),
    "list": lambda t: (([t],), {}),
    "dict": lambda t: (({"t": t},), {}),
}


def first_tensor(t):
    return next(iter(t.values())) if isinstance(t, dict) else t[0] if isinstance(t, list) else t


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_changed_in_place(kind):
    x, changed = leaf(4), torch.ones(4).double()
    args, kwargs = ARGUMENTS[kind](changed)
    y = recoup.checkpoint(lambda t: (x + first_tensor(t)).sin(), *args, **kwargs)
    changed.mul_(3.0)
    with pytest.raises(ChangedError, match=r"changed in place"):
        y.sum().backward()


def test_a_list_whose_element_is_replaced_is_no_change():
    x, given = leaf(4), [torch.ones(4).double()]
    y = recoup.checkpoint(lambda t: (x + t[0]).sin(), given)
    want = (x + given[0]).cos().detach()
    given[0] = given[0] * 5
    y.sum().backward()
    assert torch.equal(x.grad, want)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = torch.ones(4).double()
        self.net = dense(width=4).double()

    def method(self, x):
        return self.net(x + self.offset).sin()


def by_closure(offset):
    return lambda x: (x + offset).sin()


def by_list(offset):
    held = [offset]
    return lambda x: (x + held[0]).sin()


def by_partial(offset):
    return functools.partial(lambda offset, x: (x + offset).sin(), offset)


def by_default(offset):
    def fn(x, offset=offset):
        return (x + offset).sin()

    return fn


@pytest.mark.parametrize("make", [by_closure, by_list, by_partial, by_default])
def test_a_tensor_that_a_function_holds_changed_in_place(make):
    """It is not among the residuals, and yet they depend on it: right, or an error."""
    x, offset = leaf(4), torch.ones(4).double()
    want = (x + offset).cos().detach()
    y = recoup.checkpoint(make(offset), x)
    offset.mul_(3.0)
    try:
        y.sum().backward()
    except ChangedError:
        return
    assert torch.equal(x.grad, want)


def test_a_number_that_a_function_holds_changed():
    x, scale = leaf(4), 1.0

    def fn(x):
        return (x * scale).sin()

    want = x.cos().detach()
    y = recoup.checkpoint(fn, x)
    scale = 2.0
    try:
        y.sum().backward()
    except RecoupError:
        return
    assert torch.equal(x.grad, want)


MODULE = nn.BatchNorm1d(4).double()


def of_globals(x):
    return MODULE(x).sin()


def test_a_module_among_the_globals_is_counted_once():
    MODULE.reset_running_stats()
    recoup.checkpoint(of_globals, leaf(5, 4)).sum().backward()
    assert int(MODULE.num_batches_tracked) == 1


def call_it(module, x):
    return module(x).sin()


@pytest.mark.parametrize("held", ["module", "closure", "list", "argument", "partial", "method"])
def test_norms_are_counted_once(held):
    norm = nn.BatchNorm1d(4).double()
    group = [norm]
    calls = {
        "module": lambda x: recoup.checkpoint(norm, x),
        "closure": lambda x: recoup.checkpoint(lambda x: norm(x).sin(), x),
        "list": lambda x: recoup.checkpoint(lambda x: group[0](x).sin(), x),
        "argument": lambda x: recoup.checkpoint(call_it, norm, x),
        "partial": lambda x: recoup.checkpoint(functools.partial(call_it, norm), x),
        "method": lambda x: recoup.checkpoint(norm.forward, x),
    }
    calls[held](leaf(5, 4)).square().sum().backward()
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("call", ["module", "method", "closure"])
def test_a_bias_changed_in_place(call):
    holder, x = Holder(), leaf(3, 4)
    fn = {"module": holder.net, "method": holder.method, "closure": lambda x: holder.method(x)}
    y = recoup.checkpoint(fn[call], x)
    with torch.no_grad():
        holder.net[0].bias.add_(1.0)
    with pytest.raises(ChangedError, match=r"0.bias` of the checkpointed call"):
        y.sum().backward()


def test_what_is_kept_is_the_arguments():
    x = leaf(64, 64)
    h = x * 1.0
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        recoup.checkpoint(lambda h: h.sin().exp().tanh(), h)
    assert [t.data_ptr() for t in packed] == [h.data_ptr()]


def test_an_argument_that_the_call_adds_to_is_an_error():
    def block(x, beside):
        beside.append(x.mean())
        return x.sin()

    with pytest.raises(ReplayError, match=r"changes a list or dict among its arguments"):
        recoup.checkpoint(block, leaf(4), [])


class _Out:
    def __init__(self, value):
        self.value = value


def test_a_result_that_cannot_be_seen_into_is_let_go():
    layer = nn.Linear(4, 4).double()
    gc.collect()
    gc.disable()
    try:
        with StorageTracker() as tracker:
            out = recoup.checkpoint(lambda x: _Out(layer(x).sin().exp()), leaf(3, 4))
            out.value.sum().backward(inputs=[layer.weight])
            layer.weight.grad = None
            out = recoup.checkpoint(lambda x: _Out(layer(x).sin().exp()), leaf(3, 4))
            del out
        assert tracker.current_bytes == 0
    finally:
        gc.enable()


def test_what_was_appended_to_a_list_outside_is_let_go():
    seen, layer, scale = [], nn.Linear(4, 4).double(), 2.0

    def call(x):
        hidden = layer(x).sin()
        seen.append(hidden)
        return hidden * scale

    gc.collect()
    gc.disable()
    try:
        with StorageTracker() as tracker:
            out = recoup.checkpoint(call, leaf(3, 4))
            seen.clear()
            del out
        assert tracker.current_bytes == 0
    finally:
        gc.enable()


def test_generators_in_a_partial_and_in_an_object():
    generator = torch.Generator()

    def noisy(x, generator):
        return x * torch.rand(4, generator=generator)

    class Noisy:
        def __call__(self, x):
            return noisy(x, generator)

    for fn in (functools.partial(noisy, generator=generator), Noisy()):
        with pytest.raises(ReplayError, match=r"a torch.Generator of its own"):
            recoup.checkpoint(fn, leaf(4))


def test_one_code_for_many_modules_is_looked_at_for_each():
    class Draws(nn.Module):
        def forward(self, x):
            return x * random.random()

    def custom(module):
        return lambda x: module(x)

    recoup.checkpoint(custom(nn.Tanh()), leaf(4))
    with pytest.raises(ReplayError, match=r"Python's `random`"):
        recoup.checkpoint(custom(Draws()), leaf(4))


def helper(x):
    return MODULE(x)


def of_a_helper(x):
    return helper(x).sin()


def test_a_module_behind_a_function_of_the_globals_is_counted_once():
    MODULE.reset_running_stats()
    recoup.checkpoint(of_a_helper, leaf(5, 4)).sum().backward()
    assert int(MODULE.num_batches_tracked) == 1


def test_a_module_of_a_plain_object_is_counted_once():
    class Trainer:
        def __init__(self):
            self.norm = nn.BatchNorm1d(4).double()

        def step(self, x):
            return self.norm(x).sin()

    trainer = Trainer()
    recoup.checkpoint(trainer.step, leaf(5, 4)).sum().backward()
    recoup.checkpoint(lambda x: trainer.step(x), leaf(5, 4)).sum().backward()
    assert int(trainer.norm.num_batches_tracked) == 2


def test_sparse_matrices():
    a, layer, x = torch.eye(5).double().to_sparse(), nn.Linear(4, 4).double(), leaf(5, 4)
    want = torch.autograd.grad(torch.sparse.mm(a, layer(x)).sin().sum(), x)
    got = torch.autograd.grad(
        recoup.checkpoint(lambda x: torch.sparse.mm(a, layer(x)), x).sin().sum(), x
    )
    assert torch.equal(got[0], want[0])
    got = torch.autograd.grad(
        recoup.checkpoint(lambda a, x: torch.sparse.mm(a, layer(x)), a, x).sin().sum(), x
    )
    assert torch.equal(got[0], want[0])


def test_as_a_replacement_of_torch():
    x = leaf(4)
    y = recoup.checkpoint(torch.sin, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.cos())
    with pytest.raises(ValueError, match=r"`use_reentrant` is True"):
        recoup.checkpoint(torch.sin, x, use_reentrant=True)


def test_what_cannot_be_called_is_refused():
    """N13"""
    for call in (lambda: recoup.recompute(3), lambda: recoup.checkpoint(3, leaf(2))):
        with pytest.raises(ValueError, match=r"is 3, but must be a function or module"):
            call()


# -- the keywords of torch (F8) --------------------------------------------------------------------

ACCEPTED = [
    {"preserve_rng_state": True},
    {"preserve_rng_state": False},
    {"determinism_check": "default"},
    {"determinism_check": "none"},
    {"context_fn": torch.utils.checkpoint.noop_context_fn},
    {"debug": False},
    {"early_stop": True},
    {"early_stop": False},
    {"use_reentrant": None},
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_reentrant": True}, r"`use_reentrant` is True"),
        ({"determinism_check": "some"}, r"`determinism_check` is 'some'"),
        ({"debug": True}, r"`debug` is True"),
        ({"preserve_rng_state": 3}, r"`preserve_rng_state` is 3"),
        ({"context_fn": lambda: None}, r"`context_fn` returned None"),
    ],
)
def test_keywords_of_torch_that_ask_for_what_there_is_not(given, message):
    """F8"""
    with pytest.raises(ValueError, match=message):
        recoup.checkpoint(torch.sin, leaf(3), **given)


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


# -- numbers that change between the two runs (N6) -------------------------------------------------

COUNTER = 2
SCALES = {"first": 2.0, "others": [1.0, 3.0]}


class Settings:
    limit = 4.0

    def __init__(self):
        self.scale: float | None = 2.0
        self.unread = 0
        self.inner = types.SimpleNamespace(scale=2.0)

    @property
    def doubled(self):
        return 2 * self.scale

    def apply(self, x):
        return self.helped(x * self.scale).sin()

    def by_property(self, x):
        return (x * self.doubled).sin()

    def of_the_class(self, x):
        return (x * self.limit).sin()

    def helped(self, x):
        return x * self.inner.scale

    def __call__(self, x):
        return self.apply(x)


SETTINGS = Settings()


def of_a_global(x):
    return (x * COUNTER).sin()


def behind_a_helper(x):
    return of_a_global(x).cos()


def within_a_lambda(x):
    return (lambda x: x * COUNTER)(x).sin()


def of_an_entry(x):
    return (x * SCALES["first"] * SCALES["others"][1]).sin()


def of_an_attribute(x):
    return (x * SETTINGS.inner.scale).sin()


def of_none(x):
    return x.sin() if SETTINGS.scale is None else (x * SETTINGS.scale).sin()


def changed_global():
    globals()["COUNTER"] += 1


CHANGES = {
    "global": (of_a_global, changed_global, "COUNTER"),
    "helper": (behind_a_helper, changed_global, "of_a_global.COUNTER"),
    "lambda": (within_a_lambda, changed_global, "COUNTER"),
    "entry": (of_an_entry, lambda: SCALES.update(first=5.0), "SCALES['first']"),
    "nested entry": (of_an_entry, lambda: SCALES.update(others=[1.0, 7.0]), "SCALES['others'][1]"),
    "attribute": (of_an_attribute, lambda: vars(SETTINGS.inner).update(scale=9.0), "inner.scale"),
    "None": (of_none, lambda: vars(SETTINGS).update(scale=None), "SETTINGS.scale"),
    "owner": (SETTINGS.apply, lambda: vars(SETTINGS).update(scale=9.0), "self.scale"),
    "method of owner": (SETTINGS.apply, lambda: vars(SETTINGS.inner).update(scale=9.0), "scale"),
    "property": (SETTINGS.by_property, lambda: vars(SETTINGS).update(scale=9.0), "scale"),
    "object": (SETTINGS, lambda: vars(SETTINGS).update(scale=9.0), "scale"),
    "class": (SETTINGS.of_the_class, lambda: setattr(Settings, "limit", 9.0), "self.limit"),
    "partial": (functools.partial(of_a_global), changed_global, "COUNTER"),
}


@pytest.fixture
def as_at_first():
    yield
    globals()["COUNTER"] = 2
    SCALES.update(first=2.0, others=[1.0, 3.0])
    SETTINGS.__init__()
    Settings.limit = 4.0


@pytest.mark.usefixtures("as_at_first")
@pytest.mark.parametrize("kind", CHANGES)
def test_a_number_that_changes_between_the_runs_is_named(kind):
    """N6"""
    fn, change, name = CHANGES[kind]
    x = leaf(4)
    want = torch.autograd.grad(fn(x).sum(), x)[0]
    y = recoup.checkpoint(fn, x)
    assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], want)
    change()
    with pytest.raises(ChangedError, match=re.escape(name)):
        y.sum().backward()


@pytest.mark.usefixtures("as_at_first")
def test_numbers_that_the_code_does_not_read_may_change():
    """N6: no false alarm."""
    x, unread, counts = leaf(4), 3, [0]
    y = recoup.checkpoint(SETTINGS.apply, x)
    z = recoup.checkpoint(lambda x: x.sin(), x)
    SETTINGS.unread += 1
    changed_global()
    unread += counts[0] + 1
    (y.sum() + z.sum()).backward()


TICKS = 0


class Counting:
    def __init__(self):
        self.steps, self.log, self.started = 0, {"steps": 0}, False

    def apply(self, x):
        self.steps += 1
        self.log["steps"] += 1
        self.started = True
        return (x * self.steps * self.log["steps"]).sin()


def ticking(x):
    global TICKS
    TICKS += 1
    return (x * TICKS).sin()


def counts_in_a_cell():
    count = [0]
    total = 0

    def fn(x):
        nonlocal total
        total += 1
        count[0] += 1
        return (x * total * count[0]).sin()

    return fn, lambda: (total, count[0])


def counts_in_an_object():
    counting = Counting()
    return counting.apply, lambda: (counting.steps, counting.log["steps"])


def counts_in_a_global():
    globals()["TICKS"] = 0
    return ticking, lambda: (TICKS,)


@pytest.mark.parametrize("make", [counts_in_a_cell, counts_in_an_object, counts_in_a_global])
def test_a_counter_of_the_function_counts_once(make):
    """N6: and each second run sees what its first run saw, whatever ran in between."""
    (plain, _), (fn, seen) = make(), make()
    xs = [leaf(4) for _ in range(3)]
    make()  # begins anew
    want = [torch.autograd.grad(plain(x).sum(), x)[0] for x in xs]
    make()
    ys = [recoup.checkpoint(fn, x) for x in xs]
    before = seen()
    got = torch.autograd.grad(sum(y.sum() for y in ys), xs)
    assert all(map(torch.equal, got, want))
    assert seen() == before
    assert set(before) == {3}


def test_a_loop_variable_that_is_bound_late():
    """N6: an error, since the second run would read another one."""
    x = leaf(4)
    ys = [recoup.checkpoint(lambda x: (x * n).sin(), x) for n in (1, 2, 3)]  # noqa: B023
    with pytest.raises(ChangedError, match="`n`"):
        sum(y.sum() for y in ys).backward()


def test_a_loop_variable_that_is_a_module():
    x = torch.randn(5, 4, requires_grad=True)
    outputs = [
        recoup.checkpoint(lambda x: layer(x).tanh(), x).sum()  # noqa: B023
        for layer in (nn.Linear(4, 4), nn.Linear(4, 4))
    ]
    with pytest.raises(ChangedError, match=r"`layer`.*given another value"):
        sum(outputs).backward()


def tanh_of(layer, x):
    return layer(x).tanh()


class Holds:
    """An object that calls, or whose code reads, a module in some place."""

    shared = nn.Linear(4, 4)

    def __init__(self, layer):
        self.layers, self.by_name, self.scale = [layer], {"a": layer}, 2.0

    def in_list(self, x):
        return self.layers[-1](x).tanh()

    def in_dict(self, x):
        return self.by_name["a"](x).tanh()

    def of_class(self, x):
        return self.shared(x).tanh()

    def __call__(self, x):
        return self.layers[0](x).tanh() * self.scale


@pytest.mark.parametrize(
    "made",
    [
        lambda layer: layer.forward,
        lambda layer: functools.partial(tanh_of, layer),
        lambda layer: functools.partial(functools.partial(tanh_of, layer)),
        lambda layer: lambda x, layer=layer: layer(x),
        lambda layer: [layer.forward],
    ],
)
def test_a_loop_variable_to_which_a_module_is_bound(made):
    """The function that a variable holds may be another one, and with it what is bound to it."""
    x = torch.randn(5, 4)
    outputs = [
        recoup.checkpoint(lambda x: (f[0] if isinstance(f, list) else f)(x).tanh(), x).sum()  # noqa: B023
        for f in map(made, (nn.Linear(4, 4), nn.Linear(4, 4)))
    ]
    with pytest.raises(ChangedError, match="given another value"):
        sum(outputs).backward()


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda held: held.in_list, lambda held: held.layers.append(nn.Linear(4, 4))),
        (lambda held: held.in_dict, lambda held: held.by_name.update(a=nn.Linear(4, 4))),
        (lambda held: held.of_class, lambda held: setattr(Holds, "shared", nn.Linear(4, 4))),
        (lambda held: held, lambda held: held.layers.insert(0, nn.Linear(4, 4))),
        (lambda held: lambda x: held(x), lambda held: setattr(held, "scale", 3.0)),
        (lambda held: lambda x: held.in_list(x), lambda held: held.layers.pop()),
    ],
)
def test_a_module_at_the_end_of_a_path(read, change):
    held = Holds(nn.Linear(4, 4))
    again = recoup.checkpoint(read(held), torch.randn(5, 4)).sum()
    again.backward()
    y = recoup.checkpoint(read(held), torch.randn(5, 4)).sum()
    change(held)
    with pytest.raises(ChangedError, match="given another value"):
        y.backward()


def test_a_module_that_the_first_run_replaces():
    """A second run would begin with the other one."""
    layer, layers = nn.Linear(4, 4), [nn.Linear(4, 4), nn.Linear(4, 4)]

    def swaps(x):
        nonlocal layer
        y = layer(x).tanh()
        layer = nn.Linear(4, 4)
        return y

    def pops(x):
        return layers.pop()(x).tanh()

    for fn, name in ((swaps, "layer"), (pops, "layers")):
        with pytest.raises(ReplayError, match=f"replaces `{name}"):
            recoup.checkpoint(fn, torch.randn(5, 4))
    assert hooks_in_force() is None


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


@pytest.mark.parametrize("default", [(), (2.0,)])
def test_a_tensor_that_the_first_run_has_put_into_a_dict(default):
    cache = {}

    def scaled(x, power=None):
        if "scale" not in cache:
            cache["scale"] = torch.ones(1)
        return (x + cache["scale"]).exp()

    scaled.__defaults__ = (*default, None)[:1]
    x = torch.randn(5, requires_grad=True)
    y = recoup.checkpoint(scaled, x).sum()
    cache["scale"].mul_(3)
    with pytest.raises(ChangedError, match=r"cache\['scale'\].*changed in place"):
        y.backward()


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
