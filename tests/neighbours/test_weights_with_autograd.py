"""Reparametrized weights keep what autograd promises of any others; else an error."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from recoup.weights import disabled, same_draw
from tests.oracle import hooks_in_force, loss_of_all, tensors
from tests.ways import SITUATIONS, assert_same, outcome
from tests.weight_zoo import LAYERS, MORE, OURS, Kind, Materialised, Uses, built, given

pytestmark = [
    # Of `torch.backends.mkldnn.flags`.
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
    # Of forward mode, when it is used first.
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*performance drop.*batching rule:UserWarning"),
]


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def block():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))


NAMES = ["linear", "conv1d", "lstm, mkldnn off", "gru", "lstm cell, in a loop"]
KINDS = {name: LAYERS[name] for name in [*NAMES, "attention to itself"]} | {
    "tied": Kind(lambda: Uses(lambda x, w: (x @ w).tanh() @ w.t(), 5, 4), given((3, 5))),
    "layers": Kind(block, given((3, 5))),
    "a function that saves": Kind(lambda: Uses(Saves.apply, 4, 5), given((3, 5))),
}


class Oracle(Materialised):
    """It has the parameters of ours, and shows nothing of what is within."""

    def parameters(self, recurse=True):
        return self.ours.parameters(recurse)

    def buffers(self, recurse=True):
        return self.plain.buffers(recurse)

    def children(self):
        return iter(())


# What is done with one graph, in which all draws are made in training.
ACTS = [
    "retained", "part_by_part", "backward_for_some", "used_while_it_is_used", "two_forwards",
    "two_forwards_together", "gradient_of_the_gradient", "hooks_of_others",
    "an_optimizer_within_backward", "three_steps", "within_save_on_cpu", "within_hooks_that_clone",
    "backward_within_hooks_that_clone",
]  # fmt: skip


def product_of_torch(weight, norms, dim):
    """The fused norm of torch takes the lengths for constants in its second derivative."""
    return weight * (norms / torch.norm_except_dim(weight, 2, dim))


@pytest.mark.sampled(100)
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_that_of_the_materialised_weights(kind, act, way, monkeypatch):
    is_second = act == "gradient_of_the_gradient"
    if is_second:
        monkeypatch.setattr(torch, "_weight_norm", product_of_torch)
    (plain, (x,)), pattern, found = built(KINDS[kind]), KINDS[kind].pattern, []
    for is_oracle in (False, True):
        ours = OURS[way](copy.deepcopy(plain.double()), pattern)
        ours.children = lambda: iter(())  # hooks are those of the whole, as of the oracle
        run = Oracle(OURS[way], plain, pattern, ours) if is_oracle else ours
        # Attention has a second derivative in plain products alone.
        with sdpa_kernel(SDPBackend.MATH) if is_second else nullcontext():
            found.append(outcome(run, x.double(), SITUATIONS[act]))
    assert_same(*found, rtol=1e-8)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", ["dropout", "noise"])
@pytest.mark.parametrize("name", ["linear", "linear 3-D", "x @ w.t()", "conv2d", "embedding", "gru",
                                  "lstm, mkldnn off", "encoder layer"])  # fmt: skip
def test_a_pair_sees_what_a_plain_layer_shows_it_but_no_weight(name, way):
    (module, inputs), logs = built(LAYERS[name]), []
    sizes = {p.numel() for p in module.parameters() if p.dim() > 1}
    for is_plain in (True, False):
        if not is_plain:
            OURS[way](module, LAYERS[name].pattern)
        packed, asked = [], []
        torch.manual_seed(4)
        with saved_tensors_hooks(lambda x, log=packed: log.append(x) or x.detach(),
                                 lambda x, log=asked: log.append(x) or x):  # fmt: skip
            output = module(*inputs)
        loss_of_all(tensors(output)[0]).backward()
        for log in (packed, asked):
            shapes = [x.shape for x in log if not is_plain or x.numel() not in sizes]
            logs.append(sorted(map(tuple, shapes)))
    assert logs[2:] == logs[:2]


@pytest.mark.parametrize("shares", [True, False])
def test_threads_share_one_graph_or_have_a_graph_each_over_one_module(shares):
    module = OURS["stacked"](nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double())
    xs, wanted = torch.randn(4, 3, 6, dtype=torch.float64), list(module.parameters())
    y = module(xs[0])
    losses = [loss_of_all(y), y.square().sum(), y.cos().sum(), y.exp().sum()]

    def gradients_of(place):
        found = []
        for trial in range(15):
            with same_draw(seed=100 * place + trial):
                loss = losses[place] if shares else loss_of_all(module(xs[place]))
            found += torch.autograd.grad(loss, wanted, retain_graph=True)
        return found

    def work(place):
        with disabled(module) if place == 3 else nullcontext():
            return gradients_of(place)

    want, interval = [gradients_of(place) for place in range(4)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as often as can be
    try:
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(work, range(4)))
    finally:
        sys.setswitchinterval(interval)
    for place in range(4):
        assert all(map(torch.equal, got[place], want[place])) == (shares or place != 3)


class Functional:
    def __init__(self, way):
        self.layer = MORE[way](nn.Linear(4, 3).double())
        self.parameters = {n: p.detach().clone() for n, p in self.layer.named_parameters()}
        self.xs = torch.randn(5, 4, dtype=torch.float64)

    def loss(self, parameters, x):
        return functional_call(self.layer, parameters, (x,)).square().sum()

    def plain(self, x):
        named = dict(self.layer.named_parameters())
        found = torch.autograd.grad(self.loss(named, x), list(named.values()))
        return dict(zip(named, found, strict=True))


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", [way for way in MORE if MORE[way].function is None])
def test_transforms_of_first_and_second_order(way):
    f = Functional(way)

    def of_weight(weight):
        return f.loss(f.parameters | {"weight": weight}, f.xs[:1])

    one, weight = torch.ones((), dtype=torch.float64), f.parameters["weight"].clone()
    first = (
        lambda: f.plain(f.xs),
        lambda: grad(f.loss)(f.parameters, f.xs),
        lambda: vjp(f.loss, f.parameters, f.xs)[1](one)[0],
        lambda: jacrev(f.loss)(f.parameters, f.xs),
    )
    second = (
        lambda: torch.autograd.functional.hessian(of_weight, weight),
        lambda: hessian(of_weight)(weight),
        lambda: jacrev(jacrev(of_weight))(weight),
        lambda: jacfwd(grad(of_weight))(weight),
    )
    for transforms in (first, second):
        results = []
        for transform in transforms:
            with same_draw(seed=2):
                results.append(transform())
            assert hooks_in_force() is None
            assert_close(results[-1], results[0])


@pytest.mark.parametrize("randomness", ["error", "same", "different", "given"])
@pytest.mark.parametrize("way", OURS)
def test_gradients_of_each_sample(randomness, way):
    """One draw for all samples where that is asked for or nothing is drawn; else an error."""
    f, how = Functional(way), "error" if randomness == "given" else randomness

    def in_this_draw(call, *args):
        torch.manual_seed(2)
        with same_draw(seed=3) if randomness == "given" else nullcontext():
            return call(*args)

    run = vmap(grad(f.loss), (None, 0), randomness=how)
    if way != "norm" and randomness in ("error", "different"):
        with pytest.raises(RuntimeError, match=r"randomness|random operation"):
            in_this_draw(run, f.parameters, f.xs)
        return
    got = in_this_draw(run, f.parameters, f.xs)
    for place, x in enumerate(f.xs):
        want = in_this_draw(f.plain, x)
        assert_close({name: g[place] for name, g in got.items()}, want)
