"""Calls in tiles check themselves: a function that mixes rows is an error at its first call."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import ChangedError
from tests.tile_models import D, both, rows

refused = pytest.raises(ValueError, match=r"`fn` .* rows independently.*Do not tile it")


def minus_mean(x):
    return x - x.mean(1, keepdim=True)


MIXING = {
    "softmax": lambda x: x.softmax(1),
    "mean": minus_mean,
    "one direction": lambda x: x.cumsum(1),
    "the other": lambda x: x.flip(1).cumsum(1).flip(1),
    "neighbours": lambda x: x + 1e-3 * x.roll(1, 1),
    "number": lambda x: x / x.shape[1],
    "no graph": lambda x: x + (x.detach() - x.detach().mean()),
    "statistics": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).mT,
    "draws": lambda x: minus_mean(F.dropout(x, 0.5)),
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
    for is_enabled in (True, True, False):  # it is not forgotten
        with torch.set_grad_enabled(is_enabled), refused:
            recoup.tiled(fn)(x)


def head_and_loss(before=lambda x: x, reduction="mean", **more):
    torch.manual_seed(1)
    head = nn.Linear(D, 11).double()

    def loss(hidden, labels):
        logits = head(before(hidden)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction=reduction, **more)

    return loss


LOSSES = {
    "mean": head_and_loss(minus_mean),
    "a sum": head_and_loss(reduction="sum"),
    "weights": head_and_loss(weight=torch.arange(11).double()),
    "labels": lambda h, y: head_and_loss()(h, y.sort(1)[0]),
    "sum": head_and_loss(MIXING["one direction"], "sum"),
}


@both
@pytest.mark.parametrize("how", LOSSES)
def test_a_loss_that_mixes_rows(how, call):
    for num_ignored in (0, 50):  # a prompt of more rows than are looked at
        hidden, labels = rows(3, 64, D), torch.randint(11, (3, 64))
        labels[:, :num_ignored] = -100
        for is_enabled in (True, False):
            with torch.set_grad_enabled(is_enabled), refused:
                call(LOSSES[how], reduction="sum" if how == "sum" else "mean")(hidden, labels)


@both
def test_buffers_that_tiles_would_count(call):
    module, x = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double(), rows(64, 6)
    before = [buffer.clone() for buffer in module.buffers()]
    tiled = call(lambda x: module(x).square().sum(), 0, reduction="sum")
    for _ in "ab":
        with pytest.raises(ValueError, match=r"changes its buffer `1\..*Leave that out"):
            tiled(x)
        assert all(map(torch.equal, module.buffers(), before))
    module.eval()
    tiled(x)


def test_tensors_that_a_function_captures_are_put_back():
    mean, var, count = torch.zeros(D), torch.ones(D), torch.zeros(())
    with refused:
        recoup.tiled(lambda x: F.batch_norm(x, mean, var, training=True), 0)(rows(64, D).float())
    assert not mean.any()
    with torch.no_grad():
        recoup.tiled(lambda x: (count.add_(1), x.sin())[1], 0, tiles=4)(rows(64, D))
    assert count == 4


def test_a_function_is_checked_once_wherever_it_is_made():
    sizes, x = [], rows(2, 64, D)

    def call(op):
        return recoup.tiled(lambda x: op((sizes.append(x.shape[1]), x)[1]), tiles=2)(x)

    with torch.no_grad():
        call(torch.sin)
        assert sum(sizes) <= 64 + 6 * 5  # a few rows, a few times
        sizes.clear()
        call(torch.sin)
        assert sizes == [32, 32]
    with refused:
        call(lambda x: x.softmax(1))  # the same code, another function
    with refused:
        recoup.tiled(torch.cumsum, split=[0])(x, 1)


def of_configuration(x, dim):
    config = {"dims": SimpleNamespace(of=[dim])}
    return recoup.tiled(lambda x: x.softmax(*config["dims"].of))(x)


SOFTMAX = nn.Softmax()
NUMBERED = [  # in a closure, a partial, an argument, an attribute or a structure
    lambda x, dim: recoup.tiled(lambda x: x.softmax(dim))(x),
    lambda x, dim: recoup.tiled(partial(F.softmax, dim=dim))(x),
    lambda x, dim: recoup.tiled(F.softmax)(x, dim),
    lambda x, dim: recoup.tiled(F.softmax)(x, dim=dim),
    lambda x, dim: setattr(SOFTMAX, "dim", dim) or recoup.tiled(SOFTMAX)(x),
    of_configuration,
]


@pytest.mark.parametrize("call", NUMBERED)
def test_other_numbers_are_another_function(call):
    x = rows(2, 64, D)
    call(x, 2)
    with refused:
        call(x, 1)


WEIGHTED = [  # a mean, and what it weights its rows by, with all alike
    (lambda x, m: (x.mean(-1) * m).sum() / m.sum(), torch.ones(2, 64)),
    (lambda x, m: x.mean(-1)[m].mean(), torch.ones(2, 64, dtype=torch.bool)),
    (head_and_loss(ignore_index=0), torch.ones(2, 64, dtype=torch.long)),
]


@pytest.mark.parametrize(("fn", "weights"), WEIGHTED)
def test_a_mean_is_checked_in_each_call(fn, weights):
    loss, x = recoup.tiled_loss(fn, dim=1, tiles=4), rows(2, 64, D)
    torch.testing.assert_close(loss(x, weights), fn(x, weights))
    weights = weights.clone()
    weights[1, 20:] = 0
    with refused:
        loss(x, weights)


PARTLY = {  # means over targets, beside others
    "a penalty": lambda h, y: (
        F.cross_entropy(h.flatten(0, 1), y.flatten()) + 0.1 * h.logsumexp(-1).square().mean()
    ),
    "all rows": lambda h, y: F.cross_entropy(h.mT, y, reduction="none").mean(),
}


@pytest.mark.parametrize("checks_all", [False, True])
@pytest.mark.parametrize("num_ignored", [20, 50])
@pytest.mark.parametrize("how", PARTLY)
def test_a_mean_of_which_a_part_counts_rows_without_a_target(how, num_ignored, checks_all):
    hidden, labels = rows(2, 64, 11), torch.randint(11, (2, 64))
    labels[0, :20] = labels[1, :num_ignored] = -100
    tiled = recoup.tiled_loss(PARTLY[how])
    with refused:
        tiled.check(hidden, labels) if checks_all else tiled(hidden, labels)


@both
def test_a_function_that_writes_to_its_argument(call):
    x = rows(2, 64, D, requires_grad=True)
    tiled = call(lambda x: x.sin_().sum(), reduction="sum")
    with pytest.raises(ChangedError, match="writes to an argument that is split"):
        tiled(x * 1)
    with torch.no_grad():
        assert tiled(x * 1) == x.sin().sum()


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Sequential(nn.Linear(D, 4 * D), nn.Dropout(0.5), nn.Linear(4 * D, D))
        recoup.weight_noise(self.double().inner[0], "weight", 0.1)

    def forward(self, x, labels=None):
        y = self.inner(x) + torch.rand_like(x)
        if labels is None:
            return y
        return F.cross_entropy(y.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("around", [nullcontext, recoup.recomputing])
@pytest.mark.parametrize("region", [lambda fn, *args: fn(*args), recoup.checkpoint])
@both
def test_the_check_leaves_no_trace(call, region, around):
    x, labels = rows(3, 64, D), torch.randint(D, (3, 64))
    module, found = Noisy(), []
    args = (x,) if call is recoup.tiled else (x, labels)

    def body(*args):
        return call(module, tiles=4)(*args) * args[0].topk(3)[0].sum()

    before = torch.get_rng_state()
    call(module, tiles=4, reduction="mean").check(x, labels)
    recoup.tiled(module).check(x)
    recoup.tiled(torch.argmax, split=[0]).check(x, dim=-1)  # nothing to differentiate
    assert torch.equal(torch.get_rng_state(), before)
    assert all(each.grad is None for each in (x, *module.parameters()))
    for _ in "ab":
        torch.manual_seed(5)
        with around(), recoup.weights.same_draw(seed=3):
            y = region(body, *args)
            grads = torch.autograd.grad(y.sum(), [x, *module.parameters()])
        found.append([y.detach(), *grads, torch.get_rng_state()])
    assert all(map(torch.equal, *found))


def test_a_check_that_shows_nothing_is_made_again():
    x = rows(2, 64, D)
    for fn in (torch.sqrt, torch.relu):  # nan, and zero
        loss = recoup.tiled_loss(lambda x, fn=fn: fn(x.cumsum(1)).sum(), reduction="sum")
        assert not loss(-x.abs()) > 0
        with refused:
            loss(x.abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_mixing(dtype):
    """Products of few rows round otherwise, and so does what depends on how many go where."""
    experts = nn.ModuleList(nn.Linear(128, 128) for _ in range(4)).to(dtype)

    def routed(x):
        for _ in range(8):
            choice, y = experts[0](x)[..., :4].argmax(-1), torch.zeros_like(x)
            for place, expert in enumerate(experts):
                y[choice == place] = expert(x[choice == place]).to(x.dtype)
            x = F.layer_norm(x + y, (128,))
        return x

    def loss(x, labels):
        return F.cross_entropy(routed(x).flatten(0, 1).float(), labels.flatten())

    x, labels = rows(2, 32, 128, dtype=dtype), torch.randint(128, (2, 32))
    recoup.tiled(lambda x: x.sin() * 1e38)(x)
    recoup.tiled_loss(loss)(x, labels)
    with torch.autocast("cpu", torch.bfloat16):
        recoup.tiled(lambda x: x + routed(x).float())(x)


def odd(x):
    y = x * 1
    if y.requires_grad:
        y.register_hook(minus_mean)
    return y


GATE = nn.Parameter(torch.zeros(D, dtype=torch.float64))


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda x: x if x.shape[1] < 13 else x.flip(1), "output 0"),
        (odd, "the gradient of argument 0"),
        (lambda x, gate=[GATE]: x + gate[0] * x.mean(1, keepdim=True), "of a parameter of shape"),
    ],
)
def test_check_sees_more_than_a_first_call(fn, says):
    tiled, x = recoup.tiled(fn), rows(3, 13, D)
    tiled(x)
    with pytest.raises(ValueError, match=f"rows independently.*{says}"):
        tiled.check(x)
