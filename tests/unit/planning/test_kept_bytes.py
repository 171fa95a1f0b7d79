"""Regions that keep what chosen operators made: what runs again, what is held, what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError, RecoupError, ReplayError
from tests.alive import held_after, no_collector
from tests.oracle import Operators, loss_of_all
from tests.unit.planning.test_kept_operators import EVERY, NONE, keeping, own
from tests.zoo import leaf

STATE = torch.get_rng_state().numel()

# -- what runs again, and what is held -------------------------------------------------------------


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


UNIT = 64 * 64 * 8


def of_an_alias(x):
    with torch.no_grad():
        first = own.aliasing_attention(x * 2)
    return x.sin() * first


def relu_of_a_product(x):
    return (x @ torch.eye(64).double()).relu_().sin()


# The function, the size of its input, what is kept, and the bytes of it that are held.
HELD = {
    "outputs": (layers(64, 2), {"keeps": {0}}, UNIT),
    "as it was before a change": (relu_of_a_product, {}, UNIT),
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
