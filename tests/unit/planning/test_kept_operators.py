"""Regions that keep what chosen operators made: the plain run is the oracle."""

from __future__ import annotations

import itertools
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup._core.call import Call, run_again
from recoup._core.kept_products import Products
from recoup.errors import ChangedError, ReplayError
from tests.oracle import assert_same_tensor, hooks_in_force, loss_of_all, tensors
from tests.zoo import CHAINS, MODULES, chain_of, leaf

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


def keeping(fn, *args, keeps=EVERY, saved=NONE, held=NONE, funcs=COSTLY, **kwargs):
    products = Products(funcs, keeps, saved, held)
    return run_again(Call("the call", fn, args, kwargs, products=products))


def plainly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def found(outputs, *leaves):
    """The outputs and the gradients of tensors and of the parameters of modules."""
    modules = [each for each in leaves if isinstance(each, nn.Module)]
    leaves = [each for each in leaves if not isinstance(each, nn.Module)]
    leaves += [p for module in modules for p in module.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(
        loss_of_all(outputs), leaves, retain_graph=True, allow_unused=True
    )
    buffers = [buffer for module in modules for buffer in module.buffers()]
    return [*tensors(outputs), *gradients, *buffers]


def left_by(step, call):
    torch.manual_seed(2)
    return [*step(call), torch.get_rng_state()]


def assert_as_plain(step, call):
    want = left_by(step, plainly)
    for _ in range(2):  # the first time, the code is looked at
        for place, (a, b) in enumerate(zip(left_by(step, call), want, strict=True)):
            # Kernels depend on the layout of inputs, and so does the order of their sums.
            assert_same_tensor(str(place), a, b, 1e-12 if step in ROUNDING else 0.0)
        assert hooks_in_force() is None


# -- steps: what a call gives, plain or with kept products -----------------------------------------


def in_calls_of_its_modules(name):
    """A step of a chain of the zoo."""

    def step(call):
        modules, x = chain_of(name)
        y = x = x.detach().requires_grad_(x.requires_grad)
        for module in modules:
            y = call(module, y)
        return found(y, *([x] if x.requires_grad else []), nn.ModuleList(modules))

    return step


def mlp(width=6):
    return nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, width), nn.Sigmoid()
    )


def fused_attention(call):
    x = leaf(2, 2, 3, 4)

    def fn(x):
        return F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True)

    return found(call(fn, x), x)


def masks_before_other_draws(call):
    x = torch.randn(33, 65, dtype=torch.bfloat16, requires_grad=True)  # no multiple of eight
    return found(call(lambda x: F.dropout(x.sin(), 0.3) * torch.rand_like(x), x), x)


def draws_of_which_some_are_kept(call):
    def fn(x):
        x = drawing_attention(x.sin())
        x = (x * torch.rand_like(x)).sin()
        return drawing_attention(x.cos()) * torch.rand_like(x)

    x = leaf(5)
    return found(call(fn, x), x)


def changed_in_the_call(call):
    x, w = leaf(4, 4), leaf(4, 4)
    return found(call(lambda x, w: (x @ w).relu_().sin(), x, w), x, w)


def changed_through_a_view(call):
    def fn(x, w):
        y = x @ w
        y[0].mul_(2.0)
        return y.sin()

    x, w = leaf(4, 4), leaf(4, 4)
    return found(call(fn, x, w), x, w)


def changed_before_a_gradient_within(call):
    x, w = leaf(4, 4), leaf(4, 4)

    def fn(x):
        y = (x @ w).mul_(2.0)
        (slope,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True)
        return (y * slope).sin()

    return found(call(fn, x), x)


def changed_after_the_call(call):
    x, w, v = leaf(4, 4), leaf(4, 4), leaf(4, 4)

    def fn(x):
        y = x.sin() @ w
        return y, (y * 2) @ v

    y, z = call(fn, x)
    return found([y.relu_(), z], x, w, v)


def an_operator_that_writes_to_what_it_is_given(call):
    def fn(x):
        cache = torch.zeros(4, 4).double()
        with torch.no_grad():
            own.cached_attention(x, cache)
        return (x * cache).sin()

    x = leaf(4, 4)
    return found(call(fn, x), x)


def an_operator_that_writes_where_it_is_told(call):
    w, x = leaf(4, 4).detach(), leaf(4, 4)

    def fn(x):
        out = torch.zeros(4, 4).double()
        with torch.no_grad():
            torch.mm(x, w, out=out)
        return (x * out).sin()

    return found(call(fn, x), x)


def an_operator_that_only_the_first_run_needed(call):
    """What a cache keeps shifts all numbers: nothing is handed out in the wrong place."""
    cache, w, v, x = {}, leaf(4, 4), leaf(4, 4), leaf(4, 4)

    def fn(x):
        if "table" not in cache:
            cache["table"] = torch.eye(4).double() @ torch.ones(4, 4).double()
        y = (x.sin() @ w) * cache["table"]
        return (y.cos() @ v).sin()

    return found(call(fn, x), x, w, v)


def weights_shared_across_regions_under_autocast(call):
    linear, x = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
        for _ in range(3):
            y = call(lambda y: linear(linear(y).tanh()).sigmoid(), y)
    return found(y, x, linear)


def three_times_over_one_graph(call):
    net, x = mlp().double(), leaf(4, 6)
    y = call(net, x)
    return [each for _ in range(3) for each in found(y, x, net)]


