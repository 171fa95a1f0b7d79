"""One parameter in several places: under the names of a model, in two models, and in a twin."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import recoup
from recoup.weights import applied, remove, same_draw, step, twin
from tests import weight_zoo as zoo
from tests.oracle import tensors

IDS = torch.tensor([[1, 2, 3], [3, 4, 8]])


@pytest.mark.parametrize("way", ["dropout", "noise"])
@pytest.mark.parametrize("pattern", [r"embedding\.weight", r"decoder\.weight", r".*\.weight"])
@pytest.mark.parametrize("tied", ["own", "same"])
def test_gradients_are_the_sums_of_those_of_the_uses(tied, pattern, way):
    way = zoo.OURS[way]._replace(how={"tied": tied})
    ours, _ = zoo.compare(way, zoo.Tied(recurrent=False), (IDS,), pattern, rtol=1e-6)
    raw = ours.embedding.get_parameter("weight")
    assert ours.decoder.get_parameter("weight") is raw
    for each in (ours, copy.deepcopy(ours)):
        with step(each), torch.no_grad():
            first, second = each.embedding.weight, each.decoder.weight
            assert torch.equal(first, second) is (tied == "same" and pattern.startswith(".*"))
            assert torch.equal(first, raw) is pattern.startswith("dec")


def test_uses_that_share_a_draw_share_a_deviation_and_one_goes_on_without_the_other():
    way = zoo.MORE["learned"]._replace(how={"tied": "same"})
    model = way(zoo.Tied(recurrent=False))
    assert model.embedding.get_parameter("weight_std") is model.decoder.weight_std
    remove(model.embedding)
    tables = model.embedding(torch.arange(12)), model.decoder(torch.eye(6)).T
    raw = model.decoder.get_parameter("weight")
    assert [torch.equal(each, raw) for each in tables] == [True, False]


def convolutions():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(), nn.Conv2d(4, 2, 1))


MODELS = {
    "convolutions": (convolutions, torch.randn(3, 2, 6, 6), r".*\.weight"),
    "lstm": (lambda: nn.LSTM(4, 5, 2, dropout=0.5), torch.randn(6, 2, 4), r"weight_hh_l\d"),
    "tied": (lambda: zoo.Tied(dropout=0.4), IDS, r"embedding\.weight|rnn\.weight_hh_l0"),
}
DROPOUT, ALWAYS = zoo.OURS["dropout"], {"mode": "always"}
NOISE = zoo.Way(noise={"std": lambda step: 0.1 + step}, how=ALWAYS)
WAYS = {
    "plain": zoo.Way(),
    "dropout": DROPOUT,
    "norm": zoo.Way({}, {"p": 0.5}),
    "function": lambda m, p: zoo.Way(function=zoo.Scaled(), how=ALWAYS)(DROPOUT(m, p), p),
    "always": lambda m, p: NOISE(DROPOUT(m, p), p),
}


def built(name, way="dropout"):
    build, x, pattern = MODELS[name]
    return WAYS[way](build(), pattern), x


def output_of(model, x):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        return tensors(model(x))


def assert_twins(model, other, x):
    modes = [part.training for part in model.modules()]
    got, want = output_of(other, x), output_of(model.eval(), x)
    for part, mode in zip(model.modules(), modes, strict=True):
        part.training = mode
    assert all(map(torch.equal, got, want))
    for named in (zoo.by_name, lambda each: dict(each.named_buffers(remove_duplicate=False))):
        theirs = named(other)
        assert theirs.keys() == named(model).keys()
        assert all(value is theirs[name] for name, value in named(model).items())
    assert model.state_dict().keys() == other.state_dict().keys()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_model_in_evaluation_after_every_step(name, way):
    model, x = built(name, way)
    other = twin(model)
    kind = type(MODELS[name][0]())
    assert type(other) is kind if way in ("plain", "dropout") else isinstance(other, kind)
    before = output_of(other, x)[0]
    zoo.trained(model, x)
    assert_twins(model, other, x)
    assert not torch.equal(output_of(other, x)[0], before)
    model.eval().train()
    assert not any(part.training for part in other.modules())
    assert all(entry.reparametrization.mode == "always" for entry in applied(other))
    assert_twins(model, twin(other), x)


CHANGES = (
    zoo.replaced,
    lambda model: zoo.loaded(model, assign=True),
    lambda model: model.to(torch.float64),
    lambda model: zoo.loaded(model.to("meta").to_empty(device="cpu")),
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "side"), [("convolutions", 0), ("lstm", 1)])
def test_it_follows_what_replaces_parameters(name, side, change):
    model, x = built(name)
    pair = model, twin(model)
    change(pair[side])
    assert_twins(*pair, x.to(next(model.parameters()).dtype))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("pair", [("convolutions", "norm"), ("tied", "dropout")])
def test_a_copy_of_both_is_another_pair_and_a_copy_of_one_is_a_model_of_its_own(pair, copied):
    model, x = built(*pair)
    theirs, other = copied((model, twin(model)))
    assert next(theirs.parameters()) is not next(model.parameters())
    zoo.trained(theirs, x)
    zoo.replaced(theirs)
    assert_twins(theirs, other, x)
    alone, want = copied(other), output_of(other, x)
    zoo.replaced(theirs)
    assert all(map(torch.equal, output_of(alone, x), want))


def test_a_rate_a_schedule_and_a_draw_of_the_model_are_those_of_its_twin():
    model = recoup.weight_noise(nn.Linear(6, 5), std=lambda step: float(step), mode="always")
    other, x = twin(model), torch.randn(3, 6)
    model(x)
    assert applied(other)[0].step == 1
    recoup.weights.update(model, std=0.5)
    with same_draw():
        assert torch.equal(model(x), other(x))
    assert not torch.equal(model(x), other(x))


@pytest.mark.parametrize("first", [0, 1])
def test_a_norm_that_is_removed_from_one(first):
    model, x = zoo.Way({})(nn.Linear(6, 5)), torch.randn(3, 6)
    pair = (model, twin(model))
    want = output_of(pair[1], x)[0]
    remove(pair[first])
    with pytest.raises(ValueError, match=r"no magnitude `weight_g` any more.*remove"):
        pair[1 - first](x)
    remove(pair[1 - first])
    assert_twins(*pair, x)
    assert torch.allclose(output_of(model, x)[0], want)
    with pytest.raises(ValueError, match=r"adds a parameter to `weight`.*twin"):
        recoup.weight_norm(model)
