"""Blocks that some forwards leave out: LayerDrop, and blocks that come later than planned (F3)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from tests.neighbours.planned import result_of
from tests.oracle import assert_same_tensors
from tests.plan_oracle import Residual, between, names_of, peak_of, square, step_of
from tests.planned_zoo import transformers_or_skip


class LayerDrop(nn.Module):
    """Calls `among` its layers those that a draw, or `only`, says."""

    def __init__(self, num_layers: int, rate: float, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual(64) for _ in range(num_layers))
        self.rate, self.scale = rate, scale
        self.only: Iterable[int] = range(num_layers)

    def forward(self, x):
        x = x + 0 * self.layers[0].up.weight.sum()
        for index in self.only:
            if self.rate == 0 or torch.rand(()) > self.rate:
                x = self.layers[index](x)
                x = x if self.scale == 1 else x * self.scale
        return x


def assert_keeps(
    plan: Any, change: Callable[[int], None], step: Callable[[], None], num: int, most: float = 1.0
) -> None:
    """Check that `num` steps have the plain gradients, and at most this part of the budget."""

    def run(seed: int) -> Callable[[], None]:
        return lambda: (torch.manual_seed(seed), step())[1]

    for index in range(num):
        change(index)
        wanted = result_of(plan.model, run(index))
        with plan.applied():
            found = result_of(plan.model, run(index))
            peak = peak_of(plan.model, run(index))
        assert_same_tensors(found, wanted)
        assert peak <= most * plan.budget_bytes, f"step {index}: {peak / plan.budget_bytes:.3f}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("num_layers", "rate", "scale", "share"),
    [(5, 0.3, 1.0, 0.0), (6, 0.6, 1.0, 0.4), (5, 0.3, 1.5, 0.0)],
)
def test_layers_that_are_left_out_keep_to_the_budget(num_layers, rate, scale, share):
    """Also where the steps call all of the layers, though hardly any forward does."""
    model, x = LayerDrop(num_layers, rate, scale), torch.randn(256, 64)
    frontier = recoup.plan(model, x, loss=square)
    plan = frontier.plan(between(frontier, share))
    assert (plan.num_seen, plan.num_blocks) == (num_layers, num_layers)
    assert names_of(plan) == [f"layers.{i}" for i in range(num_layers)]

    def change(index: int) -> None:
        model.rate = rate if index % 3 else 0.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_keeps(plan, change, step_of(model, x), 6)


def test_a_first_forward_that_leaves_all_layers_out():
    model, x = LayerDrop(4, 0.7), torch.randn(64, 64)
    for seed in range(100):  # until one leaves them all out
        torch.manual_seed(seed)
        if all(torch.rand(()) <= 0.7 for _ in range(4)):
            break
    torch.manual_seed(seed)
    plan = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert plan.num_seen == 4


def test_blocks_that_no_forward_called_are_recomputed_and_said():
    model, x = LayerDrop(6, 0.0), torch.randn(256, 64)
    model.only = range(3)
    plan = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert "seen 3 of 6 blocks" in str(plan)
    model.only, step = range(6), step_of(model, x)
    with plan.applied(), pytest.warns(UserWarning, match="not at all then"):
        found = peak_of(model, step)
    assert peak_of(model, step) - found > 64 * 4 * 256 * 4, "what was not seen kept its residuals"


def test_blocks_in_another_order_keep_what_was_planned_once():
    """A block that is called again is recomputed, though the plan keeps it."""
    model, x = LayerDrop(4, 0.0), torch.randn(256, 64)
    step = step_of(model, x)
    with recoup.plan(model, x, budget="1 GiB", loss=square).applied():
        plan_bytes = peak_of(model, step)
        for only, num_more in (((3, 1, 0, 2), 0), ((0, 1, 2, 3, 3, 3, 3), 3)):
            model.only = only
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = peak_of(model, step)
            assert found - plan_bytes <= x.nbytes * (num_more + 5)


def whisper(t):
    config = t.WhisperConfig(
        encoder_layers=6, decoder_layers=6, d_model=64, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, vocab_size=100,
        num_mel_bins=20, max_source_positions=64, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
        encoder_layerdrop=0.3, decoder_layerdrop=0.3, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(3, 100, (2, 16))
    given = {"input_features": torch.randn(2, 20, 128), "labels": tokens}
    return t.WhisperForConditionalGeneration(config), given


def wav2vec2(t):
    config = t.Wav2Vec2Config(
        hidden_size=64, num_hidden_layers=8, num_attention_heads=4, intermediate_size=256,
        conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, layerdrop=0.3,
        vocab_size=30, apply_spec_augment=False,
    )  # fmt: skip
    given = {"input_values": torch.randn(2, 2000), "labels": torch.randint(1, 30, (2, 8))}
    return t.Wav2Vec2ForCTC(config), given


@pytest.mark.exhaustive
@pytest.mark.parametrize("build", [whisper, wav2vec2])
def test_models_with_layer_drop_keep_to_the_budget(build):
    torch.manual_seed(0)
    model, given = build(transformers_or_skip())
    frontier = recoup.plan(model.train(), **given)

    def change(index: int) -> None:
        rate = 0.3 if index % 3 else 0.0  # a forward without it calls all layers
        for module in model.modules():
            for holder in (module, getattr(module, "config", None)):
                if hasattr(holder, "layerdrop"):
                    holder.layerdrop = rate

    for share in (0.0, 0.5):
        # Where no forward that was tried calls all layers, the plan predicts such a step.
        plan = frontier.plan(between(frontier, share))
        assert_keeps(plan, change, lambda: model(**given).loss.backward(), 12, most=1.002)
