"""A plan with `tiles`: the output layer of a language model, and MLPs, run in tiles."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from tests.plan_oracle import Made, assert_as_plain, step_of
from tests.planned_zoo import transformers_or_skip

VOCABULARY = 2048


def gpt2(dropout: float = 0.1) -> nn.Module:
    transformers = transformers_or_skip()
    config = transformers.GPT2Config(
        n_embd=64, n_head=4, n_layer=3, vocab_size=VOCABULARY, n_positions=128,
        use_cache=False, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)  # the head is the embedding


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


def least_plan(model, *args, tiles=True, **options):
    """The plan in tiles for little more than the least bytes."""
    plans = recoup.plan(model, *args, tiles=tiles, **options)
    plan = plans.plan(int(1.05 * plans.least_bytes))
    assert plan.planned.tiled is not None
    return plan


def step(model, tokens, labels):
    """A step with the draws of seed 3: its loss and gradients, in the order of parameters."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    loss = model(tokens, labels=labels).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def errors(found, exact):
    """How far the loss and each gradient are from exact ones, relative to their norms."""
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)])


def has_like_rows(model, rows):
    """Whether products of this machine have the same rows, however many there are."""
    gradient = torch.randn(len(rows), VOCABULARY)
    weight = model.lm_head.weight.detach()
    pairs = [(rows, lambda x: x @ weight.T), (gradient, lambda x: x @ weight)]
    return all(
        torch.equal(product(value), torch.cat([product(piece) for piece in value.split(64)]))
        for value, product in pairs
    )


def test_a_language_model_in_fewer_bytes_than_its_logits():
    """As near to float64 as without tiles; and but for the head's, bits of gradients are equal."""
    torch.manual_seed(0)
    model, (tokens, labels) = gpt2(0.0), batch()
    want = step(model, tokens, labels)
    exact = step(copy.deepcopy(model).double(), tokens, labels)
    most = recoup.plan(model, tokens, labels=labels).points[0].peak_bytes
    plan = least_plan(model, tokens, labels=labels)
    assert plan.budget_bytes < most / 2
    assert "tile: `lm_head`" in str(plan)
    with plan.applied():
        peak = recoup.measure(lambda: step(model, tokens, labels)).peak_bytes
        got = step(model, tokens, labels)
    assert peak <= plan.budget_bytes
    own, plain = errors(got, exact), errors(want, exact)
    assert own[0] <= 2 * torch.finfo(torch.float32).eps
    assert own[1:].norm() <= 1.1 * plain[1:].norm()
    assert own[1:].max() <= 1.1 * plain[1:].max()
    if has_like_rows(model, torch.randn(4 * 63, 64)):
        for place, parameter in enumerate(model.parameters(), 1):
            is_head = parameter is model.lm_head.weight
            assert own[place] <= plain[place] if is_head else torch.equal(got[place], want[place])


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


@pytest.mark.parametrize("head", HEADS)
def test_output_layers_of_all_kinds_run_in_tiles(head):
    model, (tokens, _) = Plain(change=HEADS[head]), batch()
    loss = shifted_loss(tokens)
    plan = least_plan(model, tokens, loss=loss)
    assert plan.least_bytes < recoup.plan(model, tokens, loss=loss).least_bytes / 2
    assert "tile: `head`" in str(plan)
    assert_as_plain(plan, step_of(model, tokens, loss=loss), rtol=1e-5)


def test_an_output_layer_without_a_cross_entropy_is_left_alone():
    model, (tokens, _) = Plain(change=tied), batch()
    plans = recoup.plan(model, tokens, loss=lambda y: y.square().mean(), tiles=True)
    assert "tile: `head`" not in str(plans.plan(plans.least_bytes))


def test_a_sequence_before_its_only_batch_runs_in_tiles():
    tokens = batch(256, 1)[0]
    loss = lambda logits: F.cross_entropy(logits.flatten(0, 1), tokens.flatten())  # noqa: E731
    assert "tile: `head`" in str(least_plan(Plain(), tokens, loss=loss))


def test_in_bfloat16_under_autocast():
    torch.manual_seed(0)
    model, (tokens, labels) = gpt2().eval(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        plan = least_plan(model, tokens, labels=labels)
        want = step(model, tokens, labels)
        with plan.applied():
            assert errors(step(model, tokens, labels), want).max() <= 2e-2
            logits = model(tokens, labels=labels).logits
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, logits.clone())


