"""Reparametrizations by a function of the user's, against the weight that it returns."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.errors import ChangedError, RecoupError
from recoup.weights import Draw, applied, apply, disabled, same_draw
from tests.oracle import hooks_in_force
from tests.unit.weights.plain_run import PlainRun

# -- what others call quantisation, adapters, norms, noise -----------------------------------------


def quantised(weight, draw):
    del draw
    return weight + ((weight * 8).round() / 8 - weight).detach()


def rounded_at_random(weight, draw):
    return weight + ((weight * 8 + draw.uniform()).floor() / 8 - weight).detach()


def multiplied(weight, draw):
    return weight * (1 + 0.1 * draw.normal())


def rows_dropped(weight, draw):
    return weight * draw.bernoulli(0.7, (len(weight), *[1] * (weight.dim() - 1))) / 0.7


def standardised(weight, draw):
    del draw
    rows = weight.flatten(1)
    return ((rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)).view_as(weight)


def spectral(weight, draw):
    u = draw.normal((len(weight),))
    matrix = weight.flatten(1)
    with torch.no_grad():
        for _ in range(3):
            v = F.normalize(matrix.T @ u, dim=0)
            u = F.normalize(matrix @ v, dim=0)
    return weight / (u @ matrix @ v)


class LoRA(nn.Module):
    """The update of low rank that is learned beside a weight."""

    def __init__(self, weight, rank=2):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) / rank)
        self.b = nn.Parameter(torch.randn(len(weight), rank) / rank)

    def forward(self, weight, draw):
        del draw
        return weight + self.b @ self.a


FUNCTIONS = [quantised, rounded_at_random, multiplied, rows_dropped, standardised, spectral]
LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), lambda: [torch.randn(4, 6, requires_grad=True)]),
    "conv": (lambda: nn.Conv2d(2, 3, 3), lambda: [torch.randn(2, 2, 5, 5, requires_grad=True)]),
    "embedding": (lambda: nn.Embedding(7, 4), lambda: [torch.randint(7, (3, 2))]),
    "lstm": (lambda: nn.LSTM(4, 3), lambda: [torch.randn(5, 2, 4, requires_grad=True)]),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0),
        lambda: [torch.randn(3, 2, 8, requires_grad=True)],
    ),
}


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def of_two_axes(name, parameter, module):
    del name, module
    return parameter.dim() > 1


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_those_of_the_weight_that_it_returns(layer, fn):
    build, inputs = LAYERS[layer]
    run = PlainRun(build(), lambda module: apply(module, fn, of_two_axes))
    assert len(run.compare(*inputs())) == len(applied(run.module)) > 0
    assert hooks_in_force() is None


@pytest.mark.usefixtures("double")
def test_a_function_may_return_another_shape():
    run = PlainRun(nn.Linear(6, 4, bias=False), lambda m: apply(m, lambda w, draw: w[:, :3]))
    run.compare(torch.randn(2, 3, requires_grad=True))


@pytest.mark.usefixtures("double")
def test_functions_run_after_the_others_in_the_order_of_the_calls():
    def made(module):
        apply(module, multiplied)
        apply(module, quantised, mode="always")
        recoup.weight_noise(module, std=0.1)
        recoup.weight_norm(recoup.weight_dropout(module, p=0.3))

    run = PlainRun(nn.Linear(6, 5), made)
    kinds = [each.reparametrization.kind for each in applied(run.module)]
    assert kinds == ["weight_norm", "weight_dropout", "weight_noise", "apply", "apply"]
    run.compare(torch.randn(4, 6, requires_grad=True))


@pytest.mark.usefixtures("double")
def test_second_derivatives():
    layer = apply(nn.Linear(3, 3), multiplied)

    def output(x):
        with same_draw(seed=1):
            return layer(x).tanh()

    assert torch.autograd.gradgradcheck(output, torch.randn(2, 3, requires_grad=True))


# -- draws -----------------------------------------------------------------------------------------


def test_a_draw_is_the_same_for_a_seed_and_another_in_each_call():
    weight = torch.zeros(300, 200)
    for make in (Draw.normal, Draw.uniform, lambda draw: draw.bernoulli(0.3)):
        one, two = Draw(weight, 5), Draw(weight, 5)
        first = make(one)
        assert torch.equal(first, make(two))
        assert not torch.equal(first, make(one))
        assert not torch.equal(first, make(Draw(weight, 6)))
        assert (first.shape, first.dtype) == (weight.shape, weight.dtype)
    draw = Draw(weight.bfloat16(), 5)
    assert draw.uniform((3,)).dtype is torch.bfloat16
    assert draw.normal((2, 2)).shape == (2, 2)


def test_draws_have_their_distributions():
    draw = Draw(torch.zeros(400, 1000), 3)
    normal, uniform, bernoulli = draw.normal(), draw.uniform(), draw.bernoulli(0.3)
    assert abs(float(normal.mean())) < 0.01
    assert abs(float(normal.std()) - 1) < 0.01
    assert abs(float(uniform.mean()) - 0.5) < 0.005
    assert 0 <= float(uniform.min()) < 0.001
    assert 0.999 < float(uniform.max()) <= 1
    assert set(bernoulli.unique().tolist()) == {0.0, 1.0}
    assert abs(float(bernoulli.mean()) - 0.3) < 0.005
    assert draw.bernoulli(0.0).sum() == 0
    assert draw.bernoulli(1.0, (7,)).sum() == 7
    with pytest.raises(ValueError, match=r"`p` is 1\.5"):
        draw.bernoulli(1.5)


def test_large_draws_do_not_depend_on_the_number_of_threads():
    weight, before = torch.zeros(700, 800), torch.get_num_threads()
    torch.set_num_threads(1)
    one = Draw(weight, 5).uniform()
    torch.set_num_threads(2)
    two = Draw(weight, 5).uniform()
    torch.set_num_threads(before)
    assert torch.equal(one, two)


# -- forwards of all kinds -------------------------------------------------------------------------


def noisy_net():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    return apply(nn.Sequential(*blocks), multiplied, nn.Linear)


def gradients(model, x, run):
    model.zero_grad()
    torch.manual_seed(1)
    run(model, x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: recoup.checkpoint(model, x),
        lambda model, x: checkpoint(model, x, use_reentrant=False),
        lambda model, x: recoup.recompute(model)(x),
    ],
)
def test_within_regions(run):
    model, x = noisy_net(), torch.randn(3, 4)
    want = gradients(model, x, lambda model, x: model(x))
    for got, expected in zip(gradients(model, x, run), want, strict=True):
        assert torch.equal(got, expected)


def test_one_draw_a_forward_wherever_it_is_read():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return F.linear(x, self.weight), F.linear(x, self.weight)

    one, two = apply(Twice(), multiplied)(torch.randn(2, 4))
    assert torch.equal(one, two)


def test_accumulated_gradients_are_each_those_of_its_own_draw():
    layer, x = apply(nn.Linear(4, 4, bias=False), multiplied), torch.randn(2, 4)
    outputs, want = [], torch.zeros(4, 4)
    for seed in range(4):
        with same_draw(seed=seed):
            outputs.append(layer(x).sum())
            outputs[-1].backward(retain_graph=True)
        want += layer.get_parameter("weight").grad
        layer.get_parameter("weight").grad = None
    for output in reversed(outputs):
        output.backward()
    torch.testing.assert_close(layer.get_parameter("weight").grad, want)


def test_off_and_in_evaluation_the_weight_is_raw():
    layer, x = apply(nn.Linear(4, 4), multiplied), torch.randn(2, 4)
    raw = F.linear(x, layer.get_parameter("weight"), layer.bias)
    assert not torch.equal(layer(x), raw)
    with disabled(layer):
        assert torch.equal(layer(x), raw)
    assert torch.equal(layer.eval()(x), raw)
    with torch.no_grad():
        assert not torch.equal(layer.train()(x), raw)


def test_copies_pickles_and_states():
    layer = nn.Linear(4, 4)
    apply(layer, LoRA(layer.weight), mode="always")
    x = torch.randn(2, 4)
    again = copy.deepcopy(layer)
    assert again.weight_lora is applied(again)[0].reparametrization.function
    assert again.weight_lora is not layer.weight_lora
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.weight_lora is applied(loaded)[0].reparametrization.function
    other = nn.Linear(4, 4)
    apply(other, LoRA(other.weight), mode="always").load_state_dict(layer.state_dict())
    for each in (again, loaded, other):
        assert torch.equal(each(x), layer(x))


def test_parameters_that_a_call_is_given():
    layer = nn.Linear(4, 4)
    apply(layer, LoRA(layer.weight), mode="always")
    x = torch.randn(2, 4)
    given = {n: torch.randn_like(p, requires_grad=True) for n, p in layer.named_parameters()}
    weight = given["weight"] + given["weight_lora.b"] @ given["weight_lora.a"]
    got = functional_call(layer, given, (x,))
    torch.testing.assert_close(got, F.linear(x, weight, given["bias"]))
    with pytest.raises(ChangedError):  # as for any region: backward would read other parameters
        got.square().sum().backward()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [LoRA, None, 3, "relu"])
def test_what_is_no_function(fn):
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="`fn` is"):
        apply(layer, fn)
    assert applied(layer) == []


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda weight, draw: None, "returned NoneType"),
        (lambda weight, draw: weight > 0, "returned torch.bool"),
        (lambda weight, draw: weight.detach().mul_(2), "in place"),
        (lambda weight, draw: weight.data.int(), "returned torch.int32"),
    ],
)
@pytest.mark.parametrize("with_graph", [True, False])
def test_what_a_function_must_not_do(fn, message, with_graph):
    layer = apply(nn.Linear(2, 2), fn)
    with torch.set_grad_enabled(with_graph), pytest.raises(ValueError, match=message):
        layer(torch.ones(1, 2))
    assert hooks_in_force() is None


def test_the_same_function_twice_and_a_name_that_is_taken():
    layer = apply(nn.Linear(2, 2), multiplied)
    with pytest.raises(ValueError, match="`weight` has apply"):
        apply(layer, multiplied)
    layer.weight_lora = nn.Identity()
    with pytest.raises(ValueError, match="`weight_lora`, and that name is taken"):
        apply(layer, LoRA(layer.weight))
    assert len(applied(layer)) == 1


def test_a_function_that_changes_a_buffer_counts_once():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, weight, draw):
            self.scale += 1
            return weight * self.scale.clone()

    layer, counts = nn.Linear(2, 2), Counts()
    apply(layer, counts)
    layer(torch.ones(1, 2)).sum().backward()
    assert counts.scale == 2
    torch.testing.assert_close(layer.get_parameter("weight").grad, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("what", ["weight", "tensor", "number", "own"])
def test_what_changes_between_forward_and_backward_is_named(what):
    scale, power = torch.full((2, 2), 3.0), 2.0
    layer = nn.Linear(2, 2)
    if what == "own":
        apply(layer, LoRA(layer.weight))
    else:
        apply(layer, lambda weight, draw: weight * scale**power)
    y = layer(torch.ones(1, 2, requires_grad=True)).sum()
    with torch.no_grad():
        if what == "weight":
            layer.get_parameter("weight").mul_(2)
        elif what == "tensor":
            scale.mul_(3)
        elif what == "number":
            power = 3.0
        else:
            layer.weight_lora.a.mul_(2)
    with pytest.raises(RecoupError):
        y.backward()


def test_draws_of_torch_within_a_function_are_repeated():
    """They cost the states of the generators, and are right."""
    layer = apply(nn.Linear(3, 3, bias=False), lambda w, draw: w * torch.rand_like(w))
    x = torch.eye(3, requires_grad=True)
    used = layer(x).T  # the weight of forward
    torch.rand(5)
    used.sum().backward()
    torch.testing.assert_close(x.grad, used.detach().sum(0).expand(3, 3))
