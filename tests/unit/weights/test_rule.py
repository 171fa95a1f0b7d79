"""The rule, as a table: who reads a weight, in which mode, where, and what the read is."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs

import recoup
from recoup.errors import RecoupError
from tests.weight_zoo import MORE, OURS, materialised


class Model(nn.Module):
    """Methods, and functions beside them, read one weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)

    def forward(self, read):
        return read(self)

    def encode(self):
        return self.layer.weight

    on_encode = encode


def of_function(model):
    return model.layer.weight


READERS = {
    "a method": Model.encode,
    "on_encode": Model.on_encode,
    "a function": of_function,
    "getattr": lambda model: getattr(model.layer, "weight"),  # noqa: B009
    "the layer": lambda model: model.layer(torch.eye(6)).T,
}
PLACES = {
    "forward": lambda model, read: model(read),
    "step": lambda model, read: recoup.weights.step(model)(read)(model),
    "outside": lambda model, read: read(model),
}
CHECKPOINTS = {
    "none": lambda call, x: call(x),
    "torch": lambda call, x: torchs(call, x, use_reentrant=False),
    "reentrant": lambda call, x: torchs(call, x, use_reentrant=True),
    "ours": recoup.checkpoint,
}


@pytest.mark.sampled(450)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["dropout", "noise", "function"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", ["training", "always"])
def test_a_read_is_noisy_or_raw_and_gradients_are_those_of_what_was_read(
    mode, training, grad, checkpoint, place, kind, reader
):
    plain, read = Model().train(training), READERS[reader]
    way = MORE[kind]._replace(how={"mode": mode})
    model, x = way(copy.deepcopy(plain)), torch.randn(6, requires_grad=True)
    raw = model.get_parameter("layer.weight")
    torch.manual_seed(7)
    with torch.set_grad_enabled(grad):
        got = PLACES[place](model, lambda m: CHECKPOINTS[checkpoint](lambda x: read(m) * x, x))

    torch.manual_seed(7)
    builds_graph = grad and checkpoint != "reentrant"
    is_noisy = (training or mode == "always") and (builds_graph or place != "outside")
    weight = raw
    if is_noisy:
        weight = materialised(way, plain, "layer.weight", {"layer.weight": raw})["layer.weight"]
    assert torch.equal(weight, raw) is not is_noisy
    del plain.layer.weight
    plain.layer.weight = weight
    want = read(plain) * x
    assert torch.equal(got, want)
    if grad:
        gradients = []
        for y in (want, got):
            x.grad = raw.grad = None
            y.sin().sum().backward()
            gradients.append((x.grad, raw.grad))
        torch.testing.assert_close(gradients[1], gradients[0])


class SavesItself(nn.Linear):
    """A layer that reads its weight to save and to load it, as those of torch_geometric do."""

    def __init__(self):
        super().__init__(4, 4)
        self.loaded_over = None
        self.register_load_state_dict_pre_hook(SavesItself.note)

    def note(self, *_):
        self.loaded_over = self.weight

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight if keep_vars else self.weight.detach()
        destination[prefix + "bias"] = self.bias


@pytest.mark.parametrize("kind", OURS)
def test_a_layer_that_saves_its_weight_itself_saves_the_parameter(kind):
    model = nn.Sequential(SavesItself())
    layer, raw = model[0], model[0].weight
    OURS[kind](model)
    before = torch.get_rng_state()
    state = model.state_dict()
    assert torch.equal(state["0.weight"], raw)
    assert model.state_dict(keep_vars=True)["0.weight"] is raw
    model.load_state_dict(state, strict=False)
    assert layer.loaded_over is raw
    assert torch.equal(torch.get_rng_state(), before)


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


def add(weight):
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
    "add": add,
    "detached": lambda weight: weight.detach().zero_(),
    "a view without a graph": without_graph,
    "out": lambda weight: torch.zeros(6, 6, out=weight),
    "a list": lambda weight: torch._foreach_zero_([weight]),
    "optimizer": lambda weight: torch.optim.SGD([weight], lr=0.1),
    "parameter": nn.Parameter,
    "tie": tie,
    "grad": lambda weight: weight.grad,
    "rows": lambda weight: nn.functional.embedding(torch.tensor([0]), weight, max_norm=1e-3),
}


WHERE = {"step": recoup.weights.step, "outside": lambda model: nullcontext()}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ["dropout", "noise", "norm", "learned", "function"])
@pytest.mark.parametrize("where", WHERE)
def test_a_write_to_a_computed_weight_is_an_error(where, kind, write):
    model = MORE[kind](Model())
    before = model.get_parameter("layer.weight").clone()
    also_without = where == "step" and write in ("copy", "add", "rows")
    for has_graph in (True, False) if also_without else (True,):
        with (
            WHERE[where](model),
            torch.set_grad_enabled(has_graph),
            pytest.raises((RecoupError, TypeError), match=r"get_parameter\(.*weights.disabled"),
        ):
            WRITES[write](model.layer.weight)
    assert torch.equal(model.get_parameter("layer.weight"), before)


def test_a_parametrization_of_torch_beneath_and_the_fast_path_of_attention():
    linear = nn.utils.parametrize.register_parametrization(Model().layer, "weight", nn.Identity())
    recoup.weight_dropout(linear, r"parametrizations\.weight\.original", p=1.0)
    assert torch.count_nonzero(linear(torch.eye(6))) == 0
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    recoup.weight_dropout(encoder, r"self_attn\.in_proj_weight", mode="always")
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        assert not torch.equal(encoder(x), encoder(x))
