"""Stores of gradients in code of others: a compiler, and checkpoints of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import GradientError
from tests.oracle import assert_same_tensors
from tests.plan_oracle import Made

pytestmark = [
    # What the compiler does on its own account.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
EXACT = 1e-12
in_all_modes = pytest.mark.parametrize("mode", ["auto", "grad", "harvest", "collecting"])


def assert_collected(model, losses, mode, call=None):
    """A store collects what plain backwards leave in `.grad`, where it leaves nothing."""
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    for loss in losses:
        loss(plain).backward()
    want = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    store = recoup.GradStore(model.parameters())
    torch.manual_seed(3)
    for loss in losses:
        value = loss(model if call is None else call)
        if mode == "collecting":
            with store.collecting():
                value.backward()
        else:
            store.backward(value, mode=mode)
    assert all(p.grad is None for p in model.parameters())
    assert_same_tensors(store.named(model), want, EXACT)
    return want


@pytest.mark.sampled(1)
@in_all_modes
def test_a_compiled_model(mode, fresh_compiler):
    """What it does not use is absent; the names are those of the model inside."""
    parts = {"used": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "unused": nn.Linear(6, 6)}
    model = Made(lambda model, x: model.norm(model.used(x)).tanh(), **parts).double()
    compiled = torch.compile(model, backend="aot_eager")
    losses = [lambda model, x=x: model(x).square().mean() for x in torch.randn(3, 4, 6).double()]
    want = assert_collected(model, losses, mode, call=compiled)
    assert sorted(want) == ["norm.bias", "norm.weight", "used.bias", "used.weight"]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.sampled(4)
@in_all_modes
@pytest.mark.parametrize("kind", [None, "non-reentrant", "reentrant"])
def test_gpt2_with_its_own_checkpoints(kind, mode):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 31, "n_positions": 16}
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double().train()
    assert model.lm_head.weight is model.transformer.wte.weight
    if kind is not None:
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        if kind == "reentrant":
            model.enable_input_require_grads()
    words = torch.randint(31, (3, 2, 10))
    losses = [lambda m, x=x: m(input_ids=x, labels=x).loss for x in words]
    if kind == "reentrant" and mode == "grad":
        with pytest.raises(GradientError, match="use_reentrant=False"):
            assert_collected(model, losses, mode)
        assert all(p.grad is None for p in model.parameters())
        return
    assert len(assert_collected(model, losses, mode)) == len(list(model.parameters()))
