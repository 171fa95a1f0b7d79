"""Regions: where a second run ends, what is read to compare it, and what is left of it."""

from __future__ import annotations

import weakref
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import recoup
from recoup._core import outcome, slots
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ReplayError
from recoup.invertible import AdditiveCoupling, Chain
from tests.alive import no_collector
from tests.deciding import is_second_run
from tests.oracle import hooks_in_force, loss_of_all
from tests.ways import called, recomputing
from tests.zoo import Fn, dense, leaf


class Boxes(torch.Tensor):
    def scaled(self):
        return self.as_subclass(torch.Tensor) * self.scale


@pytest.mark.parametrize("kind", [Boxes, torch.Tensor])
@pytest.mark.parametrize("way", [recoup.checkpoint, lambda fn, *args: recoup.recompute(fn)(*args)])
def test_an_argument_keeps_its_class_and_what_was_set_on_it(kind, way):
    x, weight = torch.randn(3, 4).as_subclass(kind), torch.randn(4, 4, requires_grad=True)
    x.scale = torch.rand(4)
    fn = lambda x, y: ((x.scaled() if kind is Boxes else x * x.scale) @ y).sin()  # noqa: E731
    want = torch.autograd.grad(fn(x, weight).sum(), weight)
    assert torch.equal(*want, *torch.autograd.grad(way(fn, x, weight).sum(), weight))
    with no_collector():
        x.found = way(fn, x, weight)
        found = weakref.ref(x.found)
        del x
        assert found() is None


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(slots, "_WORTH_A_STOP", 0)


def raises_again(x):
    x = LINEAR(x).exp() * torch.ones(64)  # what lies below a constant is compared for itself
    if is_second_run():
        raise KeyError
    return x.sin().exp()


def takes_a_gradient(x):
    z = x.detach().requires_grad_()
    return x.sin() * torch.autograd.grad(z.exp().sin().sum(), z, create_graph=True)[0]


def inverting(x):
    networks = (nn.Sequential(nn.Linear(32, 32), nn.Dropout()).double() for _ in range(3))
    return Chain(*map(AdditiveCoupling, networks), memory="constant")(x)[0]


def into_an_object(x, state):
    state.seen = LINEAR(x).tanh()
    return state.seen.cos()


LINEAR = nn.Linear(64, 64).double()
CODE = {
    "draws": lambda x: LINEAR(F.dropout(F.gelu(LINEAR(x)), 0.5)),
    "decides": lambda x: LINEAR(x).sort(-1).values.exp() * (x > 0),
    "nested": lambda x: recoup.checkpoint(lambda x: LINEAR(x).sin().exp(), x.sin()).cos(),
    "a value": lambda x: recoup.recompute(lambda x: LINEAR(x).sin())(x).exp(),
    "begins in place": nn.Sequential(nn.SiLU(inplace=True), LINEAR, nn.BatchNorm1d(64).double()),
    "gradient": takes_a_gradient,
    "raises": lambda x: {}[x.sin().exp()],
    "raises again": raises_again,
    "differs": lambda x: (x.sin() * (2 if is_second_run() else 1)).exp().cos(),
}
STAGES = [dense(0.5, 64).double() for _ in range(6)]
CALLS = {name: partial(recoup.checkpoint, fn) for name, fn in CODE.items()} | {
    f"a chain, {memory}": recoup.Sequential(*STAGES, memory=memory) for memory in ("sqrt", 1)
}
CALLS["a block of code"] = partial(recomputing, STAGES[0])
CALLS["an object"] = lambda x: recoup.checkpoint(into_an_object, x, SimpleNamespace(seen=None))


@pytest.mark.parametrize("ends", ["backward", "never", "twice", "a gradient's"])
@pytest.mark.parametrize("name", [*CALLS, "a chain that inverts"])
def test_reference_counting_alone_frees_a_region(name, ends):
    call, x = CALLS.get(name, inverting), leaf(8, 64)
    for _ in range(2):  # looked at, and later
        with no_collector(), StorageTracker() as tracker:
            with suppress(KeyError, ReplayError):
                loss = call(x * 1).square().sum()
                if ends == "twice":
                    torch.autograd.grad(loss, x, retain_graph=True)
                if ends == "a gradient's":
                    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
                    torch.autograd.grad(grad.sum(), x)
                elif ends != "never":
                    torch.autograd.grad(loss, x)
            loss = grad = None
            assert tracker.current_bytes == 0
        assert hooks_in_force() is None


