"""Impure code in a region: the gradients of the plain run, or an error before backward returns."""

from __future__ import annotations

import itertools
import random
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import RecoupError
from tests.impure import OTHERS, VALUES, draw_cases, same, verdict

STEADY = [
    case
    for case in draw_cases(4, seed=8)
    if OTHERS.get(case.source[0], (None, True))[1] is not None
]  # whose sources are the same in each read while nothing changes them
REGIONS = {
    "checkpoint": recoup.checkpoint,
    "recompute": lambda fn, x: recoup.recompute(fn)(x),
    "sqrt": lambda fn, x: recoup.Sequential(Fn(fn), *[nn.Identity()] * 3, memory="sqrt")(x),
}
in_regions = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)


class Fn(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


def input_of(num_values=64):
    return torch.linspace(0.5, 1.5, num_values, dtype=torch.float64).requires_grad_()


def assert_right_or_refused(region, fn, change=lambda: None, num_values=64):
    """`fn` is `exp(t * x)`, whatever `t` is: the output of the first run says which it was."""
    x = input_of(num_values)
    try:
        y = region(fn, x)
        change()
        y.sum().backward()
    except RuntimeError:
        return
    y = y.detach()
    torch.testing.assert_close(x.grad, y * y.log() / x.detach(), rtol=1e-9, atol=1e-9)


def assert_like_plain(step, call=recoup.checkpoint, errors=RuntimeError):
    """`step(call)` returns the gradients that it returns with a plain call, or it is an error."""
    want = step(lambda fn, x: fn(x))
    try:
        got = step(call)
    except errors:
        return
    assert same(got, want)


@pytest.mark.filterwarnings("ignore:The (plan for|first step of) a Sequential")
@pytest.mark.sampled(70)
@pytest.mark.parametrize("case", draw_cases(8), ids=str)
def test_right_or_refused(case):
    assert verdict(case)[0] != "silently wrong"


@pytest.mark.filterwarnings("ignore:The first step of a Sequential")  # its branch is not planned
@pytest.mark.sampled(30)
@pytest.mark.parametrize("case", STEADY, ids=str)
def test_right_where_nothing_changes(case):
    found, error = verdict(case, changes=False)
    assert found == "right", error


def test_the_cases_would_be_wrong_without_a_check():
    found = [verdict(case._replace(way="torch"))[0] for case in draw_cases(1)]
    assert found.count("silently wrong") > 0.75 * len(found)


# --- the groups of the audit, as users write them -------------------------------------------------

RANDOM, NUMPY, COUNT = random.Random(2), np.random.default_rng(2), itertools.count(1)


@in_regions
@pytest.mark.parametrize("kind", [*VALUES, "activation", "module class"])
def test_a2_a_loop_over_values(kind, region):
    first, second, use = VALUES.get(kind, (torch.tanh, F.gelu, None))

    def step(call):
        x = start = input_of()
        if kind == "activation":
            for act in (torch.tanh, F.gelu):
                x = call(lambda y: act(y) * y, x)  # noqa: B023 - the late binding is the case
        elif kind == "module class":
            for layer in (nn.Tanh, nn.SiLU):
                x = call(lambda y: layer()(y) * y, x)  # noqa: B023
        else:
            for value in (first, second):
                x = call(lambda y: (y * use(value)).sin() * y, x)  # noqa: B023
        return torch.autograd.grad(x.sum(), start)

    assert_like_plain(step, region)


@in_regions
def test_a6_a_thread_that_draws(region):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that it draws within a step also on a busy machine
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            torch.rand(500)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(20):
            assert_right_or_refused(region, lambda x: F.dropout(x, 0.5).exp(), num_values=20_000)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


@pytest.mark.parametrize("way", [*REGIONS, "offloading"])
def test_a7_noise_that_a_kernel_fills_after_it_was_saved(way, tmp_path):
    x, leaky, gradients = input_of(5000), nn.RReLU(), []
    for call in (lambda fn, x: fn(x), REGIONS.get(way)):
        torch.manual_seed(3)
        if call is not None:
            y = call(lambda x: leaky(-x), x)
        else:
            with recoup.offloading(to=tmp_path, min_bytes=1):
                y = leaky(-x)
        gradients.append(torch.autograd.grad(y.exp().sum(), x)[0])
    assert torch.equal(*gradients)


@in_regions
def test_a10_a_transform_in_a_region(region):
    def fn(x):
        value, pull = torch.func.vjp(torch.sin, x)
        return value * pull(torch.ones_like(x))[0]

    def step(call):
        x = input_of()
        return torch.autograd.grad(call(fn, x).sum(), x)

    assert_like_plain(step, region, RecoupError)  # no raw error of torch


@in_regions
@pytest.mark.parametrize("what", ["max_norm", "share_memory"])
def test_a10_no_needless_error(region, what):
    def step(call):
        torch.manual_seed(2)
        model = nn.Embedding(9, 9, max_norm=0.5) if what == "max_norm" else nn.Linear(9, 9)
        parameters = list(model.parameters())
        y = call(lambda t: model(t.argsort() if what == "max_norm" else t).sin(), torch.randn(9))
        if what == "share_memory":
            model.share_memory()
        return torch.autograd.grad(y.sum(), parameters)

    assert_like_plain(step, region, errors=())


class Scales(nn.Module):
    """Multiplies by the next number that it is given."""

    def __init__(self):
        super().__init__()
        self.numbers, self.used = itertools.count(1), []

    def forward(self, x):
        self.used.append(next(self.numbers))
        return x * self.used[-1]


@pytest.mark.parametrize("memory", ["inputs", "sqrt", "log", 1, 2, 3])
@pytest.mark.parametrize("place", [0, 3, 7, 12, 15])
def test_a_state_that_is_made_again_is_compared(memory, place):
    """The only residual of a linear layer is its input."""
    torch.manual_seed(0)
    blocks = [nn.Linear(5, 5) for _ in range(16)]
    blocks[place] = scales = Scales()
    model, x = recoup.Sequential(*blocks, memory=memory), torch.randn(3, 5)
    parameters = list(model.parameters())
    try:
        found = torch.autograd.grad(model(x).sum(), parameters)
    except RecoupError:
        return
    scales.numbers = iter(scales.used[:1])
    wanted = torch.autograd.grad(nn.Sequential(*blocks)(x).sum(), parameters)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("memory", ["inputs", "sqrt", "log", 1, 2])
def test_states_that_a_second_backward_makes_again_are_compared(memory):
    torch.manual_seed(0)
    blocks = [nn.Linear(5, 5) for _ in range(8)]
    model = recoup.Sequential(*blocks, memory=memory)
    loss = model(torch.randn(3, 5)).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    for block in blocks:
        block.bias = nn.Parameter(block.bias + 1)  # the first backward had the others
    try:
        again = torch.autograd.grad(loss, [block.weight for block in blocks])
    except RecoupError:
        return
    for a, b in zip(first[::2], again, strict=True):
        torch.testing.assert_close(a, b)
