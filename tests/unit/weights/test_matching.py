"""Which parameters are chosen, and how their rates are changed."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import recoup
from recoup.weights import applied, update


def model():
    return nn.Sequential(
        nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.LSTM(4, 3)
    )


def names(module):
    return [each.name for each in applied(module)]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("1.0.weight", ["1.0.weight"]),
        (r"1\..*weight", ["1.0.weight", "1.1.weight"]),
        (re.compile("2.WEIGHT_hh_l0", re.IGNORECASE), ["2.weight_hh_l0"]),
        (nn.Linear, ["1.0.weight"]),
        (nn.LSTM, ["2.weight_ih_l0", "2.weight_hh_l0"]),
        (nn.RNNBase, ["2.weight_ih_l0", "2.weight_hh_l0"]),
        ([nn.Linear, nn.Embedding], ["0.weight", "1.0.weight"]),
        ((nn.Linear, "2.weight_hh_l0"), ["1.0.weight", "2.weight_hh_l0"]),
        (["2.weight_hh_l0", nn.Linear, "1.0.*"], ["1.0.weight", "1.0.bias", "2.weight_hh_l0"]),
        (lambda name, p, module: p.dim() > 1 and name < "2", ["0.weight", "1.0.weight"]),
        (lambda name, p, module: isinstance(module, nn.LayerNorm), ["1.1.weight", "1.1.bias"]),
    ],
)
def test_what_is_chosen(where, expected):
    found = recoup.weight_noise(model(), where)
    assert names(found) == expected
    assert names(recoup.weights.remove(found, where)) == []


@pytest.mark.parametrize("where", [nn.Conv2d, lambda *_: False, [nn.Linear, nn.Conv2d], ["a", "b"]])
def test_what_chooses_nothing_is_an_error(where):
    module = model()
    with pytest.raises(ValueError, match="matches no parameter of Sequential"):
        recoup.weight_noise(module, where)
    assert names(module) == []


def test_a_function_is_asked_once_for_each_name():
    asked = []
    recoup.weight_noise(model(), lambda name, *_: asked.append(name) or True)
    assert asked == [name for name, _ in model().named_parameters()]


def test_a_type_leaves_out_the_magnitudes_of_weight_norm():
    module = recoup.weight_noise(recoup.weight_norm(model(), nn.Linear), nn.Linear)
    assert names(module) == ["1.0.weight", "1.0.weight"]


# -- changing a rate -------------------------------------------------------------------------------


def test_an_update_counts_from_the_next_draw_on():
    layer = recoup.weight_dropout(nn.Linear(50, 50), p=0.5)
    x = torch.randn(3, 50, requires_grad=True)
    with recoup.weights.same_draw(seed=1):
        before = layer(x)
    (of_that_draw,) = torch.autograd.grad(before.sum(), x, retain_graph=True)
    weight = recoup.weight_dropout(nn.Linear(50, 50), p=0.9)
    weight.load_state_dict(layer.state_dict())
    with recoup.weights.same_draw(seed=1):
        want = weight(x)
    update(layer, p=0.9)
    with recoup.weights.same_draw(seed=1):
        assert torch.equal(layer(x), want)
    assert repr(applied(layer)) == "[weight: weight_dropout(p=0.9)]"
    assert torch.equal(torch.autograd.grad(before.sum(), x)[0], of_that_draw)
    update(layer, p=0.0)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_an_update_of_some():
    module = recoup.weight_noise(recoup.weight_dropout(model(), nn.LSTM), [nn.LSTM, nn.Linear])
    update(module, "2.weight_hh_l0", p=0.25, std=lambda step: 0.1)
    update(module, nn.Linear, std=torch.tensor(0.5))
    shown = {repr(each) for each in applied(module)}
    assert {"2.weight_hh_l0: weight_dropout(p=0.25)", "2.weight_ih_l0: weight_dropout(p=0.5)",
            "2.weight_hh_l0: weight_noise(std=<lambda>)", "1.0.weight: weight_noise(std=0.5)",
            "2.weight_ih_l0: weight_noise(std=0.01)"} == shown  # fmt: skip
