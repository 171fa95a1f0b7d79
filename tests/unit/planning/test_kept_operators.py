"""Regions that keep what chosen operators made: the plain run is the oracle."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup._core.call import Call, run_again
from recoup._core.kept_products import PackedMask, Products
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError, RecoupError, ReplayError
from recoup.planning.work import is_costly
from tests.alive import held_after
from tests.oracle import Operators, assert_same_step, hooks_in_force, run_step
from tests.zoo import leaf

EVERY = frozenset(range(1000))
NONE = frozenset()
ODD = frozenset(range(1, 1000, 2))
aten = torch.ops.aten
COSTLY = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.convolution.default, aten.mkldnn_rnn_layer.default, aten.bernoulli_.float,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}  # fmt: skip


def keeping(fn, *args, keeps=EVERY, saved=NONE, held=NONE, **kwargs):
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    products = Products(frozenset(COSTLY), keeps, saved, held)
    return run_again(Call("the call", fn, args, kwargs, products=products))


class Keeping(nn.Module):
    def __init__(self, blocks, keeps=EVERY, **residuals):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.keeps, self.residuals = keeps, residuals

    def forward(self, x):
        for block in self.blocks:
            kept = {"keeps": self.keeps, **self.residuals}
            x = block(x) if self.keeps is None else keeping(block, x, **kept)
        return x


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, attention, p):
        super().__init__()
        self.attention, self.p = attention, p
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Dropout(p))

    def attend(self, q, k, v):
        if self.attention == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        weights = (q @ k.transpose(-1, -2) / 2.0).softmax(-1)
        return F.dropout(weights, self.p) @ v

    def forward(self, x):
        n, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(n, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = self.attend(*qkv).transpose(1, 2).reshape(n, length, 8)
        x = x + F.dropout(self.out(y), self.p)
        return x + self.mlp(self.norms[1](x))


def mlp(width=6):
    return nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, width), nn.Sigmoid()
    )


def conv():
    return nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True),
        nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout2d(0.3),
    )  # fmt: skip


BLOCKS = {
    "mlp": lambda: ([mlp() for _ in range(3)], (4, 6)),
    "convolutions and norms": lambda: ([conv() for _ in range(2)], (3, 3, 4, 4)),
    "attention": lambda: ([Block("sdpa", 0.0) for _ in range(2)], (2, 3, 8)),
    "attention with dropout": lambda: ([Block("sdpa", 0.2) for _ in range(2)], (2, 3, 8)),
    "explicit attention": lambda: ([Block("explicit", 0.2) for _ in range(2)], (2, 3, 8)),
    "nested": lambda: ([Keeping([mlp(), mlp()]) for _ in range(2)], (4, 6)),
    "one for several": lambda: ([mlp()] * 3, (4, 6)),
    "linear without bias": lambda: ([nn.Linear(6, 6, bias=False) for _ in range(2)], (4, 6)),
}
CHOICES = {
    "every": EVERY,
    "none": NONE,
    "first": frozenset([0]),
    "odd": ODD,
}


RESIDUALS = {
    "no residuals": {},
    "outputs themselves": {"saved": EVERY},
    "some residuals": {"saved": EVERY, "held": ODD},
    "all residuals": {"held": EVERY},
}


@pytest.mark.sampled(22)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("residuals", RESIDUALS)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_step_is_that_of_the_plain_run(name, choice, residuals, dtype):
    torch.manual_seed(3)
    blocks, size = BLOCKS[name]()
    model = Keeping(blocks, CHOICES[choice], **RESIDUALS[residuals]).to(dtype)
    x = torch.randn(size, dtype=dtype, requires_grad=True)
    for _ in range(2):  # the first time, the code is looked at
        plain = copy.deepcopy(model)
        for module in plain.modules():
            if isinstance(module, Keeping):
                module.keeps = None
        assert_same_step(run_step(model, x), run_step(plain, x))
        assert hooks_in_force() is None


def test_a_recurrent_layer():
    gru, x = nn.LSTM(4, 4).double(), leaf(3, 2, 4)

    def step(call):
        y, (h, c) = call(gru, x)
        return torch.autograd.grad((y.sin() + h.sum() + c.sum()).sum(), [x, *gru.parameters()])

    for a, b in zip(step(keeping), step(lambda fn, x: fn(x)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("keeps", "num_run"), [(EVERY, 0), (frozenset([2]), 1), (NONE, 2)])
def test_kept_operators_do_not_run_again(keeps, num_run):
    net, x = nn.Sequential(*mlp(), nn.Linear(6, 6)).double(), leaf(4, 6)
    y = keeping(net, x, keeps=keeps)
    with Operators() as ran:
        y.sum().backward()
    assert ran.of("addmm") in (num_run, num_run + 1)  # the last one is not needed


def test_what_the_region_computes_itself_is_no_product():
    """Residuals of this size are sketched, by products, between those of the layers."""
    layers = [each for _ in range(4) for each in (nn.Linear(128, 128), nn.Tanh())]
    net, x = nn.Sequential(*layers).double(), leaf(256, 128)
    for _ in range(2):  # the first time, the code is looked at
        y = keeping(net, x, keeps=frozenset([0, 1, 2]))
        with Operators() as ran:
            y.sum().backward()
        assert ran.of("addmm") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masks_are_kept_as_bits_and_not_drawn_again(dtype):
    x = torch.randn(33, 65, dtype=dtype, requires_grad=True)  # no multiple of eight

    def fn(x):
        kept = torch.nn.functional.dropout(x.sin(), 0.3)
        return kept * torch.rand_like(x)  # drawn again, after a mask that is not

    results = []
    for call in (keeping, lambda fn, x: fn(x)):
        torch.manual_seed(1)
        y = call(fn, x)
        with Operators() as ran:
            results.append((y, *torch.autograd.grad(y.square().sum(), x), torch.rand(2)))
        assert ran.of("bernoulli_") == 0
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    held = held_after(lambda: keeping(fn, x).sum())
    states = 2 * torch.get_rng_state().numel()
    assert held.num_bytes <= 33 * 65 // 8 + 1 + states + 64


def norm(x):
    """A convolution, a batch norm and a ReLU, of which backward needs seven values."""
    weight = torch.linspace(-1, 1, 16 * 16 * 9).view(16, 16, 3, 3)
    y = F.conv2d(x, weight, padding=1)
    return F.relu(F.batch_norm(y, None, None, training=True), inplace=True)


def test_the_second_run_ends_before_what_only_held_residuals_need():
    x = leaf(4, 16, 16, 16).detach().float().requires_grad_()
    for held, num_runs in ((NONE, 1), (EVERY - {0, 1}, 0)):  # all but the inputs
        for _ in range(2):  # the first time, the code is looked at
            y = keeping(norm, x, saved=EVERY, held=held)
            with Operators() as ran:
                (got,) = torch.autograd.grad(y.sin().sum(), x)
        assert ran.of("native_batch_norm") == ran.of("relu_") == num_runs
        (want,) = torch.autograd.grad(norm(x).sin().sum(), x)
        assert torch.equal(got, want)


def test_a_draw_that_only_a_held_mask_needs_is_not_made_again():
    """The last dropout of a block, as CUDA's kernel does it."""
    layer, x = nn.Linear(256, 256).double(), leaf(64, 256)

    def fn(x):
        y = torch.native_dropout(layer(x.sin()), 0.3, True)[0]
        return x + torch.native_dropout(layer(y.sin()), 0.3, True)[0]

    for _ in range(2):  # the first time, the code is looked at
        results = []
        for call in (lambda fn, x: keeping(fn, x, keeps=NONE, held={5}), lambda fn, x: fn(x)):
            torch.manual_seed(1)
            y = call(fn, x)
            torch.rand(3)
            with Operators() as ran:
                results.append((*torch.autograd.grad(y.square().sum(), x), torch.rand(2)))
            assert ran.of("native_dropout") == (1 if len(results) == 1 else 0)
        assert all(map(torch.equal, *results))


