"""The census: each residual under its names, with its bytes and its way, and no trace of the look.

The oracles are the tracker of storages (bytes), a list by hand (names and ways) and the same code
without a census (everything else).
"""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torchs

import recoup
from recoup._core.saved_tensors import Way
from recoup._core.storage_tracking import StorageTracker
from recoup._core.tensors import nodes_of
from recoup.errors import ChangedError
from recoup.memory.census import Residual, Residuals, residuals
from tests.alive import no_collector
from tests.oracle import state_of_torch

WAYS = get_args(Way)
X_BYTES = 32 * 16 * 4


def x():
    return torch.ones(32, 16).mul(0.5).requires_grad_()


def block():
    return nn.Sequential(nn.Linear(16, 16), nn.GELU())


def noisy():
    return recoup.weight_noise(nn.Linear(16, 16), std=0.1)


apart = partial(torchs, use_reentrant=False)
elsewhere = partial(save_on_cpu, pin_memory=True)  # hooks that make copies


def within(context, fn, *args):
    with context:
        return fn(*args)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Root(nn.ModuleDict):
    def __init__(self):
        super().__init__({"within": block()})

    def forward(self, x):
        return self["within"](x).exp()


class Raises(Root):
    def forward(self, x):
        with elsewhere():
            super().forward(x)
            raise ValueError


class Shift(nn.Module):
    def forward(self, x):
        return x.exp().log() + 1

    def inverse(self, y):
        return y - 1


def listed(fn):
    """Each residual as a line: operator, module, way, and its bytes over those of an input."""
    return [
        f"{each.value.split(' [')[0]}, {each.module}, {each.way}, {each.num_bytes / X_BYTES:g}"
        for each in residuals(fn)
    ]


@pytest.fixture(autouse=True)
def nothing_remains():
    before = state_of_torch()
    yield
    assert state_of_torch() == before


def of(model, *size):
    return lambda: model(x() if not size else torch.ones(*size).mul(0.5))


def autocast(model, given):  # a leaf made within would be held, though nobody saves it
    return torch.autocast("cpu", torch.bfloat16)(model)(given)


BUILDS = {
    "transformer": lambda: of(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, 6, 16),
    "noisy lstm": lambda: partial(
        lambda model: model(torch.ones(5, 3, 16).mul(0.5))[0],
        recoup.weight_dropout(nn.LSTM(16, 8), r"weight_hh_l\d+", p=0.5),
    ),
    "autocast": lambda: partial(autocast, nn.Sequential(noisy(), nn.GELU()), x()),
    "sqrt": lambda: of(recoup.Sequential(*(block() for _ in range(5)), memory="sqrt")),
    "region of torch": lambda: partial(lambda module: apart(module, x()).sin(), block()),
}


@pytest.mark.parametrize("name", BUILDS)
def test_kept_bytes_are_those_that_the_tracker_sees(name):
    fn = BUILDS[name]()
    gc.collect()
    with StorageTracker() as tracker:
        node = fn().grad_fn
    expected = tracker.current_bytes
    assert node is not None
    kept = [each.num_bytes for each in residuals(fn).entries if each.way == "keep"]
    # The seeds of a weight, a few bytes, are made where the tracker does not look.
    assert sum(num for num in kept if num > 8) == expected > 0


def test_bytes_of_what_is_not_kept_are_those_of_keeping_it():
    model = recoup.Sequential(*(block() for _ in range(5)))
    plain = residuals(of(model))
    assert plain.total_bytes() == plain.total_bytes("keep") == 10 * X_BYTES
    model.memory = "sqrt"
    saved = residuals(of(model))
    assert saved.total_bytes() == plain.total_bytes() == sum(map(saved.total_bytes, WAYS))
    assert 0 < saved.total_bytes("keep") < plain.total_bytes()


def looked_at_twice(given):
    y = recoup.checkpoint(F.gelu, given)  # its slot looks at the result, which sin keeps
    return y.sin() + y.view(-1).cos().sum()


def gone_before_the_end(given):
    given.exp().sin()
    given.exp().sum().backward()
    return given.tanh()


def with_given_parameters():
    model = nn.Linear(16, 16)
    given = {name: torch.ones_like(each) for name, each in model.named_parameters()}
    given["weight"].requires_grad_()
    return lambda: torch.func.functional_call(model, given, (x(),))


