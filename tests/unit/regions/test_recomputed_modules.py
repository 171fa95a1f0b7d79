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
from tests.oracle import tensors

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
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(5))


def left_by(model, x=None, call=None):
    """All that a step of `model` leaves behind."""
    x = batch() if x is None else x
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    model.zero_grad()
    torch.manual_seed(1)
    output = model(x) if call is None else call(model, x)
    output = output.logits if hasattr(output, "logits") else tensors(output)[0]
    output.float().square().sum().backward()
    left = {"output": output.detach().as_subclass(torch.Tensor), "stream": torch.get_rng_state()}
    left |= {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
    left |= {name: each.clone() for name, each in model.named_buffers()}
    return left if x.grad is None else {**left, "gradient of x": x.grad}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (value is None and got[name] is None) or torch.equal(got[name], value), name


def recomputed(model, *types):
    return recoup.recompute_(copy.deepcopy(model), *types)


def held(model, x=None):
    """The bytes that a forward leaves, beside its output."""
    x = batch() if x is None else x
    of_outputs = sum(each.nbytes for each in tensors(model(x)))
    return held_after(lambda: model(x)).num_bytes - of_outputs


# -- bytes -----------------------------------------------------------------------------------------


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
    model, other = normed(), normed()
    again = lambda model: recoup.recompute_(model, nn.LayerNorm, nn.Linear)  # noqa: E731
    for apply in REPARAMETRIZED:
        apply(model)
    for apply in (*REPARAMETRIZED[:place], again, *REPARAMETRIZED[place:]):
        apply(other)
    want = left_by(model)
    for each in (other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert_same(left_by(each), want)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)  # one graph: one forward
    assert_same(left_by(compiled._orig_mod, call=lambda _, x: compiled(x)), left_by(model))
    for each in (model, other):
        recoup.weights.remove(each)
    assert_same(left_by(other), left_by(model))
    kinds = [type(part) for part in again(normed()).modules()]
    assert [type(part) for part in other.modules()] == kinds


# -- what it leaves as it was ----------------------------------------------------------------------


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
    kinds = [type(part) for part in other.modules()]
    assert recoup.recompute_(other, nn.GELU) is other  # a second call changes nothing
    assert [type(part) for part in other.modules()] == kinds


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(how):
    model = recomputed(normed(), *CHOSEN)
    other = COPIES[how](model)
    assert [type(part) for part in other.modules()] == [type(part) for part in model.modules()]
    assert_same(left_by(other), left_by(model))
    layers = (nn.Linear(WIDTH, WIDTH), recoup.Recompute(F.gelu), recoup.Recompute(nn.LayerNorm(16)))
    module = nn.Sequential(*layers)
    assert_same(left_by(COPIES[how](module)), left_by(module))
    assert held(COPIES[how](module)) == held(module)


def test_a_graph_is_the_plain_one():
    model, x = recomputed(normed(), *CHOSEN).eval(), batch()
    targets = [
        [node.target for node in torch.export.export(each, (x,)).graph.nodes]
        for each in (model, normed().eval())
    ]
    assert targets[0] == targets[1]
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), recoup.Recompute(nn.GELU()))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))


# -- Recompute -------------------------------------------------------------------------------------


def test_the_module_form():
    module = recoup.Recompute(nn.LayerNorm(WIDTH))
    assert list(module.state_dict()) == ["fn.weight", "fn.bias"]
    assert not module.eval().fn.training
    assert repr(recoup.Recompute(F.gelu)) == "Recompute(gelu)"
    assert "(fn): LayerNorm" in repr(module)
    pair = recoup.Recompute(lambda x, *, scale: (x.sin() * scale, {"x": x.cos()}))
    x = batch().requires_grad_()
    first, others = pair(x, scale=2.0)
    (first * others["x"]).sum().backward()
    assert torch.allclose(x.grad, 2 * (2 * x).cos(), atol=1e-5)
