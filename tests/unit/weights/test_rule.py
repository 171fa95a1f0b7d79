"""The rule, as a table: who reads a weight, in which mode, where, and what the read is."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import RecoupError


class Model(nn.Module):
    """Methods of every name, and a function beside them, read one weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, read):
        return read(self)

    def encode(self):
        return self.layer.weight

    reset_encoding = on_encode = encode


def of_function(model):
    return model.layer.weight


READERS = {
    "a method": Model.encode,
    "reset_encoding": Model.reset_encoding,
    "on_encode": Model.on_encode,
    "a function": of_function,
    "getattr": lambda model: getattr(model.layer, "weight"),  # noqa: B009
    "a product": lambda model: model.layer.weight * 1,
    "a sum": lambda model: (model.layer.weight * 1).sum(0),
    "a norm": lambda model: model.layer.weight.norm(),
}
APPLY = {
    "dropout": lambda m, **how: recoup.weight_dropout(m, p=0.5, **how),
    "noise": lambda m, **how: recoup.weight_noise(m, std=0.5, **how),
    "function": lambda m, **how: recoup.weights.apply(m, lambda w, draw: w + draw.normal(), **how),
}
PLACES = {
    "forward": lambda model, read: model(read),
    "step": lambda model, read: recoup.weights.step(model)(read)(model),
    "outside": lambda model, read: read(model),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", APPLY)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", ["training", "always"])
def test_a_read_is_noisy_or_raw(mode, training, grad, place, kind, reader):
    model, read = APPLY[kind](Model(), mode=mode).train(training), READERS[reader]
    with torch.no_grad():
        raw = read(functional_model(model))
    with torch.set_grad_enabled(grad):
        got = PLACES[place](model, read)
    is_noisy = (training or mode == "always") and (grad or place != "outside")
    assert torch.equal(got, raw) is not is_noisy


def functional_model(model):
    plain = Model()
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize("kind", APPLY)
@pytest.mark.parametrize("training", [True, False])
def test_the_parameter_is_read_by_its_names(kind, training):
    model = Model()
    raw = model.layer.weight
    APPLY[kind](model).train(training)
    with recoup.weights.step(model):
        for got in (
            model.get_parameter("layer.weight"),
            model.layer.get_parameter("weight"),
            dict(model.named_parameters())["layer.weight"],
        ):
            assert got is raw
    assert torch.equal(model.state_dict()["layer.weight"], raw)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_a_norm_is_no_noise(training, grad):
    model = recoup.weight_norm(Model()).train(training)
    with torch.no_grad():
        model.layer.weight_g.mul_(2)
        with torch.set_grad_enabled(grad):
            got = model.encode()
        torch.testing.assert_close(got, 2 * model.get_parameter("layer.weight"))


# -- nothing is lost -------------------------------------------------------------------------------


def write_to(weight):
    weight += 1


def tie(weight):
    nn.Linear(6, 6).weight = weight


def set_data(weight):
    weight.data = torch.zeros(6, 6)


def without_graph(weight):
    with torch.no_grad():
        weight.view(-1)[:3].zero_()


WRITES = {
    "init": nn.init.zeros_,
    "orthogonal": nn.init.orthogonal_,
    "data": lambda weight: weight.data,
    "set data": set_data,
    "copy": lambda weight: weight.copy_(torch.zeros(6, 6)),
    "add": write_to,
    "detached": lambda weight: weight.detach().zero_(),
    "a view without a graph": without_graph,
    "out": lambda weight: torch.zeros(6, 6, out=weight),
    "a list": lambda weight: torch._foreach_zero_([weight]),
    "optimizer": lambda weight: torch.optim.SGD([weight], lr=0.1),
    "parameter": nn.Parameter,
    "tie": tie,
    "grad": lambda weight: weight.grad,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", [*APPLY, "norm", "learned"])
@pytest.mark.parametrize("in_step", [True, False])
def test_a_write_to_a_computed_weight_is_an_error(in_step, kind, write):
    apply = APPLY | {
        "norm": recoup.weight_norm,
        "learned": lambda m: recoup.weight_noise(m, learned="row"),
    }
    model = apply[kind](Model())
    before = model.get_parameter("layer.weight").clone()
    with (
        recoup.weights.step(model) if in_step else nullcontext(),
        pytest.raises((RecoupError, TypeError), match=r"get_parameter\(.*recoup.weights.disabled"),
    ):
        WRITES[write](model.layer.weight)
    assert torch.equal(model.get_parameter("layer.weight"), before)


def test_a_write_without_a_graph_in_a_step_is_an_error_too():
    model = recoup.weight_noise(Model())
    with recoup.weights.step(model), torch.no_grad():
        with pytest.raises(RecoupError, match="get_parameter"):
            model.layer.weight.mul_(2)
        with pytest.raises(RecoupError, match="get_parameter"):
            torch.optim.SGD([model.layer.weight], lr=0.1)


# -- whole models ----------------------------------------------------------------------------------


def test_noise_on_a_whole_model():
    model = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8), nn.LSTM(8, 8)])
    recoup.weight_noise(model, std=0.0025)
    names = [entry.name for entry in recoup.weights.applied(model)]
    assert names == [name for name, _ in model.named_parameters() if "weight" in name]
