"""Calls in tiles check themselves: a function that mixes rows is an error at its first call."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import recoup

D = 6
CALLS = {"tiled": recoup.tiled, "tiled_loss": recoup.tiled_loss}


def rows(*shape, dtype=torch.float64):
    torch.manual_seed(2)
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


MIXING = {
    "softmax": lambda x: x.softmax(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "one direction": lambda x: x.cumsum(1),
    "the other": lambda x: x.flip(1).cumsum(1).flip(1),
    "neighbours": lambda x: x + 1e-3 * x.roll(1, 1),
    "places": lambda x: x + torch.arange(x.shape[1])[:, None],
    "number": lambda x: x / x.shape[1],
    "no graph": lambda x: x + (x.detach() - x.detach().mean()),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "statistics": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).mT,
    "draws": lambda x: F.dropout(x, 0.5) - x.mean(1, keepdim=True),
    "integers": lambda x: (x > x.mean(1, keepdim=True)).long(),
    "infinite": lambda x: x.masked_fill(x < x.mean(1, keepdim=True), -torch.inf),
    "nested": lambda x: (x.sin(), {"a": x.softmax(1)}),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("how", MIXING)
def test_a_function_that_mixes_rows(how, dtype):
    x, fn = rows(3, 64, D, dtype=dtype), MIXING[how]
    if (how, dtype) == ("neighbours", torch.bfloat16):
        x = x * 0 + torch.arange(64.0)[:, None] ** 4  # or they are less than rounding
    for _ in "ab":  # and it is not forgotten
        with pytest.raises(ValueError, match=r"`fn` .* rows independently.*Do not tile it"):
            recoup.tiled(fn)(x)
    with torch.no_grad(), pytest.raises(ValueError, match="rows independently"):
        recoup.tiled(fn, tiles=2)(x)


def head_and_loss(before=lambda x: x, reduction="mean", **more):
    torch.manual_seed(1)
    head = nn.Linear(D, 11).double()

    def loss(hidden, labels):
        logits = head(before(hidden)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction=reduction, **more)

    return loss


LOSSES = {
    "mean": head_and_loss(MIXING["mean"]),
    "draws": head_and_loss(MIXING["draws"]),
    "a sum": head_and_loss(reduction="sum"),
    "weights": head_and_loss(weight=torch.arange(11).double()),
    "shifted": lambda h, y: head_and_loss()(h[:, :-1], y[:, 1:]),
    "labels": lambda h, y: head_and_loss()(h, y.sort(1)[0]),
    "contrastive": lambda h, y: (h.flatten(1) @ h.flatten(1).T).logsumexp(1).mean(),
}


@pytest.mark.parametrize("ignored", [0, 50])  # a prompt of more rows than are looked at
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", [*LOSSES, "sum"])
def test_a_loss_that_mixes_rows(how, call, ignored):
    reduction = "sum" if how == "sum" else "mean"
    fn = LOSSES.get(how) or head_and_loss(MIXING["one direction"], "sum")
    hidden, labels = rows(3, 64, D), torch.randint(11, (3, 64))
    labels[:, :ignored] = -100
    for is_enabled in (True, False):
        with torch.set_grad_enabled(is_enabled), pytest.raises(ValueError, match="rows indep"):
            CALLS[call](fn, reduction=reduction)(hidden, labels)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "norm", [lambda: nn.BatchNorm1d(6), lambda: nn.utils.spectral_norm(nn.Linear(6, 6))]
)
def test_buffers_that_tiles_would_count(norm, call):
    module = nn.Sequential(nn.Linear(6, 6), norm()).double()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    x = rows(64, 6)

    def fn(x):
        return module(x).square().sum()

    tiled = (
        recoup.tiled(module, 0) if call == "tiled" else recoup.tiled_loss(fn, 0, reduction="sum")
    )
    for _ in "ab":
        with pytest.raises(ValueError, match=r"changes its buffer `1\..*Leave that out"):
            tiled(x)
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name]), name
    module.eval()
    torch.testing.assert_close(tiled(x), module(x) if call == "tiled" else fn(x))
    module.train()
    with pytest.raises(ValueError, match="changes its buffer"):
        tiled(x)


def test_tensors_that_a_function_captures_are_put_back():
    """Also by value: the kernel of a batch norm leaves versions alone."""
    mean, var, count = torch.zeros(D), torch.ones(D), torch.zeros(())
    for fn in (
        lambda x: F.batch_norm(x, mean, var, training=True),
        lambda x, held=(mean, var): F.batch_norm(x, *held, training=True),
    ):
        with pytest.raises(ValueError, match="rows independently"):
            recoup.tiled(fn, 0)(rows(64, D, dtype=torch.float32))
        assert not mean.any()
        assert torch.equal(var, torch.ones(D))
    with torch.no_grad():
        recoup.tiled(lambda x: (count.add_(1), x.sin())[1], 0, tiles=4)(rows(64, D))
    assert count == 4


def test_a_function_is_checked_once_wherever_it_is_made():
    sizes, x = [], rows(2, 64, D)

    def call(op):
        def fn(x):
            sizes.append(x.shape[1])
            return op(x)

        return recoup.tiled(fn, tiles=2)(x)

    with torch.no_grad():
        call(torch.sin)
        assert sum(sizes) <= 64 + 6 * 5  # a few rows, a few times
        sizes.clear()
        call(torch.sin)
        assert sizes == [32, 32]
    with pytest.raises(ValueError, match="rows independently"):  # the same code, another function
        call(lambda x: x.softmax(1))
    recoup.tiled(torch.Tensor.exp)(x)
    with pytest.raises(ValueError, match="rows independently"):
        recoup.tiled(torch.cumsum, split=[0])(x, 1)


def test_another_mode_is_another_function():
    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(1, keepdim=True) if self.training else x

    module, x = nn.Sequential(Centred()), rows(2, 64, D)
    tiled = recoup.tiled(lambda x: module(x))
    module.eval()
    assert torch.equal(tiled(x), x)
    module[0].train()
    with pytest.raises(ValueError, match="rows independently"):
        tiled(x)


class Noisy(nn.Module):
    """Rows are independent, and whatever can draw does."""

    def __init__(self, has_noise):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Sequential(nn.Linear(D, 4 * D), nn.Dropout(0.5), nn.Linear(4 * D, D))
        self.double()
        if has_noise:
            recoup.weight_noise(self.inner[0], "weight", 0.1)

    def forward(self, x, labels=None):
        y = self.inner(x) + torch.rand_like(x)
        if labels is None:
            return y
        return F.cross_entropy(y.flatten(0, 1), labels.flatten())


def steps_within(around, call):
    """Two steps of a new module, each with the draws of seed 5, and the random state after it."""
    x, labels = rows(3, 64, D), torch.randint(D, (3, 64))
    module = Noisy(has_noise=around in ("nothing", "noise"))
    args = (x,) if call == "tiled" else (x, labels)
    contexts = {
        "noise": lambda: recoup.weights.same_draw(seed=3),
        "recomputing": recoup.recomputing,
    }
    regions = {
        "checkpoint": recoup.checkpoint,
        "torch": lambda fn, *args: torch.utils.checkpoint.checkpoint(
            fn, *args, use_reentrant=False
        ),
    }

    def body(*args):
        return CALLS[call](module, tiles=4)(*args) * args[0].topk(3)[0].sum()

    for _ in "ab":
        torch.manual_seed(5)
        with contexts.get(around, nullcontext)():
            y = regions.get(around, lambda fn, *args: fn(*args))(body, *args)
            grads = torch.autograd.grad(y.sum(), [x, *module.parameters()])
        yield [y.detach(), *grads, torch.get_rng_state()]


@pytest.mark.parametrize("around", ["nothing", "checkpoint", "torch", "noise", "recomputing"])
@pytest.mark.parametrize("call", CALLS)
def test_the_check_leaves_no_trace(call, around):
    """The first call has the numbers, draws and gradients of a second one."""
    first, second = steps_within(around, call)
    assert all(map(torch.equal, first, second))


class Seeing(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += [arg.shape[1] for arg in args if isinstance(arg, torch.Tensor) and arg.dim()]
        return func(*args, **(kwargs or {}))


def test_hooks_and_modes_of_others_see_nothing_of_the_check():
    seen, x = [], rows(2, 64, D)

    def pack(tensor):
        seen.append(tensor.shape[1])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Seeing(seen):
        recoup.tiled(lambda x: x.exp().exp(), tiles=2)(x)
    assert set(seen) <= {32, 64}


def test_a_check_that_shows_nothing_is_made_again():
    call, x = recoup.tiled(lambda x: x - x.mean(1, keepdim=True)), rows(2, 64, D)
    assert not call(torch.ones_like(x)).any()
    with pytest.raises(ValueError, match="rows independently"):
        call(x)
    for fn in (torch.sqrt, torch.relu):  # nan, and zero

        def mixes(x, fn=fn):
            return fn(x.cumsum(1)).sum()

        loss = recoup.tiled_loss(mixes, reduction="sum")
        assert not loss(-x.abs()) > 0
        with pytest.raises(ValueError, match="rows independently"):
            loss(x.abs())


def test_a_function_that_needs_many_rows():
    def fn(x):
        assert x.shape[1] >= 8
        return x.sin()

    def mixes(x):
        return fn(x).softmax(1)

    def one_size(x):
        return x.view(2, 8, D).sin()

    x = rows(2, 64, D)
    assert torch.equal(recoup.tiled(fn)(x), x.sin())
    with pytest.raises(ValueError, match="rows independently"):
        recoup.tiled(mixes)(x)
    with pytest.raises(RuntimeError, match="shape") as caught:
        recoup.tiled(one_size)(x)
    assert "any number of rows" in caught.value.__notes__[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_mixing(dtype):
    """Products of few rows round otherwise, and so does what depends on how many go where."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(256, 256) for _ in range(4)).to(dtype)
    head = nn.Linear(256, 999).to(dtype)

    def mlp(x):
        for _ in range(8):
            choice = experts[0](x)[..., :4].argmax(-1)
            y = torch.zeros_like(x)
            for place, expert in enumerate(experts):
                y[choice == place] = expert(x[choice == place]).to(x.dtype)
            x = F.layer_norm(x + y, (256,))
        return x

    def loss(x, labels):
        return F.cross_entropy(head(mlp(x)).flatten(0, 1).float(), labels.flatten())

    x, labels = rows(3, 64, 256, dtype=dtype), torch.randint(999, (3, 64))
    recoup.tiled(mlp)(x)
    recoup.tiled(lambda x: x.sin() * 1e38)(x)
    recoup.tiled(lambda x: 0 * x)(x)
    recoup.tiled_loss(loss)(x, labels)
    with torch.autocast("cpu", torch.bfloat16):
        recoup.tiled(lambda x: x + mlp(x).float())(x)
        recoup.tiled_loss(lambda x, y: loss(x, y))(x, labels)


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(1, keepdim=True)


def gated(x, gate):
    return x + gate * x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda x: x if x.shape[1] < 13 else x.flip(1), "output 0"),
        (Odd.apply, "the gradient of argument 0"),
        (lambda x: gated(x, Gate.weight), "the gradient of a parameter of shape"),
    ],
)
def test_check_sees_more_than_a_first_call(fn, says):
    tiled, x = recoup.tiled(fn), rows(3, 13, D)
    tiled(x)
    with pytest.raises(ValueError, match=f"rows independently.*{says}"):
        tiled.check(x)


class Gate:
    weight = nn.Parameter(torch.zeros(D, dtype=torch.float64))


@pytest.mark.parametrize("call", CALLS)
def test_check_passes_what_is_right_and_leaves_no_trace(call):
    module, x, labels = Noisy(True), rows(3, 13, D), torch.randint(D, (3, 13))
    before = torch.get_rng_state()
    for _ in "ab":
        CALLS[call](module, tiles=4, reduction="mean").check(x, labels)
        recoup.tiled(module).check(x)
        recoup.tiled(torch.argmax, split=[0]).check(x, dim=-1)  # nothing to differentiate
        module.eval()
    assert x.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), before)
