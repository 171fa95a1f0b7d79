"""Pure code in a region raises nothing, and leaves behind what the plain run does, bit by bit."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, default_fused_wt_fake_quant


class Fn(nn.Module):
    def __init__(self, fn, *parts):
        super().__init__()
        self.fn, self.parts = fn, nn.ModuleList(parts)

    def forward(self, x):
        return self.fn(x, *self.parts)


def recomputing(x, model):
    with recoup.recomputing():
        return model(x)


def nested(x, model):
    return recoup.checkpoint(lambda y: recoup.checkpoint(model, y) * 2.0, x) / 2.0


REGIONS = {
    "checkpoint": lambda m: Fn(lambda x, m: recoup.checkpoint(m, x), m),
    "nested": lambda m: Fn(nested, m),
    "recompute": lambda m: Fn(lambda x, m: recoup.recompute(m)(x), m),
    "recomputing": lambda m: Fn(recomputing, m),
    "inputs": lambda m: recoup.Sequential(m, nn.Identity(), memory="inputs"),
    "sqrt": lambda m: recoup.Sequential(m, *[nn.Identity()] * 3, memory="sqrt"),
    "log": lambda m: recoup.Sequential(m, *[nn.Identity()] * 7, memory="log"),
}
in_regions = pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)


def autocast(dtype):
    def run(x, *parts):
        with torch.autocast("cpu", dtype):
            for part in parts:
                x = part(x)
        return x.float()

    return Fn(run, nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 6), nn.Softmax(-1))


def routed(x, router, *experts):
    """Two of four experts a row; the first two are chosen by less than rounding."""
    scores = router(x)
    scores = torch.cat([scores[:, :2].mean(1, keepdim=True).expand(-1, 2), scores[:, 2:]], 1)
    weights, chosen = (scores + 1e-7 * scores.detach().roll(1, 0)).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for n, expert in enumerate(experts):
        rows, slot = torch.where(chosen == n)
        out = out.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])
    return out


def quantized(x, linear, of_x, of_w):
    return F.linear(of_x(x), of_w(linear.weight)).tanh()


def force(x, energy):
    return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


def scattered(x):
    places = (torch.arange(x.numel()) * 7 % 6).view_as(x)
    summed = torch.zeros_like(x).scatter_add(1, places, x.sin()).exp()
    return summed.index_add(0, torch.arange(len(x)) // 2, x.cos()).tanh()


def in_place(x, relu):
    return (relu(x * 2) + x).mul_(3).sigmoid_()


def sequence(layer):
    """A layer of sequences, of 3 with 4 steps."""

    def run(x, layer):
        found = layer(*[x.view(3, 4, 6)] * (3 if isinstance(layer, nn.MultiheadAttention) else 1))
        return (found[0] if isinstance(found, tuple) else found).reshape(12, -1)

    return Fn(run, layer)


MODELS = {
    "bfloat16": lambda: autocast(torch.bfloat16),
    "float16": lambda: autocast(torch.float16),
    "wide": lambda: nn.Sequential(nn.Linear(6, 4096), nn.LayerNorm(4096), nn.Linear(4096, 6)),
    "index": lambda: Fn(scattered),
    "bags": lambda: Fn(
        lambda x, bag: x + bag(torch.arange(24).view(12, 2) % 9), nn.EmbeddingBag(9, 6)
    ),
    "rrelu": lambda: nn.Sequential(nn.Linear(6, 600), nn.RReLU()),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 6), nn.Dropout(inplace=True)),
    "alpha dropout": lambda: nn.Sequential(
        nn.AlphaDropout(0.3), nn.SELU(), nn.FeatureAlphaDropout()
    ),
    "dropout1d": lambda: nn.Sequential(sequence(nn.Dropout1d()), nn.Tanh()),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "fake quantization": lambda: Fn(
        quantized, nn.Linear(6, 6), FusedMovingAvgObsFakeQuantize(), default_fused_wt_fake_quant()
    ),
    "lstm": lambda: sequence(nn.LSTM(6, 6, 2, dropout=0.4, batch_first=True)),
    "gru": lambda: sequence(nn.GRU(6, 6, 2, dropout=0.4, bidirectional=True)),
    "attention": lambda: sequence(nn.MultiheadAttention(6, 2, dropout=0.3)),
    "encoder": lambda: sequence(nn.TransformerEncoderLayer(6, 2, 12, 0.3)),
    "router": lambda: Fn(routed, nn.Linear(6, 4), *[nn.Linear(6, 6) for _ in range(4)]),
    "in place": lambda: Fn(in_place, nn.LeakyReLU(0.1, inplace=True)),
    "force": lambda: Fn(force, nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def left_behind(model, ending="backward"):
    """What a step leaves: outputs, gradients, buffers, and the random stream."""
    model = copy.deepcopy(model)
    torch.manual_seed(5)
    x = torch.randn(12, 6).requires_grad_()
    leaves = [x, *model.parameters()]
    y = model(x)
    torch.rand(3)
    if ending == "other threads":
        torch.set_num_threads(2)
    if ending == "retained":
        y.sin().sum().backward(retain_graph=True)
    if ending == "double":
        found = torch.autograd.grad(y.sin().sum(), leaves, create_graph=True, allow_unused=True)
        sum(g.square().sum() for g in found if g is not None).backward()
    else:
        y.exp().sum().backward()
    torch.set_num_threads(1)
    grads = [torch.zeros(()) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [y.detach(), *grads, *model.buffers(), torch.get_rng_state()]


def assert_same(got, want, **tolerance):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, **(tolerance or {"rtol": 0, "atol": 0}), equal_nan=True)


@in_regions
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_the_plain_one(name, region):
    torch.manual_seed(3)
    model = MODELS[name]()
    if name == "force" and region is REGIONS["recomputing"]:
        pytest.skip("the block says that its first step with a gradient within is an error")
    assert_same(left_behind(region(copy.deepcopy(model))), left_behind(model))


ENDS = [
    *itertools.product(["index", "dropout", "batch norm", "router"], ["retained", "double"]),
    *itertools.product(["bfloat16", "wide", "batch norm", "lstm", "router"], ["other threads"]),
]


@in_regions
@pytest.mark.parametrize(("name", "ending"), ENDS)
def test_other_ends_of_a_step(name, region, ending):
    torch.manual_seed(3)
    model = MODELS[name]()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if ending == "other threads" else {}
    got, want = left_behind(region(copy.deepcopy(model)), ending), left_behind(model, ending)
    assert_same(got, want, **tolerance)


@pytest.mark.parametrize("used", [[0], [1], [1, 0]], ids=str)
@pytest.mark.parametrize("way", ["checkpoint", "recompute", "recomputing"])
def test_exits_that_are_not_used(used, way):
    def fn(x, *, scale):
        early = (x["a"][0] * scale[0]).sin().exp()
        return early, {"late": (early.tanh() * x["b"]).cumprod(1)}

    def block(x, *, scale):
        with recoup.recomputing():
            return fn(x, scale=scale)

    def gradients(call):
        a, b, scale = (torch.linspace(0.1, n, 12).view(2, 6).requires_grad_() for n in (1, 2, 3))
        early, rest = call({"a": [a], "b": b}, scale=(scale,))
        loss = sum((early, rest["late"])[n].square().sum() for n in used)
        found = torch.autograd.grad(loss, [a, b, scale], allow_unused=True)
        return [torch.zeros(()) if g is None else g for g in found]

    checkpointed = functools.partial(recoup.checkpoint, fn)
    call = {"checkpoint": checkpointed, "recompute": recoup.recompute(fn), "recomputing": block}[
        way
    ]
    assert_same(gradients(call), gradients(fn))
