"""A plan with `tiles`: the output layer of a language model runs in tiles."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from tests.plan_oracle import assert_as_plain, step_of
from tests.planned_zoo import transformers_or_skip

VOCABULARY = 4096


def gpt2(dropout: float = 0.1, layers: int = 3) -> nn.Module:
    transformers = transformers_or_skip()
    config = transformers.GPT2Config(
        n_embd=64, n_head=4, n_layer=layers, vocab_size=VOCABULARY, n_positions=128,
        use_cache=False, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)  # the head is the embedding


def llama(width: int = 64, heads: int = 4, vocabulary: int = VOCABULARY) -> nn.Module:
    transformers = transformers_or_skip()
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=128, num_hidden_layers=3, num_attention_heads=heads,
        vocab_size=vocabulary, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Plain(nn.Module):
    """A language model that returns its logits."""

    def __init__(self, width: int = 64, change=lambda model: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in "abc"
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        change(self)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch(num: int = 4, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (num, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, : length // 4] = -100
    return tokens, labels


def shifted_loss(tokens):
    def loss(logits):
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].flatten())

    return loss


def step(model, tokens, labels, **more):
    """A step with the draws of seed 3: its loss and gradients, in the order of parameters."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    output = model(tokens, labels=labels, **more)
    output.loss.backward()
    return output.loss.detach(), [p.grad for p in model.parameters()]


def errors(found, wanted):
    """How far the loss and each gradient are from others, relative to their norms."""
    pairs = zip([found[0], *found[1]], [wanted[0], *wanted[1]], strict=True)
    return torch.stack([(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in pairs])


@pytest.mark.parametrize("build", [functools.partial(gpt2, 0.0), llama], ids=["gpt2", "llama"])
def test_a_language_model_in_fewer_bytes_than_its_logits(build):
    """As near to float64 as without tiles."""
    torch.manual_seed(0)
    model, (tokens, labels) = build(), batch()
    want = step(model, tokens, labels)
    exact = step(copy.deepcopy(model).double(), tokens, labels)
    whole = recoup.plan(model, tokens, labels=labels)
    tiled = recoup.plan(model, tokens, labels=labels, tiles=True)
    least, most = int(1.02 * tiled.points[0].peak_bytes), whole.points[0].peak_bytes
    assert least < most / 3
    for budget in (least, most // 2):
        plan = tiled.plan(budget)
        assert "tile: `lm_head`" in str(plan)
        with plan.applied():
            assert recoup.measure(lambda: step(model, tokens, labels)).peak_bytes <= budget
            got = step(model, tokens, labels)
        own, plain = errors(got, exact), errors(want, exact)
        assert own[0] <= 2 * torch.finfo(torch.float32).eps
        assert own.norm() <= 1.1 * plain.norm()
        assert own.max() <= 1.1 * plain.max()


def tied(model):
    model.head.weight = model.embedding.weight


def noisy_and_tied(model):
    tied(model)
    recoup.weight_noise(model, r"(head|embedding)\.weight", std=0.1)


HEADS = {
    "as it is": lambda model: None,
    "normed": lambda model: nn.utils.parametrizations.weight_norm(model.head),
    "noisy and tied": noisy_and_tied,
    "frozen": lambda model: model.head.requires_grad_(False),
    "after a frozen body": lambda model: model.blocks.requires_grad_(False),
}


@pytest.mark.parametrize("head", HEADS)
def test_output_layers_of_all_kinds_run_in_tiles(head):
    model, (tokens, _) = Plain(change=HEADS[head]), batch()
    loss = shifted_loss(tokens)
    plans = recoup.plan(model, tokens, loss=loss, tiles=True)
    assert plans.least_bytes < recoup.plan(model, tokens, loss=loss).least_bytes / 2
    plan = plans.plan(plans.least_bytes)
    assert "tile: `head`" in str(plan)
    assert_as_plain(plan, step_of(model, tokens, loss=loss), rtol=1e-5)


def test_a_sequence_before_its_only_batch_runs_in_tiles():
    model, tokens = Plain(), batch(256, 1)[0]
    loss = lambda logits: F.cross_entropy(logits.flatten(0, 1), tokens.flatten())  # noqa: E731
    plans = recoup.plan(model, tokens, tiles=True, loss=loss)
    assert "tile: `head`" in str(plans.plan(plans.least_bytes))


def test_in_bfloat16_under_autocast():
    torch.manual_seed(0)
    model, (tokens, labels) = gpt2().eval(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        plan = recoup.plan(model, tokens, labels=labels, budget="8 MiB", tiles=True)
        want = step(model, tokens, labels)
        with plan.applied():
            assert errors(step(model, tokens, labels), want).max() <= 2e-2
            logits = model(tokens, labels=labels).logits
    assert logits.dtype == torch.bfloat16


def test_small_gradients_in_float16():
    """A mean over many targets is divided at the end, where a gradient in 16 bits would vanish."""
    model, (tokens, _) = Plain(8), batch(1, 512)
    scale = 2.0**14  # of a GradScaler

    def loss(logits):
        return scale * F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    exact = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    model.half()
    plan = recoup.plan(model, tokens, loss=loss, budget="16 MiB", tiles=True)
    assert plan.planned.tiled is not None
    with plan.applied():
        got = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    for a, b in zip(got, exact, strict=True):
        assert float((a.float() - b).norm() / b.norm()) < 2e-2


def test_an_error_of_too_few_bytes_names_tiles():
    model, (tokens, _) = Plain(), batch()
    left_alone, tiled = (lambda logits: logits.square().mean()), shifted_loss(tokens)
    for loss, tiles in ((left_alone, True), (tiled, True), (tiled, False)):
        with pytest.raises(recoup.errors.BudgetError) as caught:
            recoup.plan(model, tokens, loss=loss, budget="1 MiB", tiles=tiles)
        assert ("tiles=True" in str(caught.value)) == (not tiles)


def test_mlps_in_tiles_of_their_own_are_planned_as_they_are():
    torch.manual_seed(0)
    model, tokens = llama(32, 2, 512).double(), torch.randint(512, (1, 256))
    want = step(model, tokens, tokens)
    least = recoup.plan(model, tokens, labels=tokens, tiles=True).points[0].peak_bytes
    for layer in model.model.layers:
        layer.mlp.forward = recoup.tiled(layer.mlp.forward, dim=1, tiles=8)
    frontier = recoup.plan(model, tokens, labels=tokens, tiles=True)
    budget = frontier.points[0].peak_bytes
    assert budget < 0.8 * least
    with frontier.plan(budget).applied():
        assert recoup.measure(lambda: step(model, tokens, tokens)).peak_bytes <= budget
        # Llama's loss is taken in float32, whatever the type of the model.
        assert errors(step(model, tokens, tokens), want).max() <= 1e-6
