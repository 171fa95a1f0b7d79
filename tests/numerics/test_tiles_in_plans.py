"""A model that runs calls in tiles may be planned, with the gradients it has without a plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import ChangedError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return x + recoup.tiled(self.mlp, dim=1, tiles=4)(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(300, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 300, bias=False)
        self.head.weight = self.embedding.weight

    def loss(self, hidden, labels):
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return recoup.tiled_loss(self.loss, dim=1, tiles=4)(x, tokens)


def gradients(model, tokens):
    model.zero_grad()
    model(tokens).backward()
    return [each.grad for each in model.parameters() if each.requires_grad]


def test_a_planned_model_with_tiles_within():
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(300, (2, 32))
    wanted = gradients(model, tokens)
    least = recoup.plan(model, tokens, budget="1 GiB").least_bytes
    recoup.plan(model, tokens, budget=least).apply()
    for got, want in zip(gradients(model, tokens), wanted, strict=True):
        assert torch.equal(got, want)


class Adapted(nn.Module):
    """An output layer with an adapter of low rank around it, as peft makes it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x)) * 2.0


class Language(nn.Module):
    """A language model that returns its loss, with an output layer of some kind."""

    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(2000, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in "abc"
        )
        self.head = nn.Linear(32, 2000, bias=False)
        kind(self)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def tied(model):
    model.head.weight = model.embedding.weight


def adapted(model):
    model.head = Adapted(model.head)


def normed(model):
    nn.utils.parametrizations.weight_norm(model.head)


def dropped(model):
    recoup.weight_dropout(model, "head.weight", 0.3)


def noisy_and_tied(model):
    tied(model)
    recoup.weight_noise(model, r"(head|embedding)\.weight", std=0.1)


@pytest.mark.parametrize("kind", [tied, adapted, normed, dropped, noisy_and_tied])
def test_output_layers_of_a_plan_run_in_tiles(kind):
    torch.manual_seed(0)
    model, tokens = Language(kind), torch.randint(2000, (4, 64))
    plans = recoup.plan(model, tokens, tiles=True)
    assert plans.least_bytes < recoup.plan(model, tokens).least_bytes / 2
    torch.manual_seed(1)
    wanted = gradients(model, tokens)
    with plans.plan(plans.least_bytes).applied() as plan:
        assert "tile: `head`" in str(plan)
        torch.manual_seed(1)
        for got, want in zip(gradients(model, tokens), wanted, strict=True):
            assert float((got - want).norm()) <= 1e-5 * float(want.norm())


def test_an_adapter_that_draws_is_left_whole():
    """Its dropout would draw other numbers in tiles."""
    torch.manual_seed(0)
    model = Language(adapted)
    model.head.a = nn.Sequential(nn.Dropout(0.1), model.head.a)
    plans = recoup.plan(model, torch.randint(2000, (4, 64)), tiles=True)
    assert "tile: `head`" not in str(plans.plan(plans.least_bytes))


def test_logits_of_other_weights_are_not_read():
    """Code that swaps parameters for a call must read the logits within it."""
    model, tokens = Language(adapted), torch.randint(2000, (4, 64))
    kept = []
    model.head.register_forward_hook(lambda module, args, output: kept.append(output))
    plans = recoup.plan(model, tokens, tiles=True)
    with plans.plan(plans.least_bytes).applied():
        kept.clear()
        others = {name: p.detach() * 2 for name, p in model.named_parameters()}
        torch.func.functional_call(model, others, (tokens,))
        with pytest.raises(ChangedError, match="`head` is computed when it is read"):
            kept[0].sum()


def test_hooks_within_an_output_layer_see_it_whole():
    model, tokens = Language(adapted), torch.randint(2000, (4, 64))
    shapes = []
    model.head.b.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    plans = recoup.plan(model, tokens, tiles=True)
    with plans.plan(plans.least_bytes).applied():
        shapes.clear()
        model(tokens).backward()
    assert shapes == [(4, 64, 2000)]
