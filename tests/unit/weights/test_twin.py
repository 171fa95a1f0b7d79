"""The twin computes what the model would in evaluation, and has no parameters of its own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import recoup
from recoup.weights import applied, twin
from tests.oracle import loss_of_all, tensors
from tests.weight_zoo import Way, by_name


class Tied(nn.Module):
    """AWD-LSTM in small: rows of the embedding are dropped, and not those of the decoder."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(11, 8), nn.LSTM(8, 8)
        self.drop, self.decoder = nn.Dropout(0.4), nn.Linear(8, 11)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids):
        return self.decoder(self.drop(self.layer(self.drop(self.embedding(ids)))[0]))


class Hidden(nn.Module):
    """Has a module, a tensor and a function that torch does not know of."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hidden = [{"layer": nn.Sequential(nn.Linear(4, 4))}]
        self.table, self.scales = torch.ones(4), [torch.ones(4)]
        self.call = self.layer.forward
        self.ways = [self.layer]

    def forward(self, x):
        x = self.ways[0](x) + self.call(x)
        return self.hidden[0]["layer"](x) * self.table * self.scales[0]


def convolutions():
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(), nn.Conv2d(4, 2, 1))
    return nn.Sequential(*layers)


MODELS = {
    "convolutions": (convolutions, torch.randn(3, 2, 6, 6), r".*\.weight"),
    "lstm": (lambda: nn.LSTM(4, 5, 2, dropout=0.5), torch.randn(6, 2, 4), r"weight_hh_l\d"),
    "tied": (Tied, torch.randint(11, (5, 3)), r"embedding\.weight|layer\.weight_hh_l0"),
}


class Scaled(nn.Module):
    """A function of a weight with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.tensor(0.5)), nn.Dropout()

    def forward(self, weight, draw):
        return self.drop(weight) * self.scale


DROPOUT = Way(dropout={"p": 0.5})
WAYS = {
    "plain": lambda model, pattern: model,
    "dropout": DROPOUT,
    "norm": Way({}, {"p": 0.5}),
    "function": lambda m, p: Way(function=Scaled(), how={"mode": "always"})(DROPOUT(m, p), p),
    "always": lambda m, p: Way(noise={"std": lambda step: 0.1 + step}, how={"mode": "always"})(
        DROPOUT(m, p), p
    ),
}


def built(name, way="dropout"):
    build, x, pattern = MODELS[name]
    return WAYS[way](build(), pattern), x


def output_of(model, x):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        return tensors(model(x))


def modes_of(model):
    return [part.training for part in model.modules()]


def assert_twins(model, other, x):
    """`other` computes what `model` does in evaluation, bit by bit, over the same tensors."""
    modes = modes_of(model)
    got, want = output_of(other, x), output_of(model.eval(), x)
    for part, mode in zip(model.modules(), modes, strict=True):
        part.training = mode
    assert all(map(torch.equal, got, want))
    for named in (by_name, lambda each: dict(each.named_buffers(remove_duplicate=False))):
        theirs = named(other)
        assert theirs.keys() == named(model).keys()
        assert all(value is theirs[name] for name, value in named(model).items())
    assert model.state_dict().keys() == other.state_dict().keys()


