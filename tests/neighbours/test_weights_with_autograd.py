"""Reparametrized weights and values keep what autograd promises of any others; else an error."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import recoup
from recoup.weights import applied, disabled, same_draw
from tests.oracle import hooks_in_force, loss_of_all
from tests.weight_zoo import (
    LAYERS,
    MORE,
    OURS,
    Runs,
    Uses,
    attending,
    compare,
    first_of,
    looped,
    without_mkldnn,
)

pytestmark = [
    # Of `torch.backends.mkldnn.flags`.
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
    # Of forward mode, when it is used first.
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*performance drop.*batching rule:UserWarning"),
]

# -- one graph, used in every way ------------------------------------------------------------------


KINDS = {
    "linear": (lambda: nn.Linear(5, 4), (3, 5), "weight"),
    "tied": (lambda: Uses(lambda x, w: (x @ w).tanh() @ w.t(), 5, 4), (3, 5), "weight"),
    "convolution": (lambda: nn.Conv1d(3, 4, 2), (2, 3, 5), "weight"),
    "layers": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)),
        (3, 5),
        r"\d\.weight",
    ),
    "lstm": (
        lambda: Runs(nn.LSTM(3, 4), lambda layer, x: without_mkldnn(layer, x)[0]),
        (4, 2, 3),
        ".*weight_.*",
    ),
    "gru": (lambda: Runs(nn.GRU(3, 4, bidirectional=True), first_of), (4, 2, 3), ".*weight_.*"),
    "cell in a loop": (lambda: Runs(nn.GRUCell(3, 4), looped), (4, 2, 3), ".*weight_.*"),
    "attention": (lambda: Runs(nn.MultiheadAttention(4, 2), attending), (3, 2, 4), ".*weight"),
}


def gradients(parameters, x):
    return {"x": x.grad} | {name: p.grad for name, p in parameters.items()}


def graph_used_three_times(run, parameters, x):
    loss = loss_of_all(run(x))
    for time in range(3):
        loss.backward(retain_graph=time < 2)
    return gradients(parameters, x)


def two_losses_and_a_part_first(run, parameters, x):
    y, some = run(x), list(parameters.values())[-2:]
    parts = torch.autograd.grad((y * y).sum(), some, retain_graph=True)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.sin().sum().backward(inputs=[some[0]], retain_graph=True)
    y.cos().sum().backward()
    return gradients(parameters, x) | {"part": parts[0], "last": parts[-1], "first": first}


def gradients_of_gradients(run, parameters, x):
    with sdpa_kernel(SDPBackend.MATH):  # which alone has a second derivative
        wanted = [x, *parameters.values()]
        found = torch.autograd.grad(loss_of_all(run(x)), wanted, create_graph=True)
        sum((g * g.detach().cos()).sum() for g in found).backward()
    return gradients(parameters, x)


def two_forwards_before_backward(run, parameters, x):
    one, two = run(x), run(x * 0.5)
    loss_of_all(two).backward(retain_graph=True)
    (loss_of_all(one) * two.sum()).backward()
    return gradients(parameters, x)


def hooks_of_tensors_and_modules(run, parameters, x):
    calls, handles = [], []
    for name, p in parameters.items():
        handles.append(p.register_hook(lambda g, n=name: calls.append(n) or g * 2))
        after = lambda p, n=name: calls.append(f"{n} after")  # noqa: E731
        handles.append(p.register_post_accumulate_grad_hook(after))
    handles.append(run.register_full_backward_hook(lambda *_: calls.append("full")))
    y = run(x)
    y.register_hook(lambda g: g * 3)
    loss_of_all(y).backward()
    for handle in handles:
        handle.remove()
    assert sorted(calls) == sorted(["full", *parameters, *(f"{name} after" for name in parameters)])
    return gradients(parameters, x)


def optimizer_in_backward(run, parameters, x):
    def step(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(step) for p in parameters.values()]
    for _ in range(3):
        loss_of_all(run(x)).backward()
    for handle in handles:
        handle.remove()
    return {name: p.clone() for name, p in parameters.items()}


class Cloned(saved_tensors_hooks):
    """A pair that keeps a copy of all that it is given."""

    def __init__(self):
        super().__init__(lambda tensor: (tensor.clone(), tensor.shape), lambda packed: packed[0])


class Logged(saved_tensors_hooks):
    """A pair that writes down what it is given, and what is asked for."""

    def __init__(self):
        self.packed, self.unpacked = [], []

        def pack(tensor):
            self.packed.append(tuple(tensor.shape))
            return len(self.packed) - 1, tensor.detach()

        def unpack(packed):
            self.unpacked.append(packed[0])
            return packed[1]

        super().__init__(pack, unpack)


def under(pair, *, backward=False):
    def act(run, parameters, x):
        with nullcontext() if backward else pair():
            loss = loss_of_all(run(x))
        with pair() if backward else nullcontext():
            loss.backward()
        return gradients(parameters, x)

    return act


ACTS = {act.__name__.replace("_", " "): act for act in (
    graph_used_three_times, two_losses_and_a_part_first, gradients_of_gradients,
    two_forwards_before_backward, hooks_of_tensors_and_modules, optimizer_in_backward)}  # fmt: skip
ACTS |= {f"under {pair.__name__}": under(pair) for pair in (save_on_cpu, Cloned, Logged)}
ACTS |= {"backward under a pair": under(Cloned, backward=True)}


@pytest.mark.sampled(190)
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_that_of_the_materialised_weights_whatever_is_done_with_it(
    kind, act, way, monkeypatch
):
    build, size, pattern = KINDS[kind]
    # The fused norm of torch takes the lengths for constants in its second derivative.
    if act == "gradients of gradients":
        monkeypatch.setattr(torch, "_weight_norm", lambda w, g, dim: w * (g / lengths(w, dim)))
    lengths = lambda w, dim: torch.norm_except_dim(w, 2, dim)  # noqa: E731
    x = torch.randn(*size, dtype=torch.float64, requires_grad=True)
    compare(OURS[way], build().double(), (x,), pattern, act=ACTS[act], rtol=1e-8)


# -- pairs of saved-tensor hooks -------------------------------------------------------------------


def reparametrized(name, way):
    torch.manual_seed(0)
    kind = LAYERS[name]
    return OURS[way](kind.build(), kind.pattern), kind.inputs()


@pytest.mark.parametrize("way", ["dropout", "noise"])
@pytest.mark.parametrize("name", ["linear", "linear 3-D", "x @ w.t()", "conv2d", "embedding", "gru",
                                  "lstm, mkldnn off", "encoder layer"])  # fmt: skip
def test_a_pair_sees_what_a_plain_layer_shows_it_but_no_weight(name, way):
    module, inputs = reparametrized(name, way)
    raw = {entry.name for entry in applied(module)}
    shapes = {tuple(p.shape) for key, p in module.named_parameters() if key in raw}
    shapes |= {shape[::-1] for shape in shapes} | {(1, *shape) for shape in shapes}
    shapes |= {(1, *shape[::-1]) for shape in shapes if len(shape) == 2}
    logs = []
    for _ in range(2):
        log = Logged()
        torch.manual_seed(4)
        with log:
            output = module(*inputs)
        loss_of_all(output if isinstance(output, torch.Tensor) else output[0]).backward()
        logs.append(log)
        if raw:
            recoup.weights.remove(module)
            raw = None
    packed, asked = ([s for s in logs[1].packed if s not in shapes],
                     [logs[1].packed[i] for i in logs[1].unpacked])  # fmt: skip
    ids = [packed[-1]] if name == "embedding" and way == "dropout" else []  # for a mask of its rows
    assert logs[0].packed == packed + ids
    got = sorted(logs[0].packed[place] for place in logs[0].unpacked)
    assert got == sorted([*(shape for shape in asked if shape not in shapes), *ids])


class Saves(torch.autograd.Function):
    """A product that saves both factors itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Remembers(torch.autograd.Function):
    """A product that holds on to its factors by attributes."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, gradient.t() @ ctx.x


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("function", [Saves, Remembers])
@pytest.mark.parametrize("through", [lambda fn: fn, recoup.recompute])
def test_a_function_that_saves_the_weight(through, function, way):
    plain = Uses(lambda x, w: through(function.apply)(x, w), 64, 64)
    x = torch.randn(3, 64, requires_grad=True)
    if (through, function) != (recoup.recompute, Remembers):
        compare(OURS[way], plain, (x,), act=graph_used_three_times, rtol=1e-5)
    module = OURS[way](plain)
    held = recoup.measure(lambda: module(x).sum()).held_bytes
    if function is Saves:
        assert (held >= 64 * 64 * 4) == (through is not recoup.recompute)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [True, False])
def test_threads_share_one_graph_or_have_a_graph_each_over_one_module(shares):
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    OURS["stacked"](module, r"\d\.weight")
    xs, wanted = torch.randn(4, 3, 6, dtype=torch.float64), list(module.parameters())
    y = module(xs[0])
    losses = [loss_of_all(y), y.square().sum(), y.cos().sum(), y.exp().sum()]

    def gradients_of(place):
        found = []
        for trial in range(30):
            if shares:
                loss = losses[place]
            else:
                with same_draw(seed=100 * place + trial):
                    loss = loss_of_all(module(xs[place]))
            found += torch.autograd.grad(loss, wanted, retain_graph=True)
        return found

    def work(place):
        with disabled(module) if place == 3 else nullcontext():
            got[place] = gradients_of(place)

    want, got = [gradients_of(place) for place in range(4)], {}
    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as often as can be
    try:
        for each in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                each(thread)
    finally:
        sys.setswitchinterval(interval)
    for place in range(4):
        assert all(map(torch.equal, got[place], want[place])) == (shares or place != 3)


# -- torch.func and forward mode -------------------------------------------------------------------


class Functional:
    """A layer as a function of its parameters."""

    def __init__(self, way):
        self.layer = MORE[way](nn.Linear(4, 3).double())
        self.parameters = {n: p.detach().clone() for n, p in self.layer.named_parameters()}
        self.xs = torch.randn(5, 4, dtype=torch.float64)

    def loss(self, parameters, x):
        return functional_call(self.layer, parameters, (x,)).square().sum()

    def plain(self, x):
        """The gradients of one input, by a plain backward."""
        self.layer.zero_grad()
        self.loss(dict(self.layer.named_parameters()), x).backward()
        return {name: p.grad.clone() for name, p in self.layer.named_parameters()}


def assert_close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", [way for way in MORE if MORE[way].function is None])
def test_transforms_of_first_and_second_order(way):
    f = Functional(way)

    def of_weight(weight):
        return f.loss(f.parameters | {"weight": weight}, f.xs[:1])

    one, weight = torch.ones((), dtype=torch.float64), f.parameters["weight"].clone()
    for transforms in (
        (
            lambda: f.plain(f.xs),
            lambda: grad(f.loss)(f.parameters, f.xs),
            lambda: vjp(f.loss, f.parameters, f.xs)[1](one)[0],
            lambda: jacrev(f.loss)(f.parameters, f.xs),
        ),
        (
            lambda: torch.autograd.functional.hessian(of_weight, weight),
            lambda: hessian(of_weight)(weight),
            lambda: jacrev(jacrev(of_weight))(weight),
            lambda: jacfwd(grad(of_weight))(weight),
        ),
    ):
        results = []
        for transform in transforms:
            with same_draw(seed=2):
                results.append(transform())
            assert hooks_in_force() is None
        for other in results[1:]:
            assert_close(other, results[0])


@pytest.mark.parametrize("randomness", ["error", "same", "different", "given"])
@pytest.mark.parametrize("way", OURS)
def test_gradients_of_each_sample(randomness, way):
    """One draw for all samples where that is asked for or nothing is drawn; else an error."""
    f, how = Functional(way), "error" if randomness == "given" else randomness

    def in_this_draw(call):
        torch.manual_seed(2)
        with same_draw(seed=3) if randomness == "given" else nullcontext():
            return call()

    def run():
        return vmap(grad(f.loss), (None, 0), randomness=how)(f.parameters, f.xs)

    if way != "norm" and randomness in ("error", "different"):
        with pytest.raises(RuntimeError, match=r"randomness|random operation"):
            in_this_draw(run)
        return
    got = in_this_draw(run)
    for place, x in enumerate(f.xs):
        want = in_this_draw(lambda x=x: f.plain(x))
        assert_close({name: g[place] for name, g in got.items()}, want)
