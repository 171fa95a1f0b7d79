"""Models that train by methods beside `forward`: every read noisy, one draw a step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.errors import BudgetError
from recoup.weights import applied
from tests.unit.weights.plain_run import recorded, weights_used


class Vae(nn.Module):
    """Trained by `encode`, `decode` and a loss; its decoder reads the weights of its encoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.mean, self.log_var = nn.Linear(8, 3), nn.Linear(8, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.Tanh())
        self.run = lambda module, x: module(x)

    def encode(self, x):
        h = self.run(self.encoder, x)
        return self.mean(h), self.log_var(h)

    def decode(self, z):
        return F.linear(self.run(self.decoder, z), self.encoder[0].weight.t())

    def loss(self, x):
        mean, log_var = self.encode(x)
        again, _ = self.encode(self.decode(mean))
        return (self.decode(mean) - x).square().sum() + log_var.exp().sum() + again.sum()


class Clip(nn.Module):
    """Two towers, a projection that is a parameter, and a loss that calls both by methods."""

    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
        self.words = nn.Embedding(6, 8)
        self.projection = nn.Parameter(torch.randn(8, 4) / 3)
        self.run = lambda module, x: module(x)

    def encode_image(self, x):
        return F.normalize(self.run(self.images, x) @ self.projection, dim=-1)

    def encode_text(self, ids):
        return F.normalize(self.run(self.words, ids).mean(1) @ self.projection, dim=-1)

    def loss(self, x):
        logits = self.encode_image(x) @ self.encode_text(x.abs().long() % 6).t()
        return F.cross_entropy(logits, torch.arange(len(x))) + self.projection.square().sum()


PATTERN = r".*weight|projection"
RUNS = {
    "plain": lambda module, x: module(x),
    "recoup.checkpoint": recoup.checkpoint,
    "torch.checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False),
}


def plain_gradients(model, made, x):
    """Gradients of autograd over the weights that were drawn, by name."""
    raw = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    weights = weights_used(model, made, raw)
    plain = type(model)().double()
    with recoup.weights.disabled(model):
        for name, weight in weights.items():
            owner, _, key = name.rpartition(".")
            owner = plain.get_submodule(owner)
            del owner._parameters[key]
            setattr(owner, key, weight)
        if hasattr(plain, "projection"):  # a penalty is one of the parameter
            loss = plain.loss(x) - plain.projection.square().sum()
            loss = loss + raw["projection"].square().sum()
        else:
            loss = plain.loss(x)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in raw.items()}


@pytest.mark.parametrize("way", [*RUNS, "sqrt", "plan"])
@pytest.mark.parametrize("kind", [Vae, Clip])
def test_methods_under_every_way_to_remember_less(kind, way):
    """A loss by methods has one draw a weight, and gradients of autograd over these weights."""
    torch.manual_seed(0)
    model = kind().double()
    x = torch.randn(4, 6, dtype=torch.float64)
    tower = "encoder" if kind is Vae else "images"
    recoup.weight_noise(model, PATTERN, std=0.3)
    recoup.weight_dropout(model, r".*0\.weight", p=0.3)
    if way == "sqrt":
        setattr(model, tower, recoup.Sequential(*getattr(model, tower), memory="sqrt"))
    elif way == "plan":
        part = getattr(model, tower)
        with pytest.raises(BudgetError) as caught:
            recoup.plan(part, x, budget=1, loss=torch.sum)
        recoup.plan(part, x, budget=caught.value.least_bytes, loss=torch.sum).apply()
    else:
        model.run = RUNS[way]
    num_drawn = len(applied(model))
    for _ in range(2):
        model.zero_grad()
        with recorded() as made:
            loss = model.loss(x)
            steps = {each.step for each in made}
            loss.backward()
        assert len(made) == len(steps) == num_drawn, "one draw a weight, none in backward"
        want, gradients = plain_gradients(model, made, x)
        torch.testing.assert_close(loss.detach(), want, rtol=1e-12, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, gradients[name], rtol=1e-10, atol=1e-12, msg=name
            )


def test_accumulated_gradients_of_methods():
    """Four backwards before a step of the optimizer have a draw each."""
    model = recoup.weight_noise(Clip(), PATTERN, std=lambda step: 0.1)
    x = torch.randn(4, 6)
    with recorded() as made:
        for _ in range(4):
            model.loss(x).backward()
    assert len(made) == 4 * len(applied(model))
    assert len({each.seed for each in made}) == len(made)
    assert applied(model)[0].step == 4