def parts_of_one_graph(call):
    a, b, x = leaf(4, 4), leaf(4, 4), leaf(4, 4)

    def fn(x):
        y = x @ a
        return y.sin(), (y.cos() @ b).exp()

    y, z = call(fn, x)
    return [*found(y, x, a), *found(z, x, a, b)]


def a_second_derivative(call):
    net, x = mlp().double().eval(), leaf(4, 6)
    (first,) = torch.autograd.grad(call(net, x).sin().sum(), x, create_graph=True)
    return found(first.square(), x, net)[1:]


def weights_that_stand_in_for_others(call):
    net, x = mlp().double(), leaf(4, 6)
    weights = {name: leaf(*value.shape) for name, value in net.named_parameters()}

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return found(call(self.net, x).sin(), x, *weights.values())

    named = {f"net.{name}": value for name, value in weights.items()}
    return torch.func.functional_call(Whole(), named, (x,))


def keyword_arguments(call):
    net, x = mlp().double(), leaf(4, 6)
    return found(call(lambda *, parts: {"y": net(parts[0])}, parts=[x])["y"], x, net)


def hooks_that_transpose(call):
    w, v, x = leaf(5, 6), leaf(6, 5), leaf(4, 5)
    with saved_tensors_hooks(lambda t: t.t().contiguous(), lambda t: t.t()):
        y = call(lambda x: ((x.sin() @ w).view(4, 6).cos() @ v).view(-1).tanh(), x)
    return found(y, x, w, v)


ROUNDING = [a_second_derivative, hooks_that_transpose]
REFUSABLE = [changed_after_the_call]  # where the output itself is kept
OF_FUNCTIONS = [
    fused_attention, masks_before_other_draws, draws_of_which_some_are_kept, changed_in_the_call,
    changed_through_a_view, changed_before_a_gradient_within, changed_after_the_call,
    an_operator_that_writes_to_what_it_is_given, an_operator_that_writes_where_it_is_told,
    an_operator_that_only_the_first_run_needed, weights_shared_across_regions_under_autocast,
    three_times_over_one_graph, parts_of_one_graph, a_second_derivative,
    weights_that_stand_in_for_others, keyword_arguments, hooks_that_transpose,
]  # fmt: skip
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


def on_the_cpu(fn, *args, **kwargs):
    with save_on_cpu():
        return keeping(fn, *args, **kwargs)


in_residuals = pytest.mark.parametrize("residuals", RESIDUALS.values(), ids=RESIDUALS)


def assert_as_plain_whatever_is_kept(step, residuals):
    for keep, choice in itertools.product((keeping, on_the_cpu), CHOICES.values()):
        may_refuse = step in REFUSABLE and residuals
        with suppress(ChangedError, ReplayError) if may_refuse else nullcontext():
            assert_as_plain(step, partial(keep, **choice, **residuals))


@in_residuals
@pytest.mark.parametrize("step", OF_FUNCTIONS, ids=lambda step: step.__name__)
def test_the_step_is_that_of_the_plain_run(step, residuals):
    assert_as_plain_whatever_is_kept(step, residuals)


@pytest.mark.sampled(40)
@in_residuals
@pytest.mark.parametrize("name", [*sorted(CHAINS.keys() - {"a hundred"}), *MODULES])
def test_the_step_of_every_model_is_that_of_the_plain_run(name, residuals):
    assert_as_plain_whatever_is_kept(in_calls_of_its_modules(name), residuals)


def torchs(fn, *args):
    return torch_checkpoint(fn, *args, use_reentrant=False)


AROUND = {
    "recoup": recoup.checkpoint,
    "torch": torchs,
    "itself": keeping,
    "half of itself": partial(keeping, keeps=frozenset([0, 3])),
}


@pytest.mark.parametrize("outer", AROUND)
@pytest.mark.parametrize("inner", AROUND)
def test_one_in_another(outer, inner):
    def step(call):
        net, x = nn.Sequential(*(mlp() for _ in range(3))).double(), leaf(4, 6)
        within = plainly if call is plainly else AROUND[inner]
        return found(call(lambda x: net[2](within(net[1], net[0](x).sin())), x), x, net)

    assert_as_plain(step, AROUND[outer])


MAKES = {
    "a batched product": lambda x: torch.matmul(x, x.mT),  # ends in `_unsafe_view`
    "a chunk": lambda x: torch.unsafe_chunk(x @ x.mT, 2, 1)[0],
    "a split": lambda x: torch.unsafe_split(x @ x.mT, 2, 1)[0],
}
WRITES = {
    "tanh_": lambda y: y.tanh_(),
    "mul_": lambda y: y.mul_(5.0),
    "data": lambda y: y.data.mul_(5.0),
    "numpy": lambda y: y.detach().numpy().__imul__(5.0),
    "out": lambda y: torch.mul(y.detach(), 5.0, out=y.detach()),
    "foreach": lambda y: torch._foreach_mul_([y.detach()], 5.0),
}


@pytest.mark.parametrize("when", ["in the call", "after it"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", MAKES)
def test_f1_an_output_changed_through_an_alias_with_a_version_of_its_own(make, write, when):
    def fn(x):
        y = MAKES[make](x.sin())
        if when == "in the call":
            WRITES[write](y)
        return y, y.exp()  # saves its result alone

    def step(call):
        x = leaf(3, 4, 4)
        y, z = call(fn, x)
        if when == "after it":
            WRITES[write](y)
        return found([y, z], x)

    for call in (keeping, on_the_cpu, recoup.checkpoint):
        assert_as_plain(step, call)
    with suppress(ChangedError, ReplayError):
        assert_as_plain(step, partial(keeping, saved=EVERY))