def test_small_gradients_in_float16():
    """A mean over many targets is divided at the end, where a gradient in 16 bits would vanish."""
    model, (tokens, _) = Plain(8), batch(1, 1024)
    scale = 2.0**16  # of a GradScaler

    def loss(logits):
        return scale * F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    exact = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    model.half()
    with least_plan(model, tokens, loss=loss).applied():
        got = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    assert errors([each.float() for each in got], exact).max() < 2e-2


def test_an_error_of_too_few_bytes_names_tiles_where_they_help():
    model, (tokens, _) = Plain(), batch()
    loss, other = shifted_loss(tokens), torch.sum  # which leaves the output layer alone
    for own, is_tiled in ((loss, False), (loss, True), (other, True)):
        with pytest.raises(recoup.errors.BudgetError) as caught:
            recoup.plan(model, tokens, loss=own, budget="1 MiB", tiles=is_tiled)
        assert ("tiles=True" in str(caught.value)) == (not is_tiled)


class Mixing(nn.Module):
    """An MLP, of which `mix` says what it does that tiles cannot."""

    def __init__(self, mix) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.mix = mix
        self.register_buffer("count", torch.zeros(()))
        self.shown = torch.zeros(())
        self.scale = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        return self.mix(self, x)


def begins_at_zero(mlp, x):
    """The branch of a residual, which begins to mix rows when it is trained."""
    last = mlp.inner(x + mlp.scale * x.norm(dim=1, keepdim=True))
    return last * mlp.scale


def of_gradients(mlp, x):
    """Only backward mixes rows."""
    mean = x.mean(1, keepdim=True)
    return mlp.inner(x + (mean - mean.detach()))


def counts(mlp, x):
    mlp.count += 1
    return mlp.inner(x)


def shows(mlp, x):
    mlp.shown = x.detach().mean()
    return mlp.inner(x)


MIXES = {
    "mean": lambda mlp, x: mlp.inner(x - x.mean(1, keepdim=True)),
    "places": lambda mlp, x: mlp.inner(x) + torch.arange(x.shape[1])[:, None] / 10,
    "gradient": of_gradients,
    "zeros": begins_at_zero,
    "draws": lambda mlp, x: mlp.inner(F.dropout(x, 0.1)),
    "counts": counts,
    "shows": shows,
    "rows": lambda mlp, x: mlp.inner(x),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", MIXES)
def test_an_mlp_runs_in_tiles_only_if_its_rows_are_independent(how):
    torch.manual_seed(0)
    model = nn.Sequential(*(
        Made(lambda block, x: x + block.mlp(block.norm(x)), norm=nn.LayerNorm(32),
             mlp=Mixing(MIXES[how])) for _ in range(3)
    ))  # fmt: skip
    x = torch.randn(2, 256, 32)
    frontier = recoup.plan(model, x, loss=lambda y: y.square().mean(), tiles=True)
    plan = frontier.plan(frontier.points[0].peak_bytes)
    if how == "rows":
        whole = recoup.plan(model, x, loss=lambda y: y.square().mean())
        assert frontier.points[0].peak_bytes < 0.75 * whole.points[0].peak_bytes
        assert "tile: `0.mlp` ... `2.mlp`" in str(plan)
        assert plan.rehearsed_peak_bytes == plan.predicted_peak_bytes
    else:  # the parts of the MLP may run in tiles, not the MLP
        modules = [] if plan.planned.tiled is None else plan.planned.tiled.modules
        assert not any(isinstance(module, Mixing) for module in modules)
    assert_as_plain(plan, step_of(model, x), rtol=1e-6)


def test_a_language_model_with_mlps_in_tiles_at_the_least_bytes():
    torch.manual_seed(0)
    config = transformers_or_skip().LlamaConfig(
        hidden_size=32, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        vocab_size=512, use_cache=False,
    )  # fmt: skip
    model = transformers_or_skip().LlamaForCausalLM(config).double()
    tokens = torch.randint(512, (1, 512))
    plan = least_plan(model, tokens, labels=tokens)
    names = {type(module).__name__ for module in plan.planned.tiled.modules}
    assert names == {"Linear", "LlamaMLP"}
    want = step(model, tokens, tokens)
    with plan.applied():
        assert recoup.measure(lambda: step(model, tokens, tokens)).peak_bytes <= plan.budget_bytes
        # Llama's loss is taken in float32, whatever the type of the model.
        assert errors(step(model, tokens, tokens), want).max() <= 1e-6
