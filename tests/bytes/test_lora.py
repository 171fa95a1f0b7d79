"""LoRA dropout for a seed: no mask and no dropped copy is held, and the step is the plain one."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import recoup
from tests.alive import held_after
from tests.neighbours.planned import assert_same, result_of
from tests.oracle import tensors
from tests.plan_oracle import Made
from tests.planned_zoo import transformers_or_skip

pytestmark = [
    pytest.mark.usefixtures("measured"),
    # peft 0.21 asks transformers 5.23 for a name that version 6 has no more.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def of_four_lines(p):
    """Linear layers with adapters, which compute what those of peft do."""

    def layer():
        base = nn.Linear(32, 32).requires_grad_(False)
        return Made(
            lambda m, x: m.base(x) + m.b(m.a(m.dropout(x))) * 2.0, base=base,
            dropout=nn.Dropout(p) if p else nn.Identity(),
            a=nn.Linear(32, 4, bias=False), b=nn.Linear(4, 32, bias=False),
        )  # fmt: skip

    parts = (part for _ in range(3) for part in (layer(), nn.GELU()))
    return nn.Sequential(*parts), (torch.randn(16, 32),)


def of_peft(p):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = transformers_or_skip()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)
    )
    adapters = peft.LoraConfig(
        r=4, lora_dropout=p, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(llama, adapters), (torch.randint(64, (2, 16)),)


def loss_of(model, inputs):
    return sum(each.square().mean() for each in tensors(model(*inputs)))


def held(model, inputs):
    loss_of(model, inputs)  # what is made once
    return held_after(functools.partial(loss_of, model, inputs), ()).num_bytes


@pytest.mark.parametrize("build", [of_four_lines, of_peft])
def test_no_mask_and_no_dropped_copy_is_held_and_the_step_is_the_plain_one(build):
    torch.manual_seed(0)
    without = held(*build(0.0))
    plain, inputs = build(0.1)
    model = recoup.recompute_(copy.deepcopy(plain), nn.Dropout)
    assert held(plain, inputs) > 1.1 * without
    assert held(model, inputs) == without
    found, want = (
        result_of(each, lambda each=each: loss_of(each, inputs).backward())
        for each in (model, plain)
    )
    assert any(name.startswith("grad") for name in want)
    assert_same(found, want)
