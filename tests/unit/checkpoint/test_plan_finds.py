"""Blocks that a plan finds by itself where nothing repeats in the tree of modules (F10)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from tests.planned_zoo import transformers_or_skip
from tests.unit.checkpoint.test_plan import Residual


class Recurrent(nn.Module):
    """A list of modules that have none within."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return x


class OneForAll(nn.Module):
    """One block that is called many times."""

    def __init__(self, num_calls: int = 3) -> None:
        super().__init__()
        self.block = Residual(32)
        self.num_calls = num_calls

    def forward(self, x):
        for _ in range(self.num_calls):
            x = self.block(x)
        return x


def square(y):
    return y.square().mean()


@pytest.mark.parametrize(
    ("make", "shape", "names"),
    [
        (Recurrent, (32, 8, 16), [f"layers.{i}" for i in range(4)]),
        (OneForAll, (64, 32), ["block"] * 3),
    ],
)
def test_blocks_without_a_tree_are_found(make, shape, names):
    """F10"""
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    square(model(x)).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    whole = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert [row.name for row in whole.blocks] == names
    assert whole.least_bytes < whole.most_bytes
    plan = recoup.plan(model, x, budget=whole.least_bytes, loss=square)
    model.zero_grad()
    with plan.applied():
        square(model(x)).backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_the_shared_layer_of_albert_is_found():
    """F10"""
    t = transformers_or_skip()
    torch.manual_seed(0)
    config = t.AlbertConfig(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=2, intermediate_size=64,
        vocab_size=50, embedding_size=16,
    )  # fmt: skip
    model, tokens = t.AlbertForMaskedLM(config).train(), torch.randint(50, (2, 16))
    plan = recoup.plan(model, budget="1 GiB", input_ids=tokens, labels=tokens)
    assert len(plan.blocks) == 3
    assert plan.least_bytes < plan.most_bytes


class Holding(Residual):
    """Keeps something of its forward as an attribute."""

    aux: torch.Tensor

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        self.aux = hidden
        return x + self.down(hidden)


def test_a_plan_says_what_others_hold():
    """F11: how many bytes, by which attribute, and what to switch off."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Holding() for _ in range(2))), torch.randn(64, 32)
    shown = str(recoup.plan(model, x, budget="1 GiB", loss=square))
    assert "held by others: 64 KiB of the residuals of 2 blocks (`0` first)" in shown
    assert "held by attributes: `0.aux` and 1 more" in shown
    plain = recoup.plan(nn.Sequential(Residual(), Residual()), x, budget="1 GiB", loss=square)
    assert plain.held_by_others == ()


@pytest.mark.slow
def test_a_plan_says_that_a_cache_or_a_checkpoint_is_on():
    """F11"""
    t = transformers_or_skip()
    config = t.T5Config(
        num_layers=2, num_decoder_layers=2, d_model=32, d_ff=64, d_kv=8, num_heads=4,
        vocab_size=50, decoder_start_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(50, (2, 12))
    model = t.T5ForConditionalGeneration(config).train()
    kwargs = {"input_ids": tokens, "labels": tokens, "budget": "1 GiB"}
    assert "pass use_cache=False" in str(recoup.plan(model, **kwargs))
    assert recoup.plan(model, use_cache=False, **kwargs).held_by_others == ()
