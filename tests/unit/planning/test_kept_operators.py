"""Regions that keep what chosen operators made: the plain run is the oracle."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

from recoup._core.call import Call, run_again
from recoup._core.kept_products import Products
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError, RecoupError, ReplayError
from tests.alive import held_after, no_collector
from tests.deciding import is_second_run
from tests.oracle import Operators, loss_of_all
from tests.plan_oracle import in_a_row
from tests.ways import SITUATIONS, Called, assert_same, built, outcome, three_steps
from tests.zoo import CHAINS, MODULES, Fn, chain_of, leaf

EVERY, NONE = frozenset(range(1000)), frozenset()
ODD = frozenset(range(1, 1000, 2))
aten = torch.ops.aten

_library = torch.library.Library("recoup_tests", "FRAGMENT")
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
    own.cached_attention.default,
})  # fmt: skip


def keeping(fn, *args, keeps=EVERY, saved=NONE, held=NONE, funcs=COSTLY):
    products = Products(funcs, keeps, saved, held)
    return run_again(Call("the call", fn, args, {}, products=products))


def on_the_cpu(fn, *args, **kept):
    with save_on_cpu():
        return keeping(fn, *args, **kept)


FIRST_DRAW = {"keeps": {0}, "funcs": frozenset([aten.rand_like.default])}
CHOICES = {}, {"keeps": NONE}, {"keeps": {0}}, {"keeps": ODD}, FIRST_DRAW
RESIDUALS = {
    "no residuals": {},
    "outputs themselves": {"saved": EVERY},
    "some residuals": {"saved": EVERY, "held": ODD},
    "all residuals": {"held": EVERY},
}
in_residuals = pytest.mark.parametrize("residuals", RESIDUALS.values(), ids=RESIDUALS)


def one_by_one(keep, stages, x):
    return in_a_row([partial(keep, stage) for stage in stages], x)


def assert_as_plain_for_all(modules, x, situation, residuals, rtol=0.0, *, may_refuse=False):
    want = outcome(built("plain", modules), x, situation)
    for keep in (on_the_cpu, *(partial(keeping, **choice) for choice in CHOICES)):
        call = partial(one_by_one, partial(keep, **residuals))
        with suppress(ChangedError, ReplayError) if may_refuse else nullcontext():
            assert_same(outcome(Called(call, copy.deepcopy(modules)), x, situation), want, rtol)


@pytest.mark.sampled(30)
@in_residuals
@pytest.mark.parametrize("name", [*sorted(CHAINS.keys() - {"a hundred"}), *MODULES])
def test_the_steps_of_every_model_are_those_of_the_plain_run(name, residuals):
    # What is written to in place must not be kept itself, and a plan does not. Here it is refused.
    may_refuse = (name == "in place as stages" and residuals) or (
        name in ("recurrent", "gru") and "saved" in residuals
    )
    modules, x = chain_of(name)
    assert_as_plain_for_all(modules, x, three_steps, residuals, may_refuse=may_refuse)


@pytest.mark.sampled(48)  # each situation, with other residuals
@in_residuals
@pytest.mark.parametrize("name", SITUATIONS)
def test_every_situation(name, residuals):
    # In a checkpoint of torch norms count twice; under autocast casts are shared across regions.
    chain = "shared across depth" if "autocast" in name else "draws and buffers"
    modules, x = chain_of("dropout" if "torchs" in name else chain)
    rtol = 1e-12 if name == "gradient_of_the_gradient" else 0.0  # sums have another order
    assert_as_plain_for_all(modules[:4], x, SITUATIONS[name], residuals, rtol)


# -- code that is hard on what is kept -------------------------------------------------------------


def changed_before_a_gradient_within(x, linear):
    y = linear(x).mul_(2.0)
    (slope,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True)
    return (y * slope).sin()


def made_by_the_first_run_alone(x, first, second):
    """What a cache keeps shifts all numbers: nothing is handed out in the wrong place."""
    if not is_second_run():
        first.table = torch.eye(4).double() @ torch.ones(4, 4).double()
    return second((first(x.sin()) * first.table).cos()).sin()


CODE = {
    "draws": (lambda x: (drawing_attention(x.sin()) * torch.rand_like(x)).sin(), leaf(4, 4)),
    "changed through a view": (lambda x, a: ((y := a(x)), y[0].mul_(2.0), y.sin())[-1], leaf(4, 4)),
    "changed through numpy": (
        lambda x, a: ((y := a(x)), y.detach().numpy().__imul__(5.0), y.exp())[-1], leaf(4, 4)
    ),
    "data of a view": (lambda x: ((y := x @ x.mT), y.data.mul_(5.0), y.exp())[-1], leaf(3, 4, 4)),
    "written to by an operator": (
        lambda x: ((y := x.detach() * 0), own.cached_attention(x.detach(), y), (x * y).sin())[-1],
        leaf(4, 4),
    ),
    "fused attention": (
        lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True),
        leaf(2, 2, 3, 4),
    ),
    "masks before other draws": (
        lambda x: F.dropout(x.sin(), 0.3) * torch.rand_like(x),
        torch.randn(33, 65, dtype=torch.bfloat16, requires_grad=True),  # no multiple of eight
    ),
    "changed in the call": (lambda x, linear: linear(x).relu_().sin(), leaf(4, 4)),
    "changed before a gradient within": (changed_before_a_gradient_within, leaf(4, 4)),
    "made by the first run alone": (made_by_the_first_run_alone, leaf(4, 4)),
    "written where an operator is told": (
        lambda x, a: ((out := x.detach() * 0), torch.mm(x.detach(), a.weight.detach(), out=out),
                      (x * out).sin())[-1], leaf(4, 4)
    ),
}  # fmt: skip


@in_residuals
@pytest.mark.parametrize("name", CODE)
def test_what_is_kept_is_right_whatever_code_does_to_it(name, residuals):
    code, x = CODE[name]
    num_layers = code.__code__.co_argcount - 1
    layers = [nn.Linear(4, 4).double() for _ in range(num_layers)]
    # A residual must not be written to unseen.
    may_refuse = "saved" in residuals and name in ("changed through numpy", "data of a view")
    modules = [Fn(code, *layers)]
    assert_as_plain_for_all(modules, x, three_steps, residuals, may_refuse=may_refuse)


# -- what runs again, and what is held -------------------------------------------------------------


STATE, UNIT = torch.get_rng_state().numel(), 64 * 64 * 8


def norm(x):
    weight = torch.linspace(-1, 1, 16 * 16 * 9).view(16, 16, 3, 3)
    y = F.conv2d(x, weight, padding=1)
    return F.relu(F.batch_norm(y, None, None, training=True), inplace=True)


def images():
    return torch.randn(4, 16, 16, 16, requires_grad=True)


def layers(width, num):
    parts = (nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num))
    return nn.Sequential(*parts).double()


def of_fused_dropout(x):
    """As CUDA's kernel does it: a draw is within the operator."""
    linear = nn.Linear(256, 256).double()
    y = torch.native_dropout(linear(x.sin()), 0.3, True)[0]
    return x + torch.native_dropout(linear(y.sin()), 0.3, True)[0]


