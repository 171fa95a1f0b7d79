"""Regions that keep what chosen operators made: the plain run is the oracle."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

import recoup
from recoup._core.call import Call, run_again
from recoup._core.kept_products import Products
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError, RecoupError, ReplayError
from tests.alive import held_after, no_collector
from tests.deciding import is_second_run
from tests.oracle import Operators, loss_of_all
from tests.ways import SITUATIONS, Called, a_step_with, assert_same, built, outcome, three_steps
from tests.zoo import CHAINS, MODULES, Fn, chain_of, leaf

EVERY, NONE = frozenset(range(1000)), frozenset()
ODD = frozenset(range(1, 1000, 2))
aten = torch.ops.aten

_library = torch.library.Library("recoup_tests", "FRAGMENT")
_library.define("aliasing_attention(Tensor(a) x) -> Tensor(a)")
_library.impl("aliasing_attention", lambda x: x[:], "CPU")
_library.define("cached_attention(Tensor x, Tensor(a!) cache) -> Tensor")
_library.impl("cached_attention", lambda x, cache: cache.add_(x).clone(), "CPU")


@torch.library.custom_op("recoup_tests::drawing_attention", mutates_args=())
def drawing_attention(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


drawing_attention.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward((output / inputs[0]).detach()),
)
own = torch.ops.recoup_tests
COSTLY = frozenset({
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.convolution.default, aten.mkldnn_rnn_layer.default, aten.bernoulli_.float,
    aten._scaled_dot_product_flash_attention_for_cpu.default, own.drawing_attention.default,
    own.aliasing_attention.default, own.cached_attention.default,
})  # fmt: skip


def keeping(fn, *args, keeps=EVERY, saved=NONE, held=NONE, funcs=COSTLY):
    products = Products(funcs, keeps, saved, held)
    return run_again(Call("the call", fn, args, {}, products=products))


def on_the_cpu(fn, *args, **kept):
    with save_on_cpu():
        return keeping(fn, *args, **kept)


CHOICES = {
    "every": {},
    "none": {"keeps": NONE},
    "first": {"keeps": {0}},
    "odd": {"keeps": ODD},
    "first draw": {"keeps": {0}, "funcs": frozenset([aten.rand_like.default])},
}
RESIDUALS = {
    "no residuals": {},
    "outputs themselves": {"saved": EVERY},
    "some residuals": {"saved": EVERY, "held": ODD},
    "all residuals": {"held": EVERY},
}
in_residuals = pytest.mark.parametrize("residuals", RESIDUALS.values(), ids=RESIDUALS)


def one_by_one(keep, stages, x):
    for stage in stages:
        x = keep(stage, x)
    return x


def assert_as_plain_whatever_is_kept(
    modules, x, situation, residuals, rtol=0.0, *, may_refuse=False
):
    want = outcome(built("plain", modules), x, situation)
    for keep in (on_the_cpu, *(partial(keeping, **choice) for choice in CHOICES.values())):
        call = partial(one_by_one, partial(keep, **residuals))
        with suppress(ChangedError, ReplayError) if may_refuse else nullcontext():
            assert_same(outcome(Called(call, copy.deepcopy(modules)), x, situation), want, rtol)


@pytest.mark.sampled(30)
@in_residuals
@pytest.mark.parametrize("name", [*sorted(CHAINS.keys() - {"a hundred"}), *MODULES])
def test_the_steps_of_every_model_are_those_of_the_plain_run(name, residuals):
    # What is written to in place must not be kept itself, and a plan does not: autograd does not
    # save it. Here it is, and refused: what the next stage overwrites, and products whose pieces
    # the cells of a GRU do.
    may_refuse = (name == "in place as stages" and residuals) or (
        name in ("recurrent", "gru") and "saved" in residuals
    )
    modules, x = chain_of(name)
    assert_as_plain_whatever_is_kept(modules, x, three_steps, residuals, may_refuse=may_refuse)


@pytest.mark.sampled(48)  # each situation, with other residuals
@in_residuals
@pytest.mark.parametrize("name", SITUATIONS)
def test_every_situation(name, residuals):
    # In a checkpoint of torch norms count twice; under autocast casts are shared across regions.
    chain = "shared across depth" if "autocast" in name else "draws and buffers"
    modules, x = chain_of("dropout" if "torchs" in name else chain)
    rtol = 1e-12 if name == "gradient_of_the_gradient" else 0.0  # sums have another order
    assert_as_plain_whatever_is_kept(modules[:4], x, SITUATIONS[name], residuals, rtol)


# -- code that is hard on what is kept -------------------------------------------------------------


def draws_of_which_some_are_kept(x):
    x = drawing_attention(x.sin())
    x = (x * torch.rand_like(x)).sin()
    return drawing_attention(x.cos()) * torch.rand_like(x)


def changed_through_a_view(x, linear):
    y = linear(x)
    y[0].mul_(2.0)
    return y.sin()


def changed_before_a_gradient_within(x, linear):
    y = linear(x).mul_(2.0)
    (slope,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True)
    return (y * slope).sin()


def written_to_by_an_operator(x):
    cache = torch.zeros(4, 4).double()
    with torch.no_grad():
        own.cached_attention(x, cache)
    return (x * cache).sin()


def written_where_an_operator_is_told(x, linear):
    out = torch.zeros(4, 4).double()
    with torch.no_grad():
        torch.mm(x, linear.weight, out=out)
    return (x * out).sin()


def made_by_the_first_run_alone(x, first, second):
    """What a cache keeps shifts all numbers: nothing is handed out in the wrong place."""
    if not is_second_run():
        first.table = torch.eye(4).double() @ torch.ones(4, 4).double()
    return second((first(x.sin()) * first.table).cos()).sin()


CODE = {
    "fused attention": (
        lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True),
        leaf(2, 2, 3, 4),
    ),
    "masks before other draws": (
        lambda x: F.dropout(x.sin(), 0.3) * torch.rand_like(x),
        torch.randn(33, 65, dtype=torch.bfloat16, requires_grad=True),  # no multiple of eight
    ),
    "changed in the call": (lambda x, linear: linear(x).relu_().sin(), leaf(4, 4)),
    **{
        code.__name__: (code, leaf(4, 4))
        for code in (
            draws_of_which_some_are_kept, changed_through_a_view, changed_before_a_gradient_within,
            written_to_by_an_operator, written_where_an_operator_is_told,
            made_by_the_first_run_alone,
        )
    },
}  # fmt: skip


@in_residuals
@pytest.mark.parametrize("name", CODE)
def test_what_is_kept_is_right_whatever_code_does_to_it(name, residuals):
    code, x = CODE[name]
    num_layers = code.__code__.co_argcount - 1
    layers = [nn.Linear(4, 4).double() for _ in range(num_layers)]
    assert_as_plain_whatever_is_kept([Fn(code, *layers)], x, three_steps, residuals)


@in_residuals
def test_hooks_may_return_what_is_kept_in_another_layout(residuals):
    def code(x, first, second):
        return second(first(x.sin()).view(4, 6).cos()).view(-1).tanh()

    hooks = partial(saved_tensors_hooks, lambda t: t.t().contiguous(), lambda t: t.t())
    module = Fn(code, nn.Linear(5, 6), nn.Linear(6, 5)).double()
    # Kernels depend on the layout of inputs, and so does the order of their sums.
    situation = a_step_with(around=hooks)
    assert_as_plain_whatever_is_kept([module], leaf(4, 5), situation, residuals, 1e-12)


MAKES = {
    "a product": lambda x: torch.bmm(x, x.mT),
    "a batched product": lambda x: torch.matmul(x, x.mT),  # ends in `_unsafe_view`
    "a chunk": lambda x: torch.unsafe_chunk(x @ x.mT, 2, 1)[0],
}
WRITES = {
    "tanh_": lambda y: y.tanh_(),
    "data": lambda y: y.data.mul_(5.0),
    "numpy": lambda y: y.detach().numpy().__imul__(5.0),
    "foreach": lambda y: torch._foreach_mul_([y.detach()], 5.0),
}


@pytest.mark.parametrize("when", ["in the call", "after it"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", MAKES)
def test_f1_an_output_changed_through_an_alias_with_a_version_of_its_own(make, write, when):
    def code(x):
        y = MAKES[make](x.sin())
        if when == "in the call":
            WRITES[write](y)
        return y, y.exp()  # saves its result alone

    def calling(keep):
        def call(stages, x):
            y, z = keep(stages[0], x)
            if when == "after it":
                WRITES[write](y)
            return y, z

        return Called(call, [Fn(code)])

    x = leaf(3, 4, 4)
    want = outcome(calling(lambda stage, x: stage(x)), x, three_steps)
    for keep in (keeping, on_the_cpu, recoup.checkpoint):
        assert_same(outcome(calling(keep), x, three_steps), want)
    with suppress(ChangedError, ReplayError):
        assert_same(outcome(calling(partial(keeping, saved=EVERY)), x, three_steps), want)


# -- what runs again, and what is held -------------------------------------------------------------


STATE, UNIT = torch.get_rng_state().numel(), 64 * 64 * 8


def norm(x):
    """A convolution, a batch norm and a ReLU, of which backward needs seven values."""
    weight = torch.linspace(-1, 1, 16 * 16 * 9).view(16, 16, 3, 3)
    y = F.conv2d(x, weight, padding=1)
    return F.relu(F.batch_norm(y, None, None, training=True), inplace=True)


def images():
    return torch.randn(4, 16, 16, 16, requires_grad=True)


def layers(width, num):
    parts = [each for _ in range(num) for each in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*parts).double()


def of_fused_dropout(x):
    """The last dropout of a block, as CUDA's kernel does it: a draw is within the operator."""
    linear = nn.Linear(256, 256).double()
    y = torch.native_dropout(linear(x.sin()), 0.3, True)[0]
    return x + torch.native_dropout(linear(y.sin()), 0.3, True)[0]


