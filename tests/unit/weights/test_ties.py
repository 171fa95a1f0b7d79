"""Uses of a tied parameter that share their draw."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.weights import applied
from tests.unit.weights.plain_run import PlainRun, recorded


class Tied(nn.Module):
    """An embedding whose weight is that of the decoder."""

    def __init__(self):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        return self.decoder(self.embedding(ids).tanh())


def ids():
    return torch.tensor([[1, 2, 3], [3, 4, 8]])


def weights_used(model):
    """The weights that the embedding and the decoder use until a backward."""
    rows = model.embedding(torch.arange(9))
    table = model.decoder(torch.eye(6, dtype=rows.dtype)).T
    (rows.sum() + table.sum()).backward()
    return rows.detach(), table.detach()


KINDS = {
    "dropout": lambda m, **how: recoup.weight_dropout(m, p=0.5, **how),
    "rows": lambda m, **how: recoup.weight_dropout(m, p=0.5, axes=(1,), **how),
    "noise": lambda m, **how: recoup.weight_noise(m, std=0.5, **how),
    "learned": lambda m, **how: recoup.weight_noise(m, std=0.5, learned="row", **how),
}


@pytest.mark.parametrize("kind", ["dropout", "rows", "noise"])
def test_gradients_are_those_of_one_weight(kind):
    run = PlainRun(Tied(), lambda m: KINDS[kind](m, pattern=r".*weight", tied="same"))
    run.compare(ids())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_shares_too():
    model = recoup.weight_dropout(Tied(), r".*weight", p=0.5, tied="same")
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        with recorded() as made:
            compiled(ids()).sum().backward()
        assert len(made) == 1


def test_bad_input():
    with pytest.raises(ValueError, match="`tied` is 'all', but must be"):
        recoup.weight_dropout(Tied(), ".*weight", tied="all")
    model = Tied()
    recoup.weight_dropout(model.embedding, p=0.5, tied="same")
    with pytest.raises(ValueError, match="another use of `weight` has weight_dropout"):
        recoup.weight_dropout(model.decoder, p=0.3, tied="same")
    assert applied(model.decoder) == []
    x = torch.randn(2, 6)
    assert torch.equal(model.decoder(x), F.linear(x, model.decoder.weight))
