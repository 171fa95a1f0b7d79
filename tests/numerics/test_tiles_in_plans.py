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

    def logits(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def forward(self, tokens):
        return loss_of(self.logits(tokens), tokens)


class Logits(Language):
    """The same, of which the loss is not a part."""

    def forward(self, tokens):
        return self.logits(tokens)


def loss_of(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


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


class Switched(Adapted):
    """An adapter that can be switched off, and scaled."""

    def __init__(self, base):
        super().__init__(base)
        self.is_on, self.scales = True, {"a": 2.0}
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x):
        return super().forward(x) * self.scales["a"] + self.shift if self.is_on else x


def switched(model):
    model.head = Switched(model.head)


CHANGES = {
    "a switch": lambda head: setattr(head, "is_on", False),
    "a scale": lambda head: head.scales.update(a=3.0),
    "a buffer": lambda head: setattr(head, "shift", torch.ones(1)),
    "a buffer in place": lambda head: head.shift.add_(1.0),
    "a memory": lambda head: setattr(head.b.weight, "data", torch.ones(2000, 4)),
    "a frozen weight": lambda head: head.b.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_logits_are_not_read_after_what_they_are_computed_from_has_changed(change):
    model, tokens = Logits(switched), torch.randint(2000, (4, 64))
    plans = recoup.plan(model, tokens, tiles=True, loss=lambda x: loss_of(x, tokens))
    with plans.plan(plans.least_bytes).applied():
        logits = model(tokens)
        CHANGES[change](model.head)
        with pytest.raises(ChangedError, match="`head` is computed when it is read"):
            loss_of(logits, tokens)


def test_logits_may_be_read_after_hooks_and_the_plan_have_gone():
    torch.manual_seed(0)
    model, tokens = Logits(switched), torch.randint(2000, (4, 64))
    plans = recoup.plan(model, tokens, tiles=True, loss=lambda x: loss_of(x, tokens))
    with plans.plan(plans.least_bytes).applied():
        hook = model.head.register_forward_hook(lambda module, args, output: None)
        logits = model(tokens)
        hook.remove()
    wanted = loss_of(model(tokens), tokens)
    assert torch.allclose(loss_of(logits, tokens), wanted)


@pytest.mark.filterwarnings("ignore:The first step")  # it takes more
def test_an_output_layer_that_has_become_another_runs_whole():
    torch.manual_seed(0)
    model, tokens = Language(tied), torch.randint(2000, (4, 64))
    plans = recoup.plan(model, tokens, tiles=True)
    plan, linear = plans.plan(plans.least_bytes), model.head.forward
    model.head.forward = lambda x: linear(x) + x.mean((1, 2), keepdim=True) * torch.arange(2000)
    wanted = gradients(model, tokens)
    with plan.applied():
        for got, want in zip(gradients(model, tokens), wanted, strict=True):
            assert float((got - want).norm()) <= 1e-5 * float(want.norm())


def test_a_cache_of_weights_within_an_output_layer_keeps_their_gradients():
    model, tokens = Logits(adapted), torch.randint(2000, (4, 64))
    nn.utils.parametrizations.weight_norm(model.head.b)
    plans = recoup.plan(model, tokens, tiles=True, loss=lambda x: loss_of(x, tokens))
    with plans.plan(plans.least_bytes).applied(), nn.utils.parametrize.cached():
        logits = model(tokens)
        assert model.head.b.weight.requires_grad
        loss_of(logits.clone(), tokens).backward()
    assert all(each.grad is not None for each in model.head.b.parameters())


def test_a_sum_over_ignored_labels_is_zero():
    model, tokens = Logits(tied), torch.randint(2000, (4, 64))
    plans = recoup.plan(model, tokens, tiles=True, loss=lambda x: loss_of(x, tokens))
    with plans.plan(plans.least_bytes).applied():
        loss = loss_of(model(tokens), torch.full_like(tokens, -100), reduction="sum")
        loss.backward()
    assert loss == 0


def test_a_sequence_before_its_only_batch_runs_in_tiles():
    model, tokens = Logits(tied), torch.randint(2000, (256, 1))
    plans = recoup.plan(model, tokens, tiles=True, loss=lambda x: loss_of(x, tokens))
    assert "tile: `head`" in str(plans.plan(plans.least_bytes))


def test_hooks_within_an_output_layer_see_it_whole():
    model, tokens = Language(adapted), torch.randint(2000, (4, 64))
    shapes = []
    model.head.b.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    plans = recoup.plan(model, tokens, tiles=True)
    with plans.plan(plans.least_bytes).applied():
        shapes.clear()
        model(tokens).backward()
    assert shapes == [(4, 64, 2000)]
