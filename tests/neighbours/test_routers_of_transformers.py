"""Mixtral and Qwen3-MoE whose routers are a rounding step off in a second run."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torchs

import recoup
from tests.deciding import distance, perturbed_linear

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "use_cache": False,
}  # fmt: skip


def mixtral(experts):
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=8, experts_implementation=experts
    )
    return transformers.MixtralForCausalLM(config)


def qwen(experts):
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=8, moe_intermediate_size=32, head_dim=8, decoder_sparse_step=1,
        experts_implementation=experts,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def gates_of(model):
    return [layer.mlp.gate.weight for layer in model.model.layers]


@pytest.fixture(params=[(mixtral, "eager"), (qwen, "eager"), (mixtral, None), (qwen, None)],
                ids=["mixtral", "qwen", "mixtral grouped", "qwen grouped"])  # fmt: skip
def model_and_ids(request):
    torch.manual_seed(0)
    build, experts = request.param
    model = build(experts).train()
    with torch.no_grad():  # ties between four experts; large enough that a softmax shows a step
        for gate in gates_of(model):
            gate.copy_(20 * gate[:2].repeat_interleave(4, 0))
    return model, torch.randint(64, (2, 24))


def step(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def with_checkpoint(model, function):
    """Let `function` call each layer, as transformers lets the checkpoint function."""
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module._gradient_checkpointing_func = function
            module.gradient_checkpointing = True


def test_torchs_checkpoint_routes_otherwise(model_and_ids):
    model, ids = model_and_ids
    plain = step(model, ids)
    with_checkpoint(model, functools.partial(torchs, use_reentrant=False))
    with perturbed_linear(gates_of(model)):
        try:
            found = step(model, ids)
        except CheckpointError:
            return
    assert distance(found, plain) > 1e-2


def test_ours_routes_as_it_did(model_and_ids):
    model, ids = model_and_ids
    plain = step(model, ids)
    with_checkpoint(model, recoup.checkpoint)
    with perturbed_linear(gates_of(model)):
        for _ in range(2):
            assert distance(step(model, ids), plain) < 1e-4


@pytest.mark.sampled(1)
def test_a_plan_routes_as_it_did(model_and_ids):
    model, ids = model_and_ids
    plain, frontier = step(model, ids), recoup.plan(model, input_ids=ids, labels=ids)
    with frontier.plan(frontier.least_bytes).applied(), perturbed_linear(gates_of(model)):
        assert distance(step(model, ids), plain) < 1e-4
