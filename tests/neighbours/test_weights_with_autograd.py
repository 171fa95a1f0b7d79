"""Reparametrized weights and values keep what autograd promises of any others; else an error."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.func import grad as func_grad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_, parametrize, prune
from torch.nn.utils.parametrizations import spectral_norm

import recoup
from recoup.errors import ChangedError, RecoupError
from recoup.weights import applied, disabled, same_draw
from tests.oracle import assert_same_tensor, hooks_in_force, loss_of_all
from tests.unit.weights.plain_run import recorded, weights_used
from tests.weight_zoo import OURS, Loop, Uses, Without

# Of `torch.backends.mkldnn.flags`.
pytestmark = [
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning"),
    # Of forward mode, when it is used first.
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
]
SEED = 5


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Layers are small, and threads that wait for each other are not."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


# -- layers, and the oracle ------------------------------------------------------------------------


class Attends(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class First(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


KINDS = {
    "linear": (lambda: nn.Linear(5, 4), (3, 5), "weight"),
    "tied": (lambda: Uses(lambda x, w: (x @ w).tanh() @ w.t(), 5, 4), (3, 5), "weight"),
    "einsum": (lambda: Uses(lambda x, w: torch.einsum("bi,oi->bo", x, w), 4, 5), (3, 5), "weight"),
    "convolution": (lambda: nn.Conv1d(3, 4, 2), (2, 3, 5), "weight"),
    "layers": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2)),
        (3, 5),
        r"\d\.weight",
    ),
    "lstm": (lambda: First(Without(nn.LSTM(3, 4))), (4, 2, 3), ".*weight_.*"),
    "gru": (lambda: First(nn.GRU(3, 4, bidirectional=True)), (4, 2, 3), ".*weight_.*"),
    "cell in a loop": (lambda: Loop(nn.GRUCell(3, 4)), (4, 2, 3), ".*weight_.*"),
    "attention": (lambda: Attends(4, 2), (3, 2, 4), ".*weight"),
}


class Recorded(nn.Module):
    """The module, with what each of its forwards draws written down."""

    def __init__(self, module, draws):
        super().__init__()
        self.module, self.draws = module, draws
        self.stream = None

    def forward(self, x):
        with recorded() as made:
            output = self.module(x)
        self.draws.append(made)
        self.stream = torch.get_rng_state()
        return output


class Kept(nn.Module):
    """Plain torch with the very weights that forwards of the module had, kept."""

    def __init__(self, module, draws):
        super().__init__()
        self.module, self.draws = module, list(draws)
        self.plain = recoup.weights.remove(copy.deepcopy(module)) if applied(module) else module

    def forward(self, x):
        used = weights_used(self.module, self.draws.pop(0), dict(self.module.named_parameters()))
        names = dict(self.plain.named_parameters())
        given = {name: value for name, value in used.items() if name in names}
        return functional_call(self.plain, given, (x,), tie_weights=False)


class Case:
    """A layer of a kind, reparametrized in some way, in double precision."""

    def __init__(self, kind, way):
        build, size, pattern = KINDS[kind]
        torch.manual_seed(0)
        self.module = build().double()
        OURS[way](self.module, pattern)
        self.x = torch.randn(*size, dtype=torch.float64)
        # A product of a norm is fused in ours, and others than one are scaled in another order.
        self.rtol = 1e-10 if way in ("norm", "stacked") or kind == "tied" else 0.0

    def same(self, act):
        """Compare what `act(run, parameters, x)` returns with what plain torch does."""
        draws = []
        start = copy.deepcopy(self.module.state_dict())
        ours = Recorded(self.module, draws)
        got = self._act(act, ours)
        assert torch.equal(torch.get_rng_state(), ours.stream), "backward moves the stream"
        self.module.load_state_dict(start)
        theirs = Kept(self.module, draws)
        want = self._act(act, theirs)
        assert theirs.draws == []
        assert list(got) == list(want)
        assert any(value is not None for value in want.values())
        for name, value in want.items():
            assert_same_tensor(name, got[name], value, self.rtol, 1e-6)
        return got

    def _act(self, act, run):
        self.module.zero_grad()
        torch.manual_seed(SEED)
        x = self.x.clone().requires_grad_()
        found = act(run, dict(self.module.named_parameters()), x)
        assert hooks_in_force() is None
        assert torch.is_grad_enabled()
        return {name: None if t is None else t.detach().clone() for name, t in found.items()}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=OURS)
def case(request, kind):
    return Case(kind, request.param)


def gradients(parameters, x):
    return {"x": x.grad} | {name: p.grad for name, p in parameters.items()}


# -- one graph, used in every way ------------------------------------------------------------------


@pytest.mark.sampled(8)
def test_the_graph_used_three_times(case):
    def act(run, parameters, x):
        loss = loss_of_all(run(x))
        for time in range(3):
            loss.backward(retain_graph=time < 2)
        return gradients(parameters, x)

    case.same(act)


@pytest.mark.sampled(10)
def test_two_losses_and_a_part_first(case):
    def act(run, parameters, x):
        y = run(x)
        some = list(parameters.values())[-2:]
        parts = torch.autograd.grad((y * y).sum(), some, retain_graph=True)
        (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        y.sin().sum().backward(inputs=[some[0]], retain_graph=True)
        y.cos().sum().backward()
        return gradients(parameters, x) | {"part": parts[0], "last": parts[-1], "first": first}

    case.same(act)


@pytest.mark.sampled(8)
def test_gradients_of_gradients(case, monkeypatch):
    def act(run, parameters, x):
        wanted = [x, *parameters.values()]
        found = torch.autograd.grad(loss_of_all(run(x)), wanted, create_graph=True)
        sum((g * g.detach().cos()).sum() for g in found).backward()
        return gradients(parameters, x)

    # The fused norm of torch takes the lengths for constants in its second derivative.
    monkeypatch.setattr(torch, "_weight_norm", product)
    case.rtol = max(10 * case.rtol, 1e-12)  # they are added in another order
    with sdpa_kernel(SDPBackend.MATH):  # which alone has a second derivative
        case.same(act)


def product(weight, norms, dim):
    return weight * (norms / torch.norm_except_dim(weight, 2, dim))


@pytest.mark.sampled(10)
def test_two_forwards_before_backward(case):
    def act(run, parameters, x):
        one, two = run(x), run(x * 0.5)
        loss_of_all(two).backward(retain_graph=True)
        (loss_of_all(one) * two.sum()).backward()
        return gradients(parameters, x)

    case.same(act)


@pytest.mark.sampled(8)
def test_hooks_of_tensors_and_modules(case):
    def act(run, parameters, x):
        calls = []
        for name, p in parameters.items():
            p.register_hook(lambda g, n=name: calls.append(n) or g * 2)
            p.register_post_accumulate_grad_hook(lambda p, n=name: calls.append(f"{n} after"))
        handles = [
            run.register_full_backward_pre_hook(lambda *_: calls.append("pre")),
            run.module.register_full_backward_hook(lambda *_: calls.append("full")),
        ]
        y = run(x)
        y.register_hook(lambda g: g * 3)
        loss_of_all(y).backward()
        for handle in handles:
            handle.remove()
        found = gradients(parameters, x)
        for p in parameters.values():
            p._backward_hooks = p._post_accumulate_grad_hooks = None
        assert calls.count("pre") == 1
        for name in parameters:
            assert calls.count(name) == calls.count(f"{name} after") == 1
        return found

    case.same(act)


@pytest.mark.sampled(9)
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_anomaly_mode(case):
    def act(run, parameters, x):
        with torch.autograd.detect_anomaly(check_nan=True):
            loss_of_all(run(x)).backward()
        return gradients(parameters, x)

    case.same(act)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_anomaly_mode_finds_the_forward():
    layer = recoup.weight_dropout(nn.Linear(3, 3), p=0.1)
    with torch.no_grad():
        layer.get_parameter("weight").fill_(float("inf"))
    x = torch.zeros(1, 3, requires_grad=True)
    with (
        pytest.raises(RuntimeError, match="returned nan values"),
        torch.autograd.detect_anomaly(check_nan=True),
    ):
        (layer(x) * 0).sum().backward()
    assert hooks_in_force() is None


@pytest.mark.sampled(8)
def test_an_optimizer_in_backward(case):
    def act(run, parameters, x):
        def step(p):
            with torch.no_grad():
                p.sub_(p.grad, alpha=0.1)
            p.grad = None

        handles = [p.register_post_accumulate_grad_hook(step) for p in parameters.values()]
        for _ in range(3):
            loss_of_all(run(x)).backward()
        for handle in handles:
            handle.remove()
        return {name: p.detach().clone() for name, p in parameters.items()}

    case.rtol *= 100  # of steps that follow each other
    case.same(act)


@pytest.mark.sampled(8)
def test_micro_batches_clipped(case):
    def act(run, parameters, x):
        optimizer = torch.optim.Adam(parameters.values(), lr=0.1)
        for _ in range(2):
            for scale in (1.0, 0.5, 0.25):
                (loss_of_all(run(x * scale)) / 3).backward()
            norm = clip_grad_norm_(parameters.values(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return {name: p.detach().clone() for name, p in parameters.items()} | {"norm": norm}

    case.rtol = 1e-6  # Adam divides rounding errors by rounding errors
    case.same(act)


@pytest.mark.sampled(8)
def test_a_forward_without_backward_and_in_inference_first(case):
    def act(run, parameters, x):
        run(x)
        with torch.inference_mode():
            run(x)
        with torch.no_grad():
            run(x)
        loss_of_all(run(x)).backward()
        return gradients(parameters, x)

    case.same(act)


@pytest.mark.sampled(8)
def test_frozen_parts(case):
    def act(run, parameters, x):
        names = list(parameters)
        for name in names[::2]:
            parameters[name].requires_grad_(False)
        loss_of_all(run(x)).backward()
        for name in names[::2]:
            parameters[name].requires_grad_(True)
        return gradients(parameters, x)

    case.same(act)


@pytest.mark.sampled(8)
def test_backward_of_many_at_once(case):
    """`jacobian(vectorize=True)` and its likes run a backward under vmap: right, or an error."""
    x = case.x.clone().requires_grad_()
    y = case.module(x)
    wanted = [x, *case.module.parameters()]
    ways = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)[:3]
    want = [torch.autograd.grad(y, wanted, way, retain_graph=True) for way in ways]
    try:
        got = torch.autograd.grad(y, wanted, ways, retain_graph=True, is_grads_batched=True)
    except RuntimeError as raised:
        said = str(raised)
    else:
        said = "vmap"
        for place, each in enumerate(got):
            for a, b in zip(each, want, strict=True):
                assert_same_tensor(str(place), a, b[place], 1e-10, 1e-6)
    assert "vmap" in said
    assert hooks_in_force() is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["linear", "convolution", "lstm", "gru", "cell in a loop"])
@pytest.mark.parametrize("way", OURS)
def test_differences(kind, way):
    case = Case(kind, way)
    names, values = zip(*case.module.named_parameters(), strict=True)

    def run(x, *given):
        with same_draw(3):
            return functional_call(case.module, dict(zip(names, given, strict=True)), (x,))

    inputs = (case.x[:2].requires_grad_(), *(p.detach().requires_grad_() for p in values))
    assert gradcheck(run, inputs, fast_mode=True)
    assert gradgradcheck(run, inputs, fast_mode=True)
    assert hooks_in_force() is None


# -- values ----------------------------------------------------------------------------------------


def two_layers(through, x, w):
    value = through(lambda x: F.gelu(x) * x.sin())(x)
    other = through(torch.tanh)(value @ w)
    return ((value @ w + other) * value[:, :4].exp()).cos()


VALUE_ACTS = {
    "three times": lambda loss, *of: [
        torch.autograd.grad(loss, of, retain_graph=time < 2) for time in range(3)
    ][-1],
    "double": lambda loss, *of: torch.autograd.grad(
        sum(g.square().sum() for g in torch.autograd.grad(loss, of, create_graph=True)), of
    ),
    "parts": lambda loss, *of: [
        torch.autograd.grad(loss, each, retain_graph=True)[0] for each in reversed(of)
    ],
}


@pytest.mark.parametrize("act", VALUE_ACTS)
def test_values(act):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    got, want = (
        VALUE_ACTS[act](two_layers(through, x, w).sum(), x, w)
        for through in (recoup.recompute, lambda fn: fn)
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    assert hooks_in_force() is None


def test_differences_of_values():
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda *a: two_layers(recoup.recompute, *a), (x, w))
    assert gradgradcheck(lambda *a: two_layers(recoup.recompute, *a), (x, w))


def test_what_a_loss_did_not_ask_for_is_let_go():
    """Two values of one call, made again together; after a backward neither is alive."""
    x, made = torch.randn(30, 30, requires_grad=True), []

    def both(x):
        found = x.sin(), x.cos()
        made.extend(weakref.ref(value.untyped_storage()) for value in found)
        return found

    a, b = recoup.recompute(both)(x)
    losses = [(a * a).sum(), (b * b).sum()]
    made.clear()
    gc.collect()
    gc.disable()
    try:
        for loss in losses:
            torch.autograd.grad(loss, x, retain_graph=True)
            assert made
            assert [ref() for ref in made] == [None] * len(made)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_values_with_hooks_and_in_anomaly_mode():
    x, seen = torch.ones(3, requires_grad=True), []
    with torch.autograd.detect_anomaly():
        value = recoup.recompute(torch.sin)(x)
        value.register_hook(lambda g: seen.append(g) or g * 2)
        value.retain_grad()
        (value * value).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(value.grad, 2 * seen[0])
    torch.testing.assert_close(x.grad, 4 * x.detach().sin() * x.detach().cos())


# -- functions of users ----------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """A product that saves both factors itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Remembers(torch.autograd.Function):
    """A product that holds on to its factors by attributes."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight, grad.t() @ ctx.x


class Through(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))
        self.function = function

    def forward(self, x):
        return self.function.apply(x, self.weight)


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("function", [Product, Remembers])
def test_a_function_that_saves_the_weight(function, way):
    case = Case("linear", way)
    case.module = Through(function).double()
    OURS[way](case.module, "weight")

    def act(run, parameters, x):
        loss = loss_of_all(run(x))
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(parameters, x)

    case.same(act)


class ThroughRecompute(Through):
    def forward(self, x):
        return recoup.recompute(self.function.apply)(x, self.weight)


@pytest.mark.parametrize("way", OURS)
def test_an_own_function_in_recompute(way):
    """The weight that it saves is not kept, which it is otherwise."""
    case = Case("linear", way)
    case.module = ThroughRecompute(Product).double()
    OURS[way](case.module, "weight")

    def act(run, parameters, x):
        loss_of_all(run(x)).backward()
        return gradients(parameters, x)

    case.same(act)
    held = []
    for kind in (Through, ThroughRecompute):
        layer = kind(Product)
        layer.weight = nn.Parameter(torch.randn(64, 64))
        OURS[way](layer, "weight")
        x = torch.randn(2, 64)
        held.append(recoup.measure(lambda layer=layer, x=x: layer(x).square().sum()).held_bytes)
    assert held[0] >= 64 * 64 * 4
    assert held[1] < 64 * 64


@pytest.mark.parametrize("function", [Product, Remembers])
def test_a_function_that_saves_a_value(function):
    x = torch.randn(3, 5, requires_grad=True)
    w = torch.randn(4, 5, requires_grad=True)
    found = []
    for through in (recoup.recompute, lambda fn: fn):
        loss = function.apply(through(torch.tanh)(x), through(torch.sin)(w)).square().sum()
        found.append(torch.autograd.grad(loss, [x, w]))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


# -- threads ---------------------------------------------------------------------------------------


def in_threads(work, num_threads):
    errors = []
    barrier = threading.Barrier(num_threads)

    def guarded(place):
        try:
            barrier.wait()
            work(place)
            assert hooks_in_force() is None
        except Exception as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(place,)) for place in range(num_threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as often as can be
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("kind", ["layers", "cell in a loop"])
def test_threads_share_one_graph(kind, way):
    """200 trials each."""
    case = Case(kind, way)
    x = case.x.clone().requires_grad_()
    wanted = [x, *case.module.parameters()]
    y = case.module(x)
    value = recoup.recompute(torch.sin)(y) * y
    losses = [loss_of_all(value), value.square().sum()]
    want = [torch.autograd.grad(loss, wanted, retain_graph=True) for loss in losses]
    num_trials = 100 if kind == "layers" else 25
    got = [[], []]

    def work(place):
        for _ in range(num_trials):
            got[place].append(torch.autograd.grad(losses[place], wanted, retain_graph=True))

    in_threads(work, 2)
    for found, expected in zip(got, want, strict=True):
        assert len(found) == num_trials
        for each in found:
            for a, b in zip(each, expected, strict=True):
                assert torch.equal(a, b)


def test_threads_with_a_graph_each_over_one_module():
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    OURS["stacked"](module, r"\d\.weight")
    xs = [torch.randn(3, 6, dtype=torch.float64) for _ in range(4)]
    wanted = list(module.parameters())

    def gradients_of(place, trial):
        with same_draw(seed=100 * place + trial):
            loss = loss_of_all(module(xs[place]))
        return torch.autograd.grad(loss, wanted)

    want = [[gradients_of(place, trial) for trial in range(50)] for place in range(4)]
    got = [[] for _ in range(4)]

    def work(place):
        with disabled(module) if place == 3 else nullcontext():
            for trial in range(50):
                got[place].append(gradients_of(place, trial))

    in_threads(work, 4)
    assert not torch.equal(got[3][0][0], want[3][0][0])  # the one without noise
    for found, expected in zip(got[:3], want[:3], strict=True):
        for each, other in zip(found, expected, strict=True):
            for a, b in zip(each, other, strict=True):
                assert torch.equal(a, b)


@pytest.mark.sampled(8)
def test_forward_in_one_thread_and_backward_in_another(case):
    def act(run, parameters, x):
        results = []
        forward = threading.Thread(target=lambda: results.append(run(x)))
        forward.start()
        forward.join()
        backward = threading.Thread(target=lambda: loss_of_all(results[0]).backward())
        backward.start()
        backward.join()
        return gradients(parameters, x)

    case.same(act)


# -- torch.func and forward mode -------------------------------------------------------------------


class Functional:
    """A layer as a function of its parameters."""

    def __init__(self, way, mode="training"):
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()
        OURS[way](self.layer, "weight")
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
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("way", OURS)
def test_grad_vjp_and_jacrev(way):
    f = Functional(way)
    torch.manual_seed(2)
    want = f.plain(f.xs)
    for transform in (
        lambda: func_grad(f.loss)(f.parameters, f.xs),
        lambda: vjp(f.loss, f.parameters, f.xs)[1](torch.ones((), dtype=torch.float64))[0],
        lambda: jacrev(f.loss)(f.parameters, f.xs),
    ):
        torch.manual_seed(2)
        assert_close(transform(), want)
    assert hooks_in_force() is None


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
@pytest.mark.parametrize("way", OURS)
def test_gradients_of_each_sample(randomness, way):
    """One draw for all samples where that is asked for or nothing is drawn; else an error."""
    f = Functional(way)

    def run():
        torch.manual_seed(2)
        return vmap(func_grad(f.loss), (None, 0), randomness=randomness)(f.parameters, f.xs)

    if way != "norm" and randomness != "same":
        with pytest.raises(RuntimeError, match=r"randomness|random operation"):
            run()
        return
    got = run()
    for place, x in enumerate(f.xs):
        torch.manual_seed(2)
        assert_close({name: g[place] for name, g in got.items()}, f.plain(x))


@pytest.mark.parametrize("way", OURS)
def test_gradients_of_each_sample_with_a_given_draw(way):
    f = Functional(way)
    with same_draw(seed=3):
        got = vmap(func_grad(f.loss), (None, 0))(f.parameters, f.xs)
    for place, x in enumerate(f.xs):
        with same_draw(seed=3):
            assert_close({name: g[place] for name, g in got.items()}, f.plain(x))


@pytest.mark.parametrize("way", OURS)
def test_forward_mode(way):
    """With respect to inputs it is right; to parameters it is right, or an error says so."""
    f = Functional(way)
    tangent = torch.ones_like(f.xs)
    with same_draw(seed=3):
        (want,) = torch.autograd.grad(f.loss(f.parameters, x := f.xs.clone().requires_grad_()), x)
    with same_draw(seed=3):
        value = jvp(lambda x: f.loss(f.parameters, x), (f.xs,), (tangent,))[1]
    torch.testing.assert_close(value, (want * tangent).sum())
    with same_draw(seed=3), forward_ad.dual_level():
        y = f.loss(f.parameters, forward_ad.make_dual(f.xs, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, (want * tangent).sum())
    with same_draw(seed=3):
        want = sum((g * f.parameters[name]).sum() for name, g in f.plain(f.xs).items())
    with same_draw(seed=3):
        value = jvp(lambda p: f.loss(p, f.xs), (f.parameters,), (f.parameters,))[1]
    torch.testing.assert_close(value, want)
    with same_draw(seed=3), forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(p, p.clone()) for n, p in f.parameters.items()}
        if way in ("noise", "dropout"):  # of small weights: an addition, a product
            value = forward_ad.unpack_dual(f.loss(duals, f.xs)).tangent
            torch.testing.assert_close(value, want)
        else:
            with pytest.raises(NotImplementedError, match=r"forward (mode )?AD"):
                f.loss(duals, f.xs)
    assert hooks_in_force() is None


@pytest.mark.parametrize("way", OURS)
def test_second_derivatives_of_torch_func(way):
    f = Functional(way)
    bias = f.parameters["bias"]

    def loss(weight):
        return f.loss(f.parameters | {"weight": weight, "bias": bias}, f.xs[:1])

    weight = f.parameters["weight"].clone()
    results = []
    for transform in (
        lambda: torch.autograd.functional.hessian(loss, weight),
        lambda: jacrev(jacrev(loss))(weight),
        lambda: hessian(loss)(weight),
        lambda: jacfwd(func_grad(loss))(weight),
    ):
        with same_draw(seed=3):
            results.append(transform())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "transform",
    [
        func_grad,
        vmap,
        jacrev,
        jacfwd,
    ],
)
def test_values_in_a_transform(transform):
    """An error with a way out; a value from outside may go in."""
    x = torch.randn(3)
    with pytest.raises(RecoupError, match=r"torch\.func"):
        transform(lambda x: (recoup.recompute(torch.sin)(x) * 2).sum())(x)
    assert hooks_in_force() is None
    value = recoup.recompute(torch.sin)(x.requires_grad_())
    got = transform(lambda v: (v * v).sum())(value)
    want = transform(lambda v: (v * v).sum())(x.sin())
    torch.testing.assert_close(got, want)


def test_values_in_forward_mode():
    x = torch.randn(3)
    with forward_ad.dual_level():
        y = recoup.recompute(torch.sin)(forward_ad.make_dual(x, torch.ones(3))) * 2
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, 2 * x.cos())


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("kind", ["linear", "layers", "convolution", "cell in a loop", "attention"])
def test_autocast_with_backward_outside(kind, way):
    case = Case(kind, way)
    case.module.float()
    case.x = case.x.float()
    case.rtol = 0.02 if way in ("norm", "stacked") or kind == "cell in a loop" else 0.0
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def act(run, parameters, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
            loss = loss_of_all(y)
        scaler.scale(loss).backward()
        return gradients(parameters, x) | {"y": y.float()}

    case.same(act)


# -- other reparametrizations ----------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def is_noisy(layer, x):
    return not torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("way", ["dropout", "noise", "stacked"])
def test_a_parametrization_of_another_parameter(way, first):
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 6), torch.randn(3, 6)
    for who in ("ours", "theirs") if first == "ours" else ("theirs", "ours"):
        if who == "ours":
            OURS[way](layer, "weight")
        else:
            parametrize.register_parametrization(layer, "bias", Doubled())
    original = layer.parametrizations.bias.original
    with same_draw(1), recorded() as made:
        y = layer(x)
    used = weights_used(layer, made, dict(layer.named_parameters()))
    torch.testing.assert_close(y, x @ used["weight"].t() + 2 * original)
    y.sum().backward()
    torch.testing.assert_close(original.grad, torch.full((6,), 6.0))
    twin = copy.deepcopy(layer)
    with same_draw(1):
        assert torch.equal(twin(x), y)
    # and off again: the last first
    if first == "ours":
        parametrize.remove_parametrizations(layer, "bias")
        assert is_noisy(layer, x)
        recoup.weights.remove(layer)
    else:
        recoup.weights.remove(layer)
        assert not is_noisy(layer, x)
        parametrize.remove_parametrizations(layer, "bias")
    assert type(layer) is nn.Linear
    assert not is_noisy(layer, x)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_removed_in_the_other_order(first):
    """Each is beneath the other: right, or an error, but no noise that is lost without a word."""
    layer, x = nn.Linear(6, 6), torch.randn(3, 6)
    if first == "ours":
        parametrize.register_parametrization(recoup.weight_dropout(layer), "bias", Doubled())
        recoup.weights.remove(layer)
        assert not is_noisy(layer, x)
        parametrize.remove_parametrizations(layer, "bias")
        assert not is_noisy(layer, x)
        assert list(dict(layer.named_parameters())) == ["weight", "bias"]
    else:
        recoup.weight_dropout(
            parametrize.register_parametrization(layer, "bias", Doubled()), "weight"
        )
        with pytest.raises(AttributeError, match="bias"):
            parametrize.remove_parametrizations(layer, "bias")


@pytest.mark.parametrize("other", ["spectral norm", "pruned", "parametrized"])
@pytest.mark.parametrize("way", OURS)
def test_siblings(way, other):
    """Another layer of the tree has another reparametrization; a root covers both."""

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
        if other == "spectral norm":
            spectral_norm(model[2])
        elif other == "pruned":
            prune.l1_unstructured(model[2], "weight", 0.3)
        else:
            parametrize.register_parametrization(model[2], "weight", Doubled())
        return model

    model, plain = build(), build()
    OURS[way](model, r"0\.weight")
    x = torch.randn(3, 6, dtype=torch.float64)
    for _ in range(2):
        with recorded() as made:
            y = model(x)
        raw = dict(model.named_parameters())
        used = weights_used(model, made, raw)
        names = dict(plain.named_parameters())
        want = functional_call(plain, {n: v for n, v in used.items() if n in names}, (x,))
        torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)
        got = torch.autograd.grad(loss_of_all(y), list(raw.values()))
        expected = torch.autograd.grad(loss_of_all(want), list(raw.values()))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_weight_that_is_changed_between_two_backwards():
    layer = recoup.weight_dropout(nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    torch.optim.SGD(layer.parameters(), 0.1).step()
    with pytest.raises(ChangedError, match="`weight` of Linear was changed in place"):
        loss.backward()