def ours_in_torchs(weight):
    return apart(lambda x: Squared.apply(recoup.recompute(F.gelu)(weight(x))), x())


def on_the_cpu(module):
    with elsewhere():
        y = recoup.checkpoint(module, Squared.apply(module(x())))
        y = apart(module, y + 1)
    return y.exp()


def after_an_exception(bad, good):
    with suppress(ValueError):
        bad(x())
    return good(x()) + Squared.apply(x())


BLOCK = ["linear, 0, keep, 1", "gelu, 1, keep, 1"]
AGAIN = ["linear, 0, recompute, 0", "gelu, 1, recompute, 1"]
IN_ROOT = ["linear, within.0, keep, 1", "gelu, within.1, keep, 1", "exp, Root, keep, 1"]
LISTED = {
    # what counts, and once
    "a storage in several places": (lambda: partial(looked_at_twice, x()), [
        "input of the checkpointed call of gelu, -, keep, 1", "gelu, -, recompute, 0",
        "sin, -, keep, 1", "cos, -, keep, 0"]),
    "not what is gone": (lambda: lambda: gone_before_the_end(x()), ["tanh, -, keep, 1"]),
    "not weights and statistics": (
        lambda: of(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).eval()),
        ["linear, 0, keep, 1", "batch_norm, 1, keep, 1"]),
    "not a view of a parameter": (
        lambda: partial(lambda p: x() @ p.t(), nn.Parameter(torch.ones(16, 16))),
        ["matmul, -, keep, 1"]),
    "not given parameters": (with_given_parameters, ["linear, Linear, keep, 1"]),
    # ways
    "a chain with one slot": (lambda: of(recoup.Sequential(block(), nn.Tanh(), Root(), memory=1)), [
        "input of module `0` (Sequential), Sequential, keep, 1", "linear, 0.0, recompute, 0",
        "gelu, 0.1, recompute, 1", "tanh, 1, keep, 1", "linear, 2.within.0, keep, 0",
        "gelu, 2.within.1, keep, 1", "exp, 2, keep, 1"]),
    "inverted and recomputed": (
        lambda: of(recoup.Sequential(Shift(), Shift(), nn.GELU(), memory="constant",
                                     otherwise="recompute")),
        ["input of module `0` (Shift), Sequential, keep, 1",  # for the drift guard to begin from
         "exp, 0, recompute, 1", "log, 0, recompute, 0", "exp, 1, invert, 1", "log, 1, invert, 0",
         "input of module `2` (GELU), Sequential, keep, 1", "gelu, 2, recompute, 0"]),
    "a weight in a region": (lambda: partial(recoup.checkpoint, noisy(), x()), [
        "input of the checkpointed call of Linear, -, keep, 1", "linear, Linear, recompute, 0",
        "linear, Linear, regenerate, 0.5"]),
    "ours in torch's": (lambda: partial(ours_in_torchs, noisy()), [
        "input of checkpoint, -, keep, 1", "linear, Linear, recompute, 0",
        "linear, Linear, regenerate, 0.5",
        "input of the recomputed call of gelu, -, recompute, 1", "gelu, -, recompute, 0",
        "Squared, -, recompute, 1"]),
    "ours and torch's on the cpu": (lambda: partial(on_the_cpu, block()), [
        "linear, 0, offload, 1", "gelu, 1, offload, 1", "Squared, -, offload, 1",
        "input of the checkpointed call of Sequential, -, offload, 1", *AGAIN,
        "input of checkpoint, -, offload, 1", *AGAIN, "exp, -, keep, 1"]),
    # names
    "two roots": (lambda: partial(lambda one, two: two(one(x())), Root(), Root()), [
        "linear, Root.within.0, keep, 1", "gelu, Root.within.1, keep, 1", "exp, Root, keep, 1",
        "linear, Root#2.within.0, keep, 0", "gelu, Root#2.within.1, keep, 1",
        "exp, Root#2, keep, 1"]),
    "an exception": (lambda: partial(after_an_exception, Raises(), Root()),
                     [*IN_ROOT, "Squared, -, keep, 1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
def test_each_residual_is_listed_once_by_operator_module_and_way(name):
    build, expected = LISTED[name]
    assert listed(build()) == expected


@pytest.mark.parametrize(("pack", "expected"), [
    (lambda t: [{"view": t.view(-1)}], "keep, 1"),
    (lambda t: t.bfloat16(), "keep, 0.5"),
    (lambda t: ("cpu", t.clone()), "offload, 1"),
    (lambda t: SimpleNamespace(path="a file", shape=t.shape), "offload, 1"),
    (lambda t: 7, "offload, 1"),
])  # fmt: skip
def test_what_hooks_of_others_return_says_the_way(pack, expected):
    hooks, fn = saved_tensors_hooks(pack, lambda packed: packed), lambda: x().exp()
    wanted = [f"exp, -, {expected}"]
    assert listed(lambda: within(hooks, fn)) == within(hooks, listed, fn) == wanted


def test_a_census_within_a_region_or_another_census():
    module, inner = block(), []

    def fn(y):
        inner.append(listed(lambda: module(y)))
        return module(y)

    assert listed(lambda: fn(x())) == BLOCK
    recoup.checkpoint(fn, x())
    assert inner == [BLOCK, [line.replace("keep", "recompute") for line in BLOCK]]


def test_no_memory_and_no_module_remains_nor_anything_after_an_exception():
    fn = BUILDS["transformer"]()
    residuals(fn)
    with no_collector(), StorageTracker() as tracker:
        assert residuals(fn).total_bytes() > 0
        assert tracker.current_bytes == 0
    outside, root = [], Root()  # whose graph outlives the call
    gone = weakref.ref(root)
    residuals(lambda root=root: outside.append(root(x())))
    del root
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match=r"^$"):
        residuals(of(Raises()))


@pytest.mark.parametrize("name", ["noisy lstm", "sqrt", "region of torch"])
def test_fn_runs_once_as_without_a_census_and_its_graph_stays_right(name):
    fn, made = BUILDS[name](), []

    def run():
        made.append(fn().sum())
        assert torch.is_grad_enabled()

    ends = []
    for call in (run, lambda: torch.no_grad()(residuals)(run)):
        torch.manual_seed(0)
        call()
        stream, (loss,) = torch.get_rng_state(), made
        leaves = [each.variable for each in nodes_of([made.pop()]) if hasattr(each, "variable")]
        ends.append([stream, *torch.autograd.grad(loss, leaves)])
    assert len(ends[0]) == len(ends[1]) > 1
    assert all(map(torch.equal, *ends))


def test_hooks_of_others_see_what_they_would_have_seen():
    first, module, seen = noisy(), block(), []

    def pack(tensor):
        seen.append((type(tensor), tuple(tensor.shape), tensor.grad_fn is None))
        return tensor

    def body():
        return recoup.checkpoint(module, Squared.apply(module(first(x())))).exp()

    hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
    plain = partial(within, hooks, body)
    for call in (plain, partial(residuals, plain), partial(within, hooks, residuals, body)):
        call()
    assert len(seen) > 15
    assert seen == seen[: len(seen) // 3] * 3


def test_equal_residuals_share_a_row_the_largest_stands_first_and_ways_are_in_their_order():
    mib, kept = 2**20, ("linear [8, 8] float32", "layers.0")
    first = Residual("gelu [8, 8] float32", "layers.0", mib, "recompute")
    entries = Residuals((first, *(Residual(*kept, size, "keep") for size in (mib // 2, mib, 0))))
    assert str(entries).splitlines() == [
        "value                  module    count    MiB  way",
        "linear [8, 8] float32  layers.0      2  1.500  keep",
        "gelu [8, 8] float32    layers.0      1  1.000  recompute",
        "total                                   1.500  keep",
        "                                        1.000  recompute",
        "1 more look at memory that is counted above",
    ]
    with pytest.raises(ValueError, match=r"`way` is 'kept', but must be one of keep, recompute"):
        entries.total_bytes("kept")
    in_another_order = (Residual(*kept, mib, way) for way in reversed(WAYS))
    lines = str(Residuals(tuple(in_another_order))).splitlines()
    assert tuple(line.split()[-1] for line in lines[-5:]) == WAYS


def test_a_change_in_place_is_still_found():
    outside = []
    residuals(lambda: (outside.append((y := x().exp()).sin()), y.add_(1)))
    with pytest.raises(ChangedError, match="that sin saved"):
        outside[0].sum().backward()
