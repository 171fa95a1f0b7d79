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


def assert_close(got, want, tolerance):
    for a, b in zip(got[1], want[1], strict=True):
        assert float((a - b).norm() / b.norm().clamp_min(1e-30)) <= tolerance
    assert float((got[0] - want[0]).abs() / want[0].abs()) <= tolerance


def errors(found, exact):
    """How far each gradient is from that in float64, relative to its norm."""
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(found[1], exact[1], strict=True)])


def has_like_rows(model, rows):
    """Whether products of this machine have the same rows, however many there are."""
    gradient = torch.randn(len(rows), VOCABULARY)
    weight = model.lm_head.weight.detach()
    pairs = [(rows, lambda x: x @ weight.T), (gradient, lambda x: x @ weight)]
    return all(
        torch.equal(product(value), torch.cat([product(piece) for piece in value.split(64)]))
        for value, product in pairs
    )


@pytest.mark.parametrize("build", [functools.partial(gpt2, 0.0), llama], ids=["gpt2", "llama"])
def test_a_language_model_in_fewer_bytes_than_its_logits(build):
    """As near to float64 as without tiles; and but for the head's, bits of gradients are equal."""
    torch.manual_seed(0)
    model, (tokens, labels) = build(), batch()
    want = step(model, tokens, labels)
    exact = step(copy.deepcopy(model).double(), tokens, labels)
    whole = recoup.plan(model, tokens, labels=labels)
    tiled = recoup.plan(model, tokens, labels=labels, tiles=True)
    least, most = int(1.02 * tiled.points[0].peak_bytes), whole.points[0].peak_bytes
    assert least < most / 3
    is_alike = has_like_rows(model, torch.randn(4 * 63, 64))
    for budget in (least, most // 2):
        plan = tiled.plan(budget)
        assert "tile: `lm_head`" in str(plan)
        with plan.applied():
            assert recoup.measure(lambda: step(model, tokens, labels)).peak_bytes <= budget
            got = step(model, tokens, labels)
        eps = torch.finfo(torch.float32).eps
        assert float((got[0] - exact[0]).abs()) <= 2 * eps * float(exact[0])
        own, plain = errors(got, exact), errors(want, exact)
        assert own.norm() <= 1.1 * plain.norm()
        assert own.max() <= 1.1 * plain.max()
        for place, parameter in enumerate(model.parameters()):
            if is_alike and parameter is model.lm_head.weight:
                assert own[place] <= plain[place]
            elif is_alike:
                assert torch.equal(got[1][place], want[1][place])


def tied(model):
    model.head.weight = model.embedding.weight


def noisy_and_tied(model):
    tied(model)
    recoup.weight_noise(model, r"(head|embedding)\.weight", std=0.1)


HEADS = {
    "as it is": lambda model: None,
    "tied": tied,
    "normed": lambda model: nn.utils.parametrizations.weight_norm(model.head),
    "dropped": lambda model: recoup.weight_dropout(model, "head.weight", 0.3),
    "noisy and tied": noisy_and_tied,
    "frozen": lambda model: model.head.requires_grad_(False),
    "after a frozen body": lambda model: model.blocks.requires_grad_(False),
}


@pytest.mark.parametrize(
    ("head", "dtype"), [*((head, torch.float32) for head in HEADS), ("as it is", torch.float64)]
)
def test_output_layers_of_all_kinds_run_in_tiles(head, dtype):
    model, (tokens, _) = Plain(change=HEADS[head]).to(dtype), batch()
    loss = shifted_loss(tokens)
    plans = recoup.plan(model, tokens, loss=loss, tiles=True)
    assert plans.least_bytes < recoup.plan(model, tokens, loss=loss).least_bytes / 2
    plan = plans.plan(plans.least_bytes)
    assert "tile: `head`" in str(plan)
    rtol = 1e-10 if dtype is torch.float64 else 1e-5
    assert_as_plain(plan, step_of(model, tokens, loss=loss), rtol=rtol)


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
            assert_close(step(model, tokens, labels), want, 2e-2)
            logits = model(tokens, labels=labels).logits
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, logits.clone())


def test_small_gradients_in_float16():
    """A mean over many targets is divided at the end, where a gradient in 16 bits would vanish."""
    model, (tokens, _) = Plain(8), batch(1, 2048)
    scale = 2.0**16  # of a GradScaler

    def loss(logits):
        return scale * F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    exact = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    model.half()
    plan = recoup.plan(model, tokens, loss=loss, budget="64 MiB", tiles=True)
    assert plan.planned.tiled is not None
    with plan.applied():
        got = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    for a, b in zip(got, exact, strict=True):
        assert float((a.float() - b).norm() / b.norm()) < 2e-2


@pytest.mark.parametrize("tiles", [1, -2, "8", 2.0])
def test_the_number_of_tiles_is_checked(tiles):
    with pytest.raises(ValueError, match="`tiles`"):
        recoup.plan(Plain(), batch()[0], budget="9 MiB", tiles=tiles)


def test_an_error_of_too_few_bytes_names_tiles():
    model, (tokens, _) = Plain(), batch()
    for loss in (shifted_loss(tokens), lambda logits: logits.square().mean()):  # or left alone
        for is_tiled in (False, True):
            with pytest.raises(recoup.errors.BudgetError) as caught:
                recoup.plan(model, tokens, loss=loss, budget="1 MiB", tiles=is_tiled)
            assert not is_tiled or "tiles=True" not in str(caught.value)
    with pytest.raises(recoup.errors.BudgetError, match="tiles=True"):
        recoup.plan(model, tokens, loss=shifted_loss(tokens), budget="1 MiB")


def test_mlps_in_tiles_of_their_own_are_planned_as_they_are():
    torch.manual_seed(0)
    model, tokens = llama(32, 2, 512).double(), torch.randint(512, (1, 512))
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
        assert_close(step(model, tokens, tokens), want, 1e-6)