def under_autocast(x):
    linear = nn.Linear(6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return linear(linear(x).tanh()).sigmoid()


# The function, its input, what is kept, and how often operators run again.
AGAIN = {
    "every product": (layers(6, 3), leaf(4, 6), {}, {"addmm": 0}),
    "all but one": (layers(6, 3), leaf(4, 6), {"keeps": EVERY - {1}}, {"addmm": 1}),
    "none": (layers(6, 3), leaf(4, 6), {"keeps": NONE}, {"addmm": 3}),
    # Residuals of this size are sketched, by products between those of the layers.
    "sketched": (layers(128, 4), leaf(256, 128), {"keeps": {0, 1, 2}}, {"addmm": 1}),
    "masks": (lambda x: F.dropout(x.sin(), 0.3).sin(), leaf(33, 65), {}, {"bernoulli_": 0}),
    "products": (norm, images(), {"saved": EVERY}, {"native_batch_norm": 1, "relu_": 1}),
    "held": (norm, images(), {"saved": EVERY, "held": EVERY - {0, 1}},
             {"native_batch_norm": 0, "relu_": 0}),
    "a held mask": (of_fused_dropout, leaf(64, 256), {"keeps": NONE, "held": {5}},
                    {"native_dropout": 1}),
    "a draw within a kernel": (of_fused_dropout, leaf(64, 256), {"keeps": {1}}, {"addmm": 1}),
    # A cast that the first run found made shifts nothing.
    "autocast": (under_autocast, torch.randn(4, 6, requires_grad=True), {}, {"addmm": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", AGAIN)
def test_kept_operators_do_not_run_again(name):
    fn, x, kept, num_runs = AGAIN[name]
    for _ in range(2):  # the first time, the code is looked at
        y = keeping(fn, x, **kept)
        with Operators() as ran:
            loss_of_all(y).backward(inputs=[x])
    assert {operator: ran.of(operator) for operator in num_runs} == num_runs


def of_an_alias(x):
    with torch.no_grad():
        first = own.aliasing_attention(x * 2)
    return x.sin() * first


# The function, the size of its input, what is kept, and the bytes of it that are held.
HELD = {
    "outputs": (layers(64, 2), {"keeps": {0}}, UNIT),
    "as it was before a change": (lambda x: (x @ torch.eye(64).double()).relu_().sin(), {}, UNIT),
    "nothing that shares memory with what was given": (of_an_alias, {}, 0),
    "masks as bits": (lambda x: F.dropout(x.sin(), 0.3), {}, 64 * 64 // 8),
}


@pytest.mark.parametrize("name", HELD)
def test_what_is_kept_is_outputs(name):
    fn, kept, num_bytes = HELD[name]
    x = leaf(64, 64) * 1.0
    found = held_after(lambda: keeping(lambda x: fn(x).sum(), x, **kept)).num_bytes
    assert num_bytes <= found <= num_bytes + 2 * STATE + 8  # the sum


def test_an_output_that_is_a_residual_is_kept_itself():
    x = images()
    plain = held_after(lambda: norm(x)).num_bytes
    assert held_after(lambda: keeping(norm, x, saved=EVERY, held=EVERY - {0})).num_bytes <= plain


def test_kept_bytes_fall_as_backward_proceeds():
    linears = nn.ModuleList(nn.Linear(64, 64).double() for _ in range(4))
    alive = []

    def fn(x):
        for linear in linears:
            x = linear(x).tanh()
            x.register_hook(lambda grad: alive.append(tracker.current_bytes))
        return x

    with no_collector(), StorageTracker() as tracker:
        x = leaf(256, 64)
        loss = keeping(fn, x).sum()
        held = tracker.current_bytes
        torch.autograd.grad(loss, x)
        del loss, x
        assert tracker.current_bytes == 0
    unit = 256 * 64 * 8
    assert held < 5.5 * unit  # the input and four outputs
    # Outputs that were handed out, and that no operator saved, are gone before the first gradient.
    assert max(alive) < 5.5 * unit
    assert alive[-1] < 3.5 * unit


def test_what_no_residual_needs_goes_with_the_second_run():
    w, v = leaf(64, 64), leaf(64, 64)
    with StorageTracker() as tracker:
        x = leaf(64, 64)
        loss = keeping(lambda x: (x.sin() @ w).cos() @ v, x).sum()
        assert tracker.current_bytes // UNIT == 3
        torch.autograd.grad(loss, x, retain_graph=True)
        assert tracker.current_bytes // UNIT == 1


def test_a_census_shows_them_as_kept():
    w, x = leaf(64, 32), leaf(16, 64)
    rows = recoup.residuals(lambda: keeping(lambda x: (x.sin() @ w).cos().sum(), x))
    kept = [each for each in rows if each.way == "keep" and "aten.mm" in each.value]
    assert [each.num_bytes for each in kept] == [16 * 32 * 8]


# -- what is refused -------------------------------------------------------------------------------


def test_a_change_after_the_call_is_an_error():
    w = leaf(4, 4)
    outputs = (
        keeping(norm, images(), saved=EVERY, held=EVERY),
        keeping(lambda x: (x.sin() @ w).sin(), leaf(4, 4)),
    )
    for y, written in zip(outputs, (outputs[0], w), strict=True):
        written.detach().mul_(2.0)
        with pytest.raises(ChangedError, match="changed in place"):
            y.sum().backward()


def another_operator(x, is_right):
    w = torch.ones(1, 4, 4).double()
    return (torch.bmm(x, w) if is_right else torch.baddbmm(x.detach(), x, w)).sin().cos()


def another_shape(x, is_right):
    with torch.no_grad():
        shift = (x[0, : 4 if is_right else 3] @ torch.ones(4, 4).double()).sum()
    return (x + shift).sin()


@pytest.mark.parametrize("num_right", [1, 3])
@pytest.mark.parametrize("code", [another_operator, another_shape])
def test_another_operator_in_its_place_is_an_error(code, num_right):
    count = itertools.count(1)
    y = keeping(lambda x: code(x, next(count) <= num_right), leaf(1, 4, 4)).sum()
    for _ in range(num_right - 1):
        y.backward(retain_graph=True)
    with pytest.raises(ReplayError, match=r"with other values than the first run"):
        y.backward()


def test_transforms_are_refused():
    w = torch.randn(4, 4)
    with pytest.raises(RecoupError, match=r"torch.func transforms"):
        torch.func.grad(lambda x: keeping(lambda x: (x @ w).sin().sum(), x))(torch.ones(4, 4))
