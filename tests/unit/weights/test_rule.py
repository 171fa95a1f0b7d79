"""The rule, as a table: who reads a weight, in which mode, where, and what the read is."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.errors import RecoupError, ReplayError
from tests.unit.weights.plain_run import recorded, weights_used


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


@pytest.mark.parametrize("kind", APPLY)
def test_a_step_has_one_draw_and_counts_once(kind):
    model = APPLY[kind](Model())
    with recoup.weights.step(model):
        first, inner = model.encode() * 1, model(of_function) * 1
        with torch.no_grad():
            assert torch.equal(of_function(model), first)
    assert torch.equal(first, inner)
    assert not torch.equal(model.encode(), model.encode())  # each outside has its own
    with recoup.weights.same_draw(seed=3):
        same = model.encode() * 1
        assert torch.equal(model(of_function), same)
    with recoup.weights.same_draw(seed=3):
        assert torch.equal(model.encode(), same)


def test_a_step_counts_once_for_a_schedule():
    seen = []
    model = recoup.weight_noise(Model(), std=lambda step: seen.append(step) or 0.1)
    seen.clear()
    for _ in range(2):
        with recoup.weights.step(model):
            model(Model.encode)
            model(Model.encode)
    model(Model.encode)
    model.encode()
    assert seen == [0, 1, 2, 3]
    assert recoup.weights.applied(model)[0].step == 3
    recoup.weights.set_step(model, 7)
    model(Model.encode)
    model(Model.encode)
    assert seen[-2:] == [7, 7]


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


# -- code that runs again --------------------------------------------------------------------------

AGAIN = {
    "torch": lambda fn, x: checkpoint(fn, x, use_reentrant=False),
    "torch, not preserving": lambda fn, x: checkpoint(
        fn, x, use_reentrant=False, preserve_rng_state=False
    ),
    "reentrant": lambda fn, x: checkpoint(fn, x, use_reentrant=True),
    "ours": recoup.checkpoint,
}


class Runs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.call = lambda fn, x: fn(x)

    def forward(self, x):
        return self.last(self.call(self.first, x).tanh())


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("pending", [1, 2])
def test_code_that_runs_again_has_the_draw_of_its_first_run(pending, again):
    """Gradients are those of autograd over the weights that forward used; several may wait."""
    model = recoup.weight_dropout(Runs())
    model.call = AGAIN[again]
    plain = Runs()
    waiting = []
    for _ in range(pending):
        x = torch.randn(3, 6, requires_grad=True)
        raw = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        with recorded() as made:
            output = model(x)
        waiting.append((output, functional_call(plain, weights_used(model, made, raw), x), raw))
    for output, want, raw in reversed(waiting):
        torch.testing.assert_close(output, want)
        model.zero_grad()
        output.square().sum().backward()
        want.square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, raw[name].grad)


def test_a_draw_that_may_be_another_ones_is_an_error():
    model = recoup.weight_dropout(Runs())
    model.call = lambda fn, x: checkpoint(fn, x, use_reentrant=True, preserve_rng_state=False)
    output = model(torch.randn(3, 6, requires_grad=True))
    torch.randn(3)  # the stream is somewhere else now
    with pytest.raises(ReplayError, match="which draw it had"):
        output.sum().backward()


@pytest.mark.parametrize("again", ["torch", "reentrant"])
def test_a_mode_that_changes_before_backward(again):
    model, x = recoup.weight_dropout(Runs()), torch.randn(3, 6, requires_grad=True)
    torch.manual_seed(0)
    (want,) = torch.autograd.grad(model(x).sum(), x)
    model.call = AGAIN[again]
    torch.manual_seed(0)
    output = model(x).sum()
    model.eval()
    if again == "reentrant":
        with pytest.raises(ReplayError):
            output.backward()
    else:
        output.backward()
        assert torch.equal(x.grad, want)


# -- whole models, and what is refused -------------------------------------------------------------


def test_noise_on_a_whole_model():
    model = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8), nn.LSTM(8, 8)])
    recoup.weight_noise(model, std=0.0025)
    names = [entry.name for entry in recoup.weights.applied(model)]
    assert names == [name for name, _ in model.named_parameters() if "weight" in name]


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_dynamic_quantization_is_refused_where_it_would_leave_noise():
    model = recoup.weight_noise(nn.Sequential(nn.Linear(6, 6)))
    quantize = torch.ao.quantization.quantize_dynamic
    with pytest.raises(ValueError, match=r"weights\.remove"):
        quantize(model, {nn.Linear})
    made = quantize(recoup.weights.twin(model), {nn.Linear})
    assert not isinstance(made[0], nn.Linear)


class Sharded(torch.Tensor):
    """A tensor that wraps another one, as a DTensor does."""

    @staticmethod
    def __new__(cls, data, requires_grad=True):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, requires_grad=requires_grad)
        made.part = data
        return made

    def __tensor_flatten__(self):
        return ["part"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Sharded(inner["part"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(args[0].part)


def test_weights_of_tensor_parallelism_are_refused_where_they_are_applied():
    layer = nn.Linear(6, 6)
    layer.weight = nn.Parameter(Sharded(torch.randn(6, 6)))
    with pytest.raises(ValueError, match=r"a Sharded.*tensor parallelism"):
        recoup.weight_noise(layer)
    noisy = recoup.weight_noise(nn.Linear(6, 6))
    with pytest.raises(ValueError, match=r"a Sharded.*tensor parallelism"):
        noisy.register_parameter("weight", nn.Parameter(Sharded(torch.randn(6, 6))))