def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of_all(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_model_in_evaluation_after_every_step(name, way):
    model, x = built(name, way)
    other = twin(model)
    assert type(other).__name__ == type(model).__name__
    seen = [output_of(other, x)[0]]
    for _ in range(2):
        step(model, x)
        assert all(modes_of(model))
        assert_twins(model, other, x)
        seen.append(output_of(other, x)[0])
        assert not torch.equal(seen[-1], seen[-2])
    model.eval().train()
    assert not any(modes_of(other))
    assert all(entry.reparametrization.mode == "always" for entry in applied(other))
    assert_twins(model, twin(other), x)


def replaced(model):
    for part in model.modules():
        for key, value in list(part._parameters.items()):
            if value is not None:
                setattr(part, key, nn.Parameter(torch.randn_like(value)))


def loaded(model, **how):
    values = {name: each + 1 for name, each in model.state_dict().items()}
    model.load_state_dict(values, **how)


CHANGES = {
    "setattr": replaced,
    "assign": lambda model: loaded(model, assign=True),
    "load": loaded,
    "to": lambda model: model.to(torch.float64),
    "to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", ["convolutions", "lstm"])
def test_it_follows_what_replaces_parameters(name, side, change):
    model, x = built(name)
    pair = model, twin(model)
    CHANGES[change](pair[side])
    if change == "to_empty":
        loaded(pair[side], assign=True)
        for each in (*model.parameters(), *model.buffers()):
            each.data.fill_(1)
    assert_twins(*pair, x.to(next(model.parameters()).dtype))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("way", ["dropout", "norm"])
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_of_both_is_another_pair_and_a_copy_of_one_is_a_model_of_its_own(name, way, copied):
    model, x = built(name, way)
    theirs, other = copied((model, twin(model)))
    assert next(theirs.parameters()) is not next(model.parameters())
    step(theirs, x)
    replaced(theirs)
    assert_twins(theirs, other, x)
    alone, want = copied(other), output_of(other, x)
    replaced(theirs)
    assert all(map(torch.equal, output_of(alone, x), want))
    pair = nn.ModuleList([model, twin(model)])
    assert len(list(pair.parameters())) == len(list(model.parameters()))


def test_a_rate_a_schedule_and_a_draw_of_the_model_are_those_of_its_twin():
    model = recoup.weight_noise(nn.Linear(6, 5), std=lambda step: float(step), mode="always")
    other, x = twin(model), torch.randn(3, 6)
    for _ in range(3):
        model(x)
    assert applied(other)[0].step == 3
    recoup.weights.update(model, std=0.5)
    assert repr(applied(other)) == repr(applied(model))
    assert_twins(model, other, x)
    with recoup.weights.same_draw():
        assert torch.equal(model(x), other(x))
    assert not torch.equal(model(x), other(x))


@pytest.mark.parametrize("first", [0, 1])
def test_a_norm_that_is_removed_from_one(first):
    model, x = Way({})(nn.Linear(6, 5)), torch.randn(3, 6)
    pair = (model, twin(model))
    want = output_of(pair[1], x)[0]
    recoup.weights.remove(pair[first])
    with pytest.raises(ValueError, match=r"no magnitude `weight_g` any more.*remove"):
        pair[1 - first](x)
    recoup.weights.remove(pair[1 - first])
    assert_twins(*pair, x)
    assert torch.allclose(output_of(model, x)[0], want)
    for each in pair:
        with pytest.raises(ValueError, match=r"adds a parameter to `weight`.*twin"):
            recoup.weight_norm(each)


def test_what_is_not_registered_is_shared_too():
    model, x = DROPOUT(Hidden()), torch.randn(3, 4)
    other = twin(model)
    assert other.ways[0] is other.layer is not model.layer
    assert other.call.__self__ is other.layer
    hidden = model.hidden[0]["layer"][0]
    assert other.hidden[0]["layer"][0] is not hidden
    with torch.no_grad():
        hidden.get_parameter("weight").add_(1)
    hidden.bias = nn.Parameter(torch.ones(4))
    model.table.mul_(2)
    model.scales[0].mul_(3)
    assert_twins(model, other, x)


def test_lazy_layers_and_planned_models():
    model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()), torch.randn(3, 5)
    other = twin(model)
    model(x)
    assert_twins(model, other, x)
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
    model, x = nn.Sequential(*blocks), torch.randn(64, 16)
    recoup.plan(model, x, budget="1 MiB").apply()
    assert recoup.applied_plans(twin(model)) == []
    assert_twins(model, twin(model), x)
    assert len(recoup.applied_plans(model)) == 1