@pytest.mark.parametrize("way", ["checkpoint", "value", "inputs"])
def test_a_buffer_that_is_a_residual_and_changes_before_backward(way):
    module, x = Fn(lambda x: x * module.n.add_(1)), torch.ones(3, requires_grad=True)
    module.register_buffer("n", torch.ones(()))
    call = called(way, module, *([nn.Identity()] if way == "inputs" else []))
    first, _ = call(x), call(x)
    first.sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert int(module.n) == 3


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, numbers):
        ctx.save_for_backward(x, numbers)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos(), None


def test_a_seed_that_a_kernel_has_not_written_is_no_difference(monkeypatch):
    """As attention without dropout returns it, where there is an accelerator."""
    x, draws = torch.randn(5, requires_grad=True), iter(range(100))
    code = lambda x, n: Attention.apply(x, torch.tensor([next(draws)] * n).squeeze())  # noqa: E731
    for size, found in ((1, torch.device("cuda")), (3, torch.device("cuda")), (1, None)):
        monkeypatch.setattr(outcome, "accelerator", lambda found=found: found)
        with nullcontext() if size == 1 and found else pytest.raises(ReplayError):
            recoup.checkpoint(code, x, size).sum().backward()


def test_the_mask_of_a_dropout_is_covered_by_its_product_and_others_are_sketched(monkeypatch):
    sketched, make = [], outcome.sketch_of
    monkeypatch.setattr(outcome, "sketch_of", lambda t: sketched.append(t.dtype) or make(t))
    x = torch.randn(64, 64, requires_grad=True)
    masks = (x.detach() > 0, x.detach() > 1)
    for num_sketched, code in (
        (0, lambda y, p, _: torch.native_dropout(y, p, True)[0].tanh()),
        (4, lambda y, _, mask: (y * mask + y * ~mask).tanh()),
        (2, lambda y, _, mask: torch.where(mask, y, y.clone()).tanh()),
    ):
        sketched.clear()
        recoup.checkpoint(lambda x, code=code: code(x.sin(), 0.3, masks[0]), x).sum().backward()
        assert sketched.count(torch.bool) == num_sketched
        runs = iter(((0.3, masks[0]), (0.5, masks[1])))
        y = recoup.checkpoint(lambda x, code=code, runs=runs: code(x.sin(), *next(runs)), x)
        with pytest.raises(ReplayError):
            y.sum().backward()


def part_of(part):
    def code(x, factor):  # saves what is made of the half that no factor changes, returns the rest
        h = torch.cat([x[:, :32].cosh() + 9, x[:, 32:].sin() * factor], 1).square() / 1e6
        return part(h).exp(), h

    return code


LATER = torch.arange(64) >= 32
PARTS = {
    "slice": lambda h: h[:, :32], "unbind": lambda h: h.unbind(1)[0],
    "index": lambda h: h[:, [0, 1]], "amax": lambda h: h.amax(1),
    "index_select": lambda h: h.index_select(1, torch.tensor([0, 1])),
    "gather": lambda h: h.gather(1, torch.zeros(16, 1, dtype=torch.int64)),
    "masked_select": lambda h: h.masked_select(~LATER), "max": lambda h: h.max(1).values,
    "masked_fill": lambda h: h.masked_fill(LATER, 0.0), "topk": lambda h: h.topk(2, 1).values,
    "maximum": lambda h: torch.maximum(h, torch.full((), 5e-5)),
    "pad": lambda h: F.pad(h, (0, -32)), "pool": lambda h: F.max_pool2d(h[None], (1, 64)),
}  # fmt: skip
HIDING = {
    "layer norm": lambda x, factor: F.layer_norm(x * factor, (64,), eps=1e-9).exp(),
    "rms norm": lambda x, factor: F.rms_norm(x * factor, (64,), eps=1e-12).exp(),
    "group norm": lambda x, factor: F.group_norm((x * factor)[..., None], 2, eps=1e-9).exp(),
    "batch norm": lambda x, f: F.batch_norm(x * f, None, None, training=True, eps=1e-9).exp(),
    "normalized": lambda x, factor: F.normalize(x * factor).exp(),
    "standardized": lambda x, f: (((y := x * f) - y.mean(1, True)) / y.std(1, keepdim=True)).exp(),
    "over its norm": lambda x, factor: ((y := x * factor) / y.norm(dim=1, keepdim=True)).exp(),
    **{name: part_of(part) for name, part in PARTS.items()},
}


