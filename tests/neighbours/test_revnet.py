"""Reversible networks that are no flows: ordinary classifiers, and another library's blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.invertible import AdditiveCoupling, Squeeze
from tests.oracle import assert_same_step, run_step


def residual(channels, dropout):
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
    )


def stage(channels, num_blocks=2):
    def parts():
        return residual(channels // 2, 0.2), residual(channels // 2, 0.2)

    return [AdditiveCoupling(*parts(), condition="second") for _ in range(num_blocks)]


@pytest.mark.parametrize("otherwise", ["keep", "recompute"])
def test_gradients_norms_and_stream_are_those_of_linear(otherwise):
    torch.manual_seed(0)
    model = recoup.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        *stage(8),
        Squeeze(),
        nn.Conv2d(32, 16, 1),
        *stage(16),
        nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(16, 10),
        drift="raise",  # so that nothing mends a wrong inverse
        otherwise=otherwise,
    ).double()
    x = torch.randn(8, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    loss = lambda logits: nn.functional.cross_entropy(logits, torch.arange(8))  # noqa: E731
    want = run_step(model, x, memory="linear", loss=loss)
    got = run_step(model, x, memory="constant", loss=loss)
    assert_same_step(got, want, rtol=1e-9)
    counts = [value for name, value in got.buffers.items() if name.endswith("num_batches_tracked")]
    assert {int(count) for count in counts} == {1}


def test_a_block_is_the_one_of_revnets():
    f, g = residual(4, 0.0), residual(4, 0.0)
    block = AdditiveCoupling(f, g, condition="second").eval()
    x = torch.randn(2, 8, 6, 6)
    first, second = x.chunk(2, dim=1)
    first = first + f(second)
    second = second + g(first)
    torch.testing.assert_close(block(x)[0], torch.cat([first, second], dim=1))


class Part(nn.Module):
    """Attention or feed-forward of a Reformer, on ``(N, features, length)``."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        y = self.part(x.transpose(1, 2))
        return getattr(y, "hidden_states", y).transpose(1, 2)


def layers_of_a_reformer():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    drops = ("hidden_dropout_prob", "local_attention_probs_dropout_prob",
             "lsh_attention_probs_dropout_prob")  # fmt: skip
    config = transformers.ReformerConfig(
        hidden_size=16, num_attention_heads=2, attention_head_size=8, feed_forward_size=32,
        attn_layers=["lsh", "local", "lsh"], local_attn_chunk_length=4, lsh_attn_chunk_length=4,
        num_hashes=2, num_buckets=4, axial_pos_embds=False, max_position_embeddings=16,
        is_decoder=False, vocab_size=20, **dict.fromkeys(drops, 0.2),
    )  # fmt: skip
    return transformers.ReformerModel(config).double().train().encoder.layers


def test_a_reformer_that_draws_its_hashes():
    """As a chain in constant memory and in segments: as in linear."""
    parts = [(Part(each.attention), Part(each.feed_forward)) for each in layers_of_a_reformer()]
    blocks = [AdditiveCoupling(*pair, condition="second") for pair in parts]
    chain = recoup.Sequential(*blocks, drift="raise")
    x = torch.randn(2, 32, 16, dtype=torch.float64, requires_grad=True)
    twice = lambda chain, x: chain(torch.cat([x, x], -1).transpose(1, 2))  # noqa: E731
    want = run_step(chain, x, memory="linear", call=twice)
    for memory in ("constant", "sqrt"):
        assert_same_step(run_step(chain, x, memory=memory, call=twice), want, rtol=1e-9)
