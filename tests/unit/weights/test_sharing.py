"""One parameter under several names: each use has its own policy and draw, or all share one.

Training and evaluation models over the same parameters are what
https://github.com/dmlc/gluon-nlp/issues/1060 asks for.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.weights import applied, enabled, remove, step
from tests.weight_zoo import OURS, compare


class Tied(nn.Module):
    """AWD-LSTM in small: embedding, recurrent layer, decoder."""

    def __init__(self, *, tied=True, recurrent=True):
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.rnn = nn.LSTM(6, 6) if recurrent else None
        self.decoder = nn.Linear(6, 12, bias=False)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids).tanh()
        return self.decoder(x if self.rnn is None else self.rnn(x)[0])


IDS = torch.tensor([[1, 2, 3], [3, 4, 8]])


def is_tied(model):
    return model.embedding.get_parameter("weight") is model.decoder.get_parameter("weight")


def reparametrize(model):
    """The policies of AWD-LSTM: words of the embedding, entries of the recurrent weights."""
    recoup.weight_dropout(model, r"embedding\.weight", p=0.3, axes=(1,))
    return recoup.weight_dropout(model, r"rnn\.weight_hh_l0", p=0.5)


def share(source, target):
    """Give `target` the parameters of `source`, as a person would, with assignments."""
    for (_, a), (_, b) in zip(source.named_modules(), target.named_modules(), strict=True):
        for key in list(a._parameters):
            setattr(b, key, a.get_parameter(key) if a._parameters[key] is not None else None)


# -- a training model and an evaluation model ------------------------------------------------------

ORDERS = ["as", "sa", "sai", "ais", "asi", "asl", "sae", "ars"]
LIFE = {
    "a": lambda train, evaluate: reparametrize(train),
    "s": share,
    "i": lambda train, evaluate: [nn.init.uniform_(p, -0.4, 0.4) for p in train.parameters()],
    "r": lambda train, evaluate: (train(IDS), evaluate(IDS)),
    "l": lambda train, evaluate: train.load_state_dict(Tied().state_dict(), strict=True),
    "e": lambda train, evaluate: evaluate.load_state_dict(Tied().state_dict(), strict=True),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_two_models_share_in_whatever_order_they_are_applied_shared_run_and_initialised(
    order, tied
):
    train, evaluate = Tied(tied=tied), Tied(tied=tied)
    for letter in order:
        LIFE[letter](train, evaluate)
    evaluate.eval()
    optimizer = torch.optim.SGD(train.parameters(), lr=0.5)
    for _ in range(3):
        before = evaluate(IDS)
        loss = F.cross_entropy(train(IDS).flatten(0, 1), IDS.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain = Tied(tied=tied).eval()
        plain.load_state_dict(train.state_dict())
        assert torch.equal(evaluate(IDS), plain(IDS))
        assert not torch.equal(evaluate(IDS), before)
        assert not torch.equal(train(IDS), train(IDS))
    assert is_tied(train) == is_tied(evaluate) == tied
    assert all(a is b for a, b in zip(train.parameters(), evaluate.parameters(), strict=True))


# -- tied weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["dropout", "noise"])
@pytest.mark.parametrize("pattern", [r"embedding\.weight", r"decoder\.weight", r".*\.weight"])
@pytest.mark.parametrize("tied", ["own", "same"])
def test_gradients_are_the_sums_of_those_of_the_uses(tied, pattern, way):
    way = OURS[way]._replace(how={"tied": tied})
    ours, _ = compare(way, Tied(recurrent=False), (IDS,), pattern, rtol=1e-6)
    assert is_tied(ours)
    assert ours.decoder.get_parameter("weight").grad is ours.embedding.get_parameter("weight").grad
    table = recoup.weights.twin(ours).embedding.weight
    with step(ours), torch.no_grad():
        first, second = ours.embedding.weight, ours.decoder.weight
        is_same = tied == "same" and pattern.startswith(".*")
        assert torch.equal(first, second) is is_same
        assert torch.equal(first, table) is pattern.startswith("dec")


KINDS = {
    "dropout": lambda m, **how: recoup.weight_dropout(m, p=0.5, **how),
    "rows": lambda m, **how: recoup.weight_dropout(m, p=0.5, axes=(1,), **how),
    "noise": lambda m, **how: recoup.weight_noise(m, std=0.5, **how),
    "learned": lambda m, **how: recoup.weight_noise(m, std=0.5, learned="row", **how),
}


def tables_of(model):
    """The weights that the embedding and the decoder use."""
    rows = model.embedding(torch.arange(12))
    return rows, model.decoder(torch.eye(6)).T


@pytest.mark.parametrize("kind", KINDS)
def test_uses_that_share_have_one_draw_also_by_several_calls_in_a_copy_and_after_removal(kind):
    model, apply = Tied(recurrent=False), KINDS[kind]
    apply(model.embedding, tied="same")
    apply(model.decoder, tied="same")
    assert len({each.reparametrization for each in applied(model)}) == 1
    for each in (model, copy.deepcopy(model)):
        with step(each):
            a, b = tables_of(each)
            assert torch.equal(a, b)
            (a.sum() + b.sum()).backward()
        with step(each):
            assert not torch.equal(tables_of(each)[0], a)
        if kind == "learned":
            assert each.embedding.weight_std is each.decoder.weight_std
            assert each.embedding.weight_std.grad is not None
    remove(model.embedding)
    raw = model.decoder.get_parameter("weight")
    assert torch.equal(tables_of(model)[0], raw)
    assert not torch.equal(tables_of(model)[1], raw)


def test_what_a_tie_refuses_and_forgets():
    with pytest.raises(ValueError, match="`tied` is 'all', but must be"):
        recoup.weight_dropout(Tied(), ".*weight", tied="all")
    model = Tied()
    recoup.weight_dropout(model.embedding, p=0.5, tied="same")
    with pytest.raises(ValueError, match="another use of `weight` has weight_dropout"):
        recoup.weight_dropout(model.decoder, p=0.3, tied="same")
    assert applied(model.decoder) == []
    parameter = nn.Parameter(torch.ones(4, 4))
    for p in (0.5, 0.3):  # the module of the first one is gone
        layer = nn.Linear(4, 4)
        layer.weight = parameter
        recoup.weight_dropout(layer, p=p, tied="same")
        del layer
        gc.collect()


@pytest.mark.parametrize("applied_first", [True, False])
def test_ties_last_through_steps_conversion_copies_loading_and_removal(applied_first):
    model = Tied(tied=False)
    if applied_first:
        reparametrize(model)
    model.decoder.weight = model.embedding.get_parameter("weight")
    if not applied_first:
        reparametrize(model)
    model(IDS).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for change in (
        lambda m: m.double().float(),
        copy.deepcopy,
        lambda m: m.load_state_dict(Tied().state_dict(), strict=True) and m,
        remove,
    ):
        model = change(model)
        assert is_tied(model)
        assert len(list(model.parameters())) == 5
        model(IDS)
    assert model.state_dict().keys() == Tied().state_dict().keys()


def test_what_torch_unties_can_be_tied_again():
    model = recoup.weight_dropout(Tied(recurrent=False), r"embedding\.weight", p=1.0)
    model.load_state_dict(Tied(recurrent=False).state_dict(), assign=True)
    assert not is_tied(model)
    model.to("meta").to_empty(device="cpu")
    model.decoder.weight = model.embedding.get_parameter("weight")
    nn.init.ones_(model.embedding.get_parameter("weight"))
    assert torch.count_nonzero(model(IDS)) == 0
    assert torch.count_nonzero(model.decoder(torch.ones(1, 6))) == 12
    with enabled(model.eval().decoder):
        assert torch.count_nonzero(model(IDS)) > 0
    with enabled(model.embedding):
        assert torch.count_nonzero(model(IDS)) == 0
