"""Modules that are recomputed: the same numbers, names and types, and fewer bytes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from tests.alive import held_after
from tests.oracle import assert_same_step, run_step, tensors

WIDTH, HIDDEN, BATCH = 16, 64, 32
HIDDEN_BYTES = BATCH * HIDDEN * 4
CHOSEN = (nn.GELU, nn.Dropout, nn.LayerNorm)


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(), nn.Linear(HIDDEN, WIDTH)
    )


def normed():
    return nn.Sequential(nn.LayerNorm(WIDTH), *perceptron(), nn.LayerNorm(WIDTH))


def batch():
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(5)).requires_grad_()


def recomputed(model, *types):
    return recoup.recompute_(copy.deepcopy(model), *types)


def held(model):
    """The bytes that a forward leaves, beside its output."""
    x = batch()
    of_outputs = sum(each.nbytes for each in tensors(model(x)))
    return held_after(lambda: model(x)).num_bytes - of_outputs


def test_outputs_are_not_held():
    model = perceptron()
    # The output of the first layer, the mask of the dropout, and what the last layer is given.
    assert held(model) >= 3 * HIDDEN_BYTES
    assert held(recomputed(model, nn.GELU, nn.Dropout)) == HIDDEN_BYTES
    layers = (nn.Linear(WIDTH, HIDDEN), recoup.Recompute(F.gelu), recoup.Recompute(nn.Dropout()))
    assert held(nn.Sequential(*layers, nn.Linear(HIDDEN, WIDTH))) == HIDDEN_BYTES


REPARAMETRIZED = (
    lambda model: recoup.weight_noise(model, r".*weight", std=0.1),
    lambda model: recoup.weight_dropout(model, r"1\.weight", p=0.3),
)


@pytest.mark.parametrize("place", range(3))
def test_before_between_and_after_what_reparametrizes_its_weights(place):
    model, other, x = normed(), normed(), batch()
    again = lambda model: recoup.recompute_(model, nn.LayerNorm, nn.Linear)  # noqa: E731
    for apply in REPARAMETRIZED:
        apply(model)
    for apply in (*REPARAMETRIZED[:place], again, *REPARAMETRIZED[place:]):
        apply(other)
    want = run_step(model, x)
    for each in (other, pickle.loads(pickle.dumps(other))):
        assert_same_step(run_step(each, x), want)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)  # one graph: one forward
    torch.manual_seed(11)
    assert torch.equal(compiled(x), want.outputs[0])
    for each in (model, other):
        recoup.weights.remove(each)
    assert_same_step(run_step(other, x), run_step(model, x))
    assert [*map(type, other.modules())] == [*map(type, again(normed()).modules())]


def test_names_and_types_stay():
    model = normed()
    other = recomputed(model, *CHOSEN)
    other.load_state_dict(model.state_dict(), strict=True)
    for part, plain in zip(other.modules(), model.modules(), strict=True):
        assert isinstance(part, type(plain))
        assert type(part).__name__ == type(plain).__name__
        assert type(part).__module__ == type(plain).__module__
        assert (type(part) is not type(plain)) == isinstance(plain, CHOSEN)
    assert repr(recoup.recompute_(nn.GELU(), nn.GELU)) == "GELU(approximate='none', recomputed)"
    kinds = [*map(type, other.modules())]
    assert recoup.recompute_(other, nn.GELU) is other  # a second call changes nothing
    assert [*map(type, other.modules())] == kinds


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(how):
    layers = (nn.Linear(WIDTH, WIDTH), recoup.Recompute(F.gelu), recoup.Recompute(nn.LayerNorm(16)))
    for model in (recomputed(normed(), *CHOSEN), nn.Sequential(*layers)):
        other = how(model)
        assert [*map(type, other.modules())] == [*map(type, model.modules())]
        assert_same_step(run_step(other, batch()), run_step(model, batch()))
        assert held(other) == held(model)


def test_a_graph_is_the_plain_one():
    model, x = recomputed(normed(), *CHOSEN).eval(), batch()
    graphs = [torch.export.export(each, (x,)).graph for each in (model, normed().eval())]
    ours, plain = ([node.target for node in graph.nodes] for graph in graphs)
    assert ours == plain
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), recoup.Recompute(nn.GELU()))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))


def test_the_module_form():
    module = recoup.Recompute(nn.LayerNorm(WIDTH))
    assert list(module.state_dict()) == ["fn.weight", "fn.bias"]
    assert not module.eval().fn.training
    assert repr(recoup.Recompute(F.gelu)) == "Recompute(gelu)"
    assert "(fn): LayerNorm" in repr(module)
    pair = recoup.Recompute(lambda x, *, scale: (x.sin() * scale, {"x": x.cos()}))
    x = batch()
    first, others = pair(x, scale=2.0)
    (first * others["x"]).sum().backward()
    assert torch.allclose(x.grad, 2 * (2 * x).cos(), atol=1e-5)