def test_operators_within_kernels_are_no_products():
    """Such as the draw within a fused dropout; or the numbers of others would be off by one."""
    layer, x = nn.Linear(256, 256).double(), leaf(64, 256)

    def fn(x):
        return layer(torch.native_dropout(layer(x), 0.3, True)[0]).sin()

    for _ in range(2):  # the first time, the code is looked at
        y = keeping(fn, x, keeps={1})
        with Operators() as ran:
            y.sum().backward()
        assert ran.of("addmm") == 1


def test_an_output_that_is_a_residual_is_kept_itself():
    x = leaf(4, 16, 16, 16).detach().float().requires_grad_()
    with StorageTracker() as tracker:
        y = keeping(norm, x, saved=EVERY, held=EVERY - {0})
        held = tracker.current_bytes
        del y
    with StorageTracker() as tracker:
        y = norm(x)
        assert held <= tracker.current_bytes
        del y


def test_a_held_residual_that_is_changed_is_an_error():
    x = leaf(4, 16, 16, 16).detach().float().requires_grad_()
    y = keeping(norm, x, saved=EVERY, held=EVERY)
    y.mul_(2.0)
    with pytest.raises(ChangedError, match="changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("num_values", [0, 1, 7, 8, 9, 1000])
def test_packed_masks(num_values):
    tensor = (torch.rand(num_values) < 0.5).float()
    mask = PackedMask(tensor)
    assert torch.equal(mask.unpacked(), tensor.bool())
    assert mask.packed.numel() == -(-num_values // 8)


def test_what_is_kept_is_inputs_and_outputs():
    net, x = mlp(64).double(), leaf(32, 64) * 1.0
    held = held_after(lambda: keeping(lambda x: net(x).sum(), x, keeps=frozenset([0])))
    num_bytes = 32 * 64 * 8
    state = torch.get_rng_state().numel()
    assert num_bytes <= held.num_bytes <= num_bytes + 2 * state + 8  # what was kept, and the sum


def test_kept_bytes_fall_as_backward_proceeds():
    layers = nn.ModuleList(nn.Linear(64, 64).double() for _ in range(4))
    alive = []

    def fn(x):
        for layer in layers:
            x = layer(x).tanh()
            x.register_hook(lambda grad: alive.append(tracker.current_bytes))
        return x

    with StorageTracker() as tracker:
        x = leaf(256, 64)
        loss = keeping(fn, x).sum()
        held = tracker.current_bytes
        torch.autograd.grad(loss, x)
        del loss, x
    unit = 256 * 64 * 8
    assert held < 5.5 * unit  # the input and four outputs
    # Outputs that were handed out, and that no operator saved, are gone before the first gradient.
    assert max(alive) < 5.5 * unit
    assert alive[-1] < 3.5 * unit
    assert tracker.current_bytes == 0


def test_what_no_residual_needs_goes_with_the_second_run():
    w, v = leaf(64, 64), leaf(64, 64)
    with StorageTracker() as tracker:
        x = leaf(64, 64)
        loss = keeping(lambda x: (x.sin() @ w).cos() @ v, x).sum()
        assert tracker.current_bytes // (64 * 64 * 8) == 3
        torch.autograd.grad(loss, x, retain_graph=True)
        assert tracker.current_bytes // (64 * 64 * 8) == 1


def test_what_is_changed_in_place_in_the_call_is_kept_as_it_was():
    w, x = leaf(64, 64), leaf(64, 64) * 1.0
    held = held_after(lambda: keeping(lambda x: (x @ w).relu_().sin().sum(), x))
    assert held.num_bytes == 64 * 64 * 8 + 8  # the product, and the sum


_library = torch.library.Library("recoup_tests", "FRAGMENT")
_library.define("first_attention(Tensor(a) x) -> Tensor(a)")
_library.impl("first_attention", lambda x: x[:1], "CPU")
_library.define("cached_attention(Tensor x, Tensor(a!) cache) -> Tensor")
_library.impl("cached_attention", lambda x, cache: cache.add_(x).clone(), "CPU")


def test_what_shares_memory_with_what_was_given_is_not_kept():
    def fn(x):
        with torch.no_grad():
            first = torch.ops.recoup_tests.first_attention(x * 2)
        return (x.sin() * first).sum()

    x = leaf(64, 64) * 1.0
    held = held_after(lambda: keeping(fn, x))
    assert held.num_bytes < 64 * 64 * 8


def test_nothing_is_left_without_the_collector():
    net = mlp(64).double()
    gc.collect()
    gc.disable()
    try:
        with StorageTracker() as tracker:
            y = keeping(net, leaf(8, 64))
            del y
            y = keeping(net, leaf(8, 64))
            torch.autograd.grad(y.sum(), list(net.parameters()))
            del y
        assert tracker.current_bytes == 0
    finally:
        gc.enable()


# -- draws -----------------------------------------------------------------------------------------


@torch.library.custom_op("recoup_tests::drawing_attention", mutates_args=())
def drawing_attention(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


COSTLY |= {
    torch.ops.recoup_tests.drawing_attention.default,
    torch.ops.recoup_tests.first_attention.default,
    torch.ops.recoup_tests.cached_attention.default,
}
drawing_attention.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward((output / inputs[0]).detach()),
)


@pytest.mark.parametrize("keeps", [EVERY, NONE, frozenset([0]), frozenset([1])])
def test_a_kept_draw_before_one_that_is_made_again(keeps):
    assert is_costly(torch.ops.recoup_tests.drawing_attention.default)

    def fn(x):
        x = drawing_attention(x.sin())
        x = (x * torch.rand_like(x)).sin()
        return drawing_attention(x.cos()) * torch.rand_like(x)

    x = leaf(5)

    def step(call):
        torch.manual_seed(2)
        y = call(fn, x)
        after = torch.get_rng_state()
        grad = torch.autograd.grad(y.sin().sum(), x)[0]
        assert torch.equal(torch.get_rng_state(), after)
        return y, grad, after

    got, want = step(lambda *args: keeping(*args, keeps=keeps)), step(lambda fn, x: fn(x))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_the_probe_of_selective_checkpointing():
    """The first draw kept, the second one made again: torch has another mask then."""

    def fn(x):
        return ((x * torch.rand_like(x)).sin() * torch.rand_like(x)).sin()

    x = leaf(5)

    def step(call):
        torch.manual_seed(2)
        return torch.autograd.grad(call(fn, x).sum(), x)[0]

    products = Products(frozenset([aten.rand_like.default]), frozenset([0]))
    kept = step(lambda fn, x: run_again(Call("the call", fn, (x,), {}, products=products)))
    assert torch.equal(kept, step(lambda fn, x: fn(x)))


# -- changes in place ------------------------------------------------------------------------------


def in_place_in_the_call(x, w):
    return (x @ w).relu_().sin()


def in_place_through_a_view(x, w):
    y = x @ w
    y[0].mul_(2.0)
    return y.sin()


@pytest.mark.parametrize("saved", [NONE, EVERY])
@pytest.mark.parametrize("fn", [in_place_in_the_call, in_place_through_a_view])
@pytest.mark.parametrize("around", [nullcontext, torch.autograd.graph.save_on_cpu])
def test_an_output_changed_in_place_in_the_call(fn, around, saved):
    x, w = leaf(4, 4), leaf(4, 4)

    def step(call, **kept):
        with around():
            y = call(fn, x, w, **kept)
        return torch.autograd.grad(y.sum(), (x, w))

    for a, b in zip(step(keeping, saved=saved), step(lambda fn, *args: fn(*args)), strict=True):
        assert torch.equal(a, b)


def test_an_output_that_is_changed_before_a_gradient_within_the_call():
    x, w = leaf(4, 4), leaf(4, 4)

    def fn(x):
        y = (x @ w).mul_(2.0)
        (slope,) = torch.autograd.grad(y.exp().sum(), x, create_graph=True)
        return (y * slope).sin()

    for _ in range(2):  # the first time, the code is looked at
        got = torch.autograd.grad(keeping(fn, x, saved=EVERY).sum(), x)[0]
        assert torch.equal(got, torch.autograd.grad(fn(x).sum(), x)[0])


def _batched(x):
    return torch.matmul(x, x.transpose(-1, -2))  # ends in `_unsafe_view`


def _chunked(x):
    first, _ = torch.unsafe_chunk(x @ x.transpose(-1, -2), 2, 1)
    return first


def _split(x):
    first, _ = torch.unsafe_split(x @ x.transpose(-1, -2), 2, 1)
    return first


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
@pytest.mark.parametrize("make", [_batched, _chunked, _split])
@pytest.mark.parametrize("call", [keeping, recoup.checkpoint])
@pytest.mark.parametrize("around", [nullcontext, torch.autograd.graph.save_on_cpu])
def test_f1_an_output_changed_through_an_alias_with_a_version_of_its_own(
    make, write, when, call, around
):
    x = leaf(3, 4, 4)

    def fn(x):
        y = make(x.sin())
        if when == "in the call":
            WRITES[write](y)
        return y, y.exp()  # saves its result alone

    def step(call):
        with around():
            y, z = call(fn, x)
        if when == "after it":
            WRITES[write](y)
        return torch.autograd.grad(y.sum() + z.sin().sum(), x)[0]

    want = step(lambda fn, x: fn(x))
    assert torch.equal(step(call), want)
    if call is keeping:  # if the output were kept itself, which it is not where it is no residual
        with suppress(ChangedError, ReplayError):
            assert torch.equal(step(lambda fn, x: keeping(fn, x, saved=EVERY)), want)


def test_f1_an_operator_that_writes_to_what_it_is_given_runs_again():
    x = leaf(4, 4)

    def fn(x):
        cache = torch.zeros(4, 4).double()
        with torch.no_grad():
            torch.ops.recoup_tests.cached_attention(x, cache)
        return (x * cache).sin()

    got = torch.autograd.grad(keeping(fn, x).sum(), x)[0]
    assert torch.equal(got, torch.autograd.grad(fn(x).sum(), x)[0])


@pytest.mark.parametrize("with_hooks", [False, True])
def test_an_output_changed_in_place_after_the_call(with_hooks):
    x, w, v = leaf(4, 4), leaf(4, 4), leaf(4, 4)
    pair = (lambda t: t, lambda t: t)
    around = torch.autograd.graph.saved_tensors_hooks(*pair) if with_hooks else nullcontext()

    def fn(x):
        y = x.sin() @ w
        return y, (y * 2) @ v

    def step(call):
        with around:
            y, z = call(fn, x)
            y.relu_()
        return torch.autograd.grad(y.sum() + z.sin().sum(), (x, w, v))

    for a, b in zip(step(keeping), step(lambda fn, x: fn(x)), strict=True):
        assert torch.equal(a, b)


def test_a_region_that_is_changed_from_outside_is_an_error():
    x, w = leaf(4, 4), leaf(4, 4)
    y = keeping(lambda x: (x.sin() @ w).sin(), x)
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(ChangedError):
        y.sum().backward()


# -- autocast --------------------------------------------------------------------------------------


def test_weights_shared_across_regions_under_autocast():
    linear = nn.Linear(6, 6)
    x = torch.randn(4, 6, requires_grad=True)

    def step(call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = linear(x)
            for _ in range(3):
                y = call(lambda y: linear(linear(y).tanh()).sigmoid(), y)
        grads = torch.autograd.grad(y.float().sin().sum(), (x, *linear.parameters()))
        return y, *grads

    for a, b in zip(step(keeping), step(lambda fn, y: fn(y)), strict=True):
        assert torch.equal(a, b)


def test_kept_operators_do_not_run_again_under_autocast():
    """A cast that the first run found made shifts nothing."""
    linear = nn.Linear(6, 6)
    x = torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = keeping(lambda y: linear(linear(y).tanh()).sigmoid(), linear(x))
    with Operators() as ran:
        y.float().sum().backward()
    assert ran.of("addmm") == 0


# -- graphs ----------------------------------------------------------------------------------------


def test_twice_over_one_graph():
    net, x = mlp().double(), leaf(4, 6)
    torch.manual_seed(1)
    loss = keeping(net, x).sin().sum()
    torch.manual_seed(1)
    want = torch.autograd.grad(net(x).sin().sum(), x)[0]
    for retain in (True, True, False):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=retain)[0], want)


def test_parts_of_one_graph():
    a, b, x = leaf(4, 4), leaf(4, 4), leaf(4, 4)

    def fn(x):
        y = x @ a
        return y.sin(), (y.cos() @ b).exp()

    def step(call):
        y, z = call(fn, x)
        first = torch.autograd.grad(y.sum(), (x, a), retain_graph=True)
        return *first, *torch.autograd.grad(z.sum(), (x, a, b))

    for got, want in zip(step(keeping), step(lambda fn, x: fn(x)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("keeps", [EVERY, frozenset([1])])
def test_double_backward(keeps):
    net, x = mlp().double().eval(), leaf(4, 6)

    def twice(call):
        first = torch.autograd.grad(call(net, x).sin().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), [x, *net.parameters()])

    got = twice(lambda *args: keeping(*args, keeps=keeps))
    for a, b in zip(got, twice(lambda fn, x: fn(x)), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


AROUND = {
    "recoup": lambda fn, x: recoup.checkpoint(fn, x),
    "torch": lambda fn, x: torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False),
    "itself": lambda fn, x: keeping(fn, x),
    "half of itself": lambda fn, x: keeping(fn, x, keeps=frozenset([0, 3])),
}


@pytest.mark.parametrize("outer", AROUND)
@pytest.mark.parametrize("inner", AROUND)
def test_one_in_another(outer, inner):
    net = nn.Sequential(*(mlp() for _ in range(3))).double()
    x = leaf(4, 6)

    def fn(x):
        return net[2](AROUND[inner](net[1], net[0](x).sin()))

    def step(call):
        torch.manual_seed(4)
        y = call(fn, x)
        return torch.autograd.grad(y.sin().sum(), [x, *net.parameters()])

    got, want = step(AROUND[outer]), step(lambda _, x: net[2](net[1](net[0](x).sin())))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_functional_call():
    net, x = mlp().double(), leaf(4, 6)
    weights = {name: leaf(*value.shape) for name, value in net.named_parameters()}

    class Whole(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.net, self.call = net, call

        def forward(self, x):
            y = self.call(self.net, x).sin().sum()
            return torch.autograd.grad(y, [x, *weights.values()])

    def step(call):
        torch.manual_seed(1)
        named = {f"net.{name}": value for name, value in weights.items()}
        return torch.func.functional_call(Whole(call), named, (x,))

    for a, b in zip(step(keeping), step(lambda fn, x: fn(x)), strict=True):
        assert torch.equal(a, b)


def test_transforms_are_refused_and_no_grad_is_a_plain_call():
    w = torch.randn(4, 4)
    with pytest.raises(RecoupError, match=r"torch.func transforms"):
        torch.func.grad(lambda x: keeping(lambda x: (x @ w).sin().sum(), x))(torch.ones(4, 4))
    seen = []
    with torch.no_grad():
        keeping(lambda x: seen.append(hooks_in_force()), leaf(3))
    assert seen == [None]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of torch itself
def test_forward_mode_derivatives_are_an_error_as_for_a_checkpoint():
    w, x, v = leaf(4, 4), leaf(4, 4), torch.randn(4, 4, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, v)
        for call in (keeping, recoup.checkpoint):
            y = call(lambda x: ((x @ w).sin() @ w).sin(), dual)
            with pytest.raises(RuntimeError):
                y.sum().backward()


# -- what differs in the second run ----------------------------------------------------------------


@pytest.mark.parametrize("num_right", [1, 2, 3])
def test_another_operator_in_its_place(num_right):
    runs, w = [], leaf(1, 4, 4)

    def fn(x):
        runs.append(1)
        is_right = len(runs) <= num_right
        y = torch.bmm(x, w) if is_right else torch.baddbmm(x.detach(), x, w)
        return y.sin().cos()

    y = keeping(fn, leaf(1, 4, 4)).sum()
    for _ in range(num_right - 1):
        y.backward(retain_graph=True)
    with pytest.raises(ReplayError, match=r"with other values than the first run"):
        y.backward()


def test_another_shape_in_its_place():
    runs, w = [], leaf(4, 4)

    def fn(x):
        runs.append(1)
        with torch.no_grad():
            shift = (x[: 5 - len(runs)] @ w).sum()
        return (x + shift).sin().sum()

    y = keeping(fn, leaf(4, 4))
    with pytest.raises(ReplayError, match=r"with other values than the first run"):
        y.backward()


def test_an_operator_that_only_the_first_run_needed():
    """What a cache keeps shifts all numbers: nothing is handed out in the wrong place."""
    cache, w, v = {}, leaf(4, 4), leaf(4, 4)

    def fn(x):
        if "table" not in cache:
            cache["table"] = torch.eye(4).double() @ torch.ones(4, 4).double()
        y = (x.sin() @ w) * cache["table"]
        return (y.cos() @ v).sin()

    x = leaf(4, 4)
    got = torch.autograd.grad(keeping(fn, x).sum(), (x, w, v))
    for a, b in zip(got, torch.autograd.grad(fn(x).sum(), (x, w, v)), strict=True):
        assert torch.equal(a, b)


def test_operators_that_write_where_they_are_told():
    w, x = leaf(4, 4).detach(), leaf(4, 4)

    def fn(x):
        out = torch.zeros(4, 4).double()
        with torch.no_grad():
            torch.mm(x, w, out=out)
        return (x * out).sin()

    got = torch.autograd.grad(keeping(fn, x).sum(), x)[0]
    assert torch.equal(got, torch.autograd.grad(fn(x).sum(), x)[0])


# -- others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["same", "transposed"])
def test_hooks_of_others_see_outputs(layout):
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone() if layout == "same" else tensor.t().contiguous()

    def unpack(tensor):
        return tensor.clone() if layout == "same" else tensor.t()

    w, v, x = leaf(5, 6), leaf(6, 5), leaf(4, 5)

    def step(call):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = call(lambda x: ((x.sin() @ w).view(4, 6).cos() @ v).view(-1).tanh(), x)
        return torch.autograd.grad(y.sum(), (x, w, v))

    got = step(keeping)
    assert packed[:3] == [(4, 5), (4, 6), (4, 5)]
    for a, b in zip(got, step(lambda fn, x: fn(x)), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)  # kernels depend on the layout of inputs


def test_a_census_shows_them_as_kept():
    w, x = leaf(64, 32), leaf(16, 64)
    found = recoup.residuals(lambda: keeping(lambda x: (x.sin() @ w).cos().sum(), x))
    kept = [each for each in found if each.way == "keep" and "aten.mm" in each.value]
    assert [each.num_bytes for each in kept] == [16 * 32 * 8]


def test_modules_and_keyword_arguments():
    net, x = mlp().double(), leaf(4, 6)

    def step(call):
        torch.manual_seed(1)
        y = call(lambda *, parts: {"y": net(parts[0])}, parts=[x])["y"]
        return torch.autograd.grad(y.sum(), [x, *net.parameters()])

    for a, b in zip(step(keeping), step(lambda fn, **kwargs: fn(**kwargs)), strict=True):
        assert torch.equal(a, b)
    y = run_again(
        Call("the net", net.forward, (x,), {}, net, products=Products(frozenset(COSTLY), EVERY))
    )
    net.eval()
    with pytest.raises(ChangedError, match=r"was in training mode"):
        y.sum().backward()


def test_a_gradient_that_is_taken_within():
    w, x = leaf(4, 4), leaf(4, 4)

    def fn(x):
        y = (x @ w).tanh()
        (found,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return found.sin()

    for _ in range(2):
        got = torch.autograd.grad(keeping(fn, x).sum(), (x, w))
        for a, b in zip(got, torch.autograd.grad(fn(x).sum(), (x, w)), strict=True):
            assert torch.equal(a, b)
