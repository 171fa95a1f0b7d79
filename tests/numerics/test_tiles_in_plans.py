"""A model that runs calls in tiles may be planned, with the gradients it has without a plan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import recoup


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
    return [parameter.grad for parameter in model.parameters()]


def test_a_planned_model_with_tiles_within():
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(300, (2, 32))
    wanted = gradients(model, tokens)
    least = recoup.plan(model, tokens, budget="1 GiB").least_bytes
    recoup.plan(model, tokens, budget=least).apply()
    for got, want in zip(gradients(model, tokens), wanted, strict=True):
        assert torch.equal(got, want)
