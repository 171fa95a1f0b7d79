"""Models and comparisons for calls in tiles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from tests.oracle import assert_same_tensor, loss_of_all, tensors

N, L, D, V = 3, 13, 6, 11
CALLS = {"tiled": recoup.tiled, "tiled_loss": recoup.tiled_loss}
both = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)).double()


def rows(*shape, **more):
    torch.manual_seed(2)
    return torch.randn(*shape, **{"dtype": torch.float64, "requires_grad": True} | more)


def targets(ignored="some"):
    torch.manual_seed(3)
    labels = torch.randint(V, (N, L))
    for kind, of_rows in {"some": slice(1, L, 3), "a tile": slice(6), "all": slice(L)}.items():
        if kind == ignored:
            labels[:, of_rows] = -100
    return labels


class Model(nn.Module):
    """A body, and a head that may be tied to the embedding."""

    def __init__(self, tied=False, bias=True, p=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.body = nn.Embedding(V, D), nn.Linear(D, D)
        self.norm, self.dropout = nn.LayerNorm(D), nn.Dropout(p)
        self.head = nn.Linear(D, V, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()
        self.tokens = torch.randint(V, (N, L))

    def hidden(self):
        return self.body(self.embedding(self.tokens)).tanh()

    def loss(self, hidden, labels, **options):
        logits = self.head(self.dropout(self.norm(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def gradients(call, inputs, module=None):
    outputs, leaves = tensors(call()), [*inputs, *(module.parameters() if module else ())]
    given = {"materialize_grads": True, "allow_unused": True}
    return [*outputs, *torch.autograd.grad(loss_of_all(outputs), leaves, **given)]


def assert_same(found, wanted, rtol=1e-10):
    for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if got is not None or want is not None:
            assert_same_tensor(str(place), got.detach(), want.detach(), rtol)
