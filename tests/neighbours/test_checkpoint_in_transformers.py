"""recoup.checkpoint as the checkpoint function of a model of transformers (F7, F8)."""

from __future__ import annotations

import functools

import pytest
import torch

import recoup
from recoup._core.surroundings import Surroundings

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

KWARGS = [
    {},
    {"use_reentrant": False, "preserve_rng_state": True},
    {"use_reentrant": False, "determinism_check": "none", "early_stop": False, "debug": False},
]


def llama():
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, attention_dropout=0.1, use_cache=False,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def step(model, ids):
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters()], torch.rand(2)]


@pytest.mark.parametrize("kwargs", KWARGS, ids=str)
def test_as_the_checkpoint_function(kwargs, monkeypatch):
    """F8: `gradient_checkpointing_kwargs` are those of torch; F7: a layer is looked at once."""
    looks = []
    looking = Surroundings._has_looked
    monkeypatch.setattr(Surroundings, "_has_looked", lambda s: looks.append(s) or looking(s))
    model, ids = llama(), torch.randint(64, (2, 16))
    want = step(model, ids)
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(recoup.checkpoint, **kwargs)
    for _ in range(3):
        got = step(model, ids)
        assert all(map(torch.equal, got, want))
    assert len(looks) == 3  # each layer once