# The function, its input, what is kept, and how often operators run again.
AGAIN = {
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
    "autocast": (torch.autocast("cpu", torch.bfloat16)(nn.Sequential(*[nn.Linear(6, 6)] * 2)),
                 torch.randn(4, 6, requires_grad=True), {}, {"addmm": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", AGAIN)
def test_kept_operators_do_not_run_again(name):
    fn, x, kept, num_runs = AGAIN[name]
    for _ in range(2):  # the first time, the code is looked at
        y = keeping(fn, x, **kept)
        with Operators() as ran:
            loss_of_all(y).backward(inputs=[x])
    assert {operator: ran.of(operator) for operator in num_runs} == num_runs


# The function, what is kept, and the bytes of it that are held.
HELD = {
    "outputs": (layers(64, 2), {"keeps": {0}}, UNIT),
    "as it was before a change": (lambda x: (x @ torch.eye(64).double()).relu_().sin(), {}, UNIT),
    "masks as bits": (lambda x: F.dropout(x.sin(), 0.3), {}, 64 * 64 // 8),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_what_is_kept_is_outputs(name):
    fn, kept, num_bytes = HELD[name]
    x = leaf(64, 64) * 1.0
    found = held_after(lambda: keeping(lambda x: fn(x).sum(), x, **kept)).num_bytes
    assert num_bytes <= found <= num_bytes + 2 * STATE + 8  # the sum


def test_kept_bytes_fall_as_backward_proceeds():
    stages, alive = layers(64, 4), []

    def fn(x):
        for stage in stages:
            x = stage(x)
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
    assert max(alive) < 5.5 * unit
    assert alive[-1] < 3.5 * unit


# -- what is refused -------------------------------------------------------------------------------


def test_a_change_after_the_call_is_an_error():
    w = leaf(4, 4)
    kept = keeping(norm, images(), saved=EVERY, held=EVERY)
    for y, written in ((kept, kept), (keeping(lambda x: (x.sin() @ w).sin(), leaf(4, 4)), w)):
        written.detach().mul_(2.0)
        with pytest.raises(ChangedError, match="changed in place"):
            y.sum().backward()


@pytest.mark.parametrize("num_right", [1, 3])
@pytest.mark.parametrize("wrong", [lambda x, w: torch.baddbmm(x, x, w), lambda x, w: x[:, :3] @ w])
def test_another_operator_in_its_place_is_an_error(wrong, num_right):
    count, w = itertools.count(1), torch.ones(1, 4, 4).double()

    def code(x):
        product = torch.bmm if next(count) <= num_right else wrong
        return (x + product(x.detach(), w).sum()).sin()

    y = keeping(code, leaf(1, 4, 4)).sum()
    for _ in range(num_right - 1):
        y.backward(retain_graph=True)
    with pytest.raises(ReplayError, match=r"with other values than the first run"):
        y.backward()


def test_transforms_are_refused():
    w = torch.randn(4, 4)
    with pytest.raises(RecoupError, match=r"torch.func transforms"):
        torch.func.grad(lambda x: keeping(lambda x: (x @ w).sin().sum(), x))(torch.ones(4, 4))