@pytest.mark.parametrize("name", HIDING)
def test_a_factor_is_seen_where_a_result_does_not_show_it(name):
    x, code = torch.randn(16, 64, requires_grad=True), HIDING[name]
    factors = iter((1.0, 1.0, 1.0, 2.0))  # of the runs of a step that is right, and of one
    loss_of_all(recoup.checkpoint(lambda x: code(x, next(factors)), x)).backward()
    loss = loss_of_all(recoup.checkpoint(lambda x: code(x, next(factors)), x))
    with pytest.raises(ReplayError):
        loss.backward()


def test_norms_of_what_is_not_finite_zero_or_in_16_bits_are_no_error():
    def code(x, n):  # of which rounding in 16 bits is off in the second run
        normed = F.layer_norm((x * (1 + n * 2**-9)).bfloat16().float(), (64,))
        return normed.bfloat16().exp() * F.normalize(x * 0) * (x[0] / 0).norm()

    x = torch.randn(16, 64, requires_grad=True)
    runs = iter((0, 1))
    recoup.checkpoint(lambda x: code(x, next(runs)), x).sum().backward()
    norms = [outcome.difference_of_norms(*pair) for pair in (([0.0], [1.0]), ([1.0], [torch.nan]))]
    assert norms == [torch.inf] * 2
    assert outcome.difference_of_norms([100.0, 0.0, torch.nan], [100.0, 0.001, 0.0]) == 0.001


def makes_a_tensor(x):
    assert torch.ones(1).is_meta
    return (torch.ones(96, 96, device="cpu") @ x).sin()


@pytest.mark.parametrize("way", ["checkpoint", "log"])
@pytest.mark.parametrize("is_context", [True, False])
def test_the_default_device_holds_in_second_runs(is_context, way, request):
    request.addfinalizer(partial(torch.set_default_device, None))
    torch.set_default_device(None if is_context else "meta")
    with torch.device("meta") if is_context else nullcontext():
        y = called(way, Fn(makes_a_tensor))(torch.ones(96, 96, requires_grad=True, device="cpu"))
    y.sum().backward()


OF_VIEWS = {
    "saves its input again": lambda x, _: x.sin().exp().sin(),
    "attention": lambda x, _: F.scaled_dot_product_attention(x.sin(), x, x),
    "the parameter": lambda x, p: (x.sin() * p).sin(),
    "another view of it": lambda x, p: (F.layer_norm(x, x.shape[-1:]) * p.t()).sin(),
}
VIEWS = {"expanded": lambda p: p.expand(2, -1, -1), "transposed": lambda p: p.t()[None]}


@pytest.mark.parametrize("way", ["checkpoint", "value", "sqrt", "log"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("code", OF_VIEWS)
def test_a_region_that_is_given_a_view_of_a_parameter(code, view, way):
    """Learned queries, expanded over a batch: a later run is given what is no view of it."""
    p = nn.Parameter(torch.randn(8, 8))
    module = Fn(lambda x: OF_VIEWS[code](x, p))
    row = {"sqrt": [nn.Identity(), module], "log": [module, nn.Identity()]}.get(way, [module])

    def step(call):
        return torch.autograd.grad(call(VIEWS[view](p)).square().sum(), p, create_graph=True)[0]

    found, expected = step(called(way, *row)), step(module)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(g.sum(), p)[0] for g in (found, expected)))
