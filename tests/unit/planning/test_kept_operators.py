"""Regions that keep what chosen operators made: the plain run is the oracle."""

from __future__ import annotations

import copy
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
from recoup.errors import ChangedError, ReplayError
from tests.deciding import is_second_run
from tests.ways import (
    SITUATIONS,
    Called,
    a_step_with,
    assert_same,
    built,
    outcome,
    three_steps,
)
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
