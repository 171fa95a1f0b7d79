"""Blocks that some forwards leave out: LayerDrop, and blocks that come later than planned (F3)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.planning.plan import Plan
from tests.planned_zoo import transformers_or_skip
from tests.unit.planning.test_plan import Residual


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


def square(y):
    return y.square().mean()


def outcome(model: nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[int, list[Any]]:
    """The peak of a step, and its gradients."""
    model.zero_grad()
    peak = recoup.measure(lambda: loss().backward(), device="cpu", repeats=0).peak_bytes
    return peak, [p.grad for p in model.parameters()]


def assert_keeps(
    plan: Plan,
    change: Callable[[Any, int], Any],
    loss: Callable[[], torch.Tensor],
    num: int,
    most: float = 1.0,
) -> None:
    """Check that `num` steps have the plain gradients, and at most this part of the budget."""
    results: list[list[list[Any]]] = []
    for is_planned in (False, True):
        torch.manual_seed(5)
        results.append([])
        for index in range(num):
            change(plan.model, index)
            if is_planned:
                with plan.applied():
                    peak, gradients = outcome(plan.model, loss)
                assert peak <= most * plan.budget_bytes, (
                    f"step {index}: {peak / plan.budget_bytes:.3f}"
                )
            else:
                _, gradients = outcome(plan.model, loss)
            results[-1].append(gradients)
    for wanted, found in zip(*results, strict=True):
        for one, other in zip(wanted, found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("num_layers", "rate", "scale", "share"),
    [(5, 0.3, 1.0, 0.0), (6, 0.6, 1.0, 0.4), (5, 0.3, 1.5, 0.0)],
)
def test_layers_that_are_left_out_keep_to_the_budget(
    num_layers: int, rate: float, scale: float, share: float
):
    """F3: also where the steps call all of the layers, though hardly any forward does."""
    model, x = LayerDrop(num_layers, rate, scale), torch.randn(256, 64)
    whole = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert (whole.num_seen, whole.num_blocks) == (num_layers, num_layers)
    assert [row.name for row in whole.blocks] == [f"layers.{i}" for i in range(num_layers)]
    budget = int(whole.least_bytes + share * (whole.most_bytes - whole.least_bytes))
    plan = recoup.plan(model, x, budget=budget, loss=square)

    def change(model: Any, index: int) -> None:
        model.rate = rate if index % 3 else 0.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_keeps(plan, change, lambda: square(model(x)), 6)


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
    """F3"""
    model, x = LayerDrop(6, 0.0), torch.randn(256, 64)
    model.only = range(3)
    plan = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert "seen 3 of 6 blocks" in str(plan)
    plan.apply()
    model.only = range(6)
    with pytest.warns(UserWarning, match="not at all then"):
        found, _ = outcome(model, lambda: square(model(x)))
    plan.remove()
    plain, _ = outcome(model, lambda: square(model(x)))
    assert plain - found > 64 * 4 * 256 * 4, "what was not seen kept its residuals"


def test_blocks_in_another_order_keep_what_was_planned_once():
    """F3: a block that is called again is recomputed, though the plan keeps it."""
    model, x = LayerDrop(4, 0.0), torch.randn(256, 64)
    plan = recoup.plan(model, x, budget="1 GiB", loss=square).apply()
    plan_bytes, _ = outcome(model, lambda: square(model(x)))
    for only, num_more in (((3, 1, 0, 2), 0), ((0, 1, 2, 3, 3, 3, 3), 3)):
        model.only = only
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, _ = outcome(model, lambda: square(model(x)))
        state = 256 * 64 * 4
        assert found - plan_bytes <= state * (num_more + 5)
    plan.remove()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [pytest.param("whisper", marks=pytest.mark.exhaustive), "wav2vec2"]
)
def test_models_with_layer_drop_keep_to_the_budget(name: str):
    """F3"""
    t = transformers_or_skip()
    torch.manual_seed(0)
    if name == "whisper":
        config = t.WhisperConfig(
            encoder_layers=6, decoder_layers=6, d_model=64, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, vocab_size=100,
            num_mel_bins=20, max_source_positions=64, max_target_positions=32, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
            encoder_layerdrop=0.3, decoder_layerdrop=0.3, use_cache=False,
        )  # fmt: skip
        model = t.WhisperForConditionalGeneration(config).train()
        tokens = torch.randint(3, 100, (2, 16))
        kwargs = {"input_features": torch.randn(2, 20, 128), "labels": tokens}
    else:
        config = t.Wav2Vec2Config(
            hidden_size=64, num_hidden_layers=8, num_attention_heads=4, intermediate_size=256,
            conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
            num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, layerdrop=0.3,
            vocab_size=30, apply_spec_augment=False,
        )  # fmt: skip
        model = t.Wav2Vec2ForCTC(config).train()
        kwargs = {"input_values": torch.randn(2, 2000), "labels": torch.randint(1, 30, (2, 8))}
    whole = recoup.plan(model, budget="4 GiB", **kwargs)

    def change(model: Any, index: int) -> None:
        rate = 0.3 if index % 3 else 0.0  # a forward without it calls all layers
        for module in model.modules():
            for holder in (module, getattr(module, "config", None)):
                if hasattr(holder, "layerdrop"):
                    holder.layerdrop = rate

    for share in (0.0, 0.5):
        budget = int(whole.least_bytes + share * (whole.most_bytes - whole.least_bytes))
        # Where no forward that was tried calls all layers, the plan predicts such a step.
        plan = recoup.plan(model, budget=budget, **kwargs)
        assert_keeps(plan, change, lambda: model(**kwargs).loss, 12, most=1.002)
