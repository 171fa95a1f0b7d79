"""Noise whose deviation is trained or relative, its divergence, and functions of users."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.distributions import kl_divergence as kl_of_torch
from torch.nn import functional as F

import recoup
from recoup.weights import Draw, applied, apply, kl_divergence, set_step, step, update
from tests.chance import are_even, are_gaussian, has_share
from tests.weight_zoo import Scaled

LEARNED = ["tensor", "row", "weight"]


def noisy(layer, learned="row", std=0.3, **more):
    return recoup.weight_noise(layer, std=std, learned=learned, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (4,), (5, 1), (5, 4)])
def test_a_parameter_of_any_shape_is_used_as_it_is(shape, dtype):
    std = nn.Parameter(torch.rand(shape) + 0.1)
    layer = recoup.weight_noise(nn.Linear(4, 5).to(dtype), std=std)
    raw, x = layer.get_parameter("weight"), torch.randn(3, 4, dtype=dtype)
    with step(layer):
        noise, output = (layer.weight - raw).detach() / std.detach(), layer(x)
    assert (output.dtype, layer.weight_std is std) == (dtype, True)
    output.sum().backward()
    want = (x.sum(0).expand(5, 4) * noise).float().sum_to_size(shape)
    torch.testing.assert_close(std.grad, want, rtol=3e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("learned", "shape"), [("tensor", ()), ("row", (3, 1, 1)), ("weight", (3, 2, 4))]
)
def test_shapes_names_and_the_first_values(learned, shape):
    made = noisy(nn.Conv1d(2, 3, 4), learned, 0.25)
    std = made.get_parameter("weight_std")
    assert std.shape == shape
    assert (std == 0.25).all()
    std = noisy(nn.LayerNorm(6, dtype=torch.bfloat16, device="meta")).weight_std
    assert (std.shape, std.dtype, std.is_meta) == ((6,), torch.bfloat16, True)


def test_what_is_frozen_or_updated():
    layer, x = noisy(nn.Linear(4, 4)), torch.randn(2, 4)
    for frozen in ("weight", "weight_std"):
        layer.zero_grad()
        layer.get_parameter(frozen).requires_grad_(False)
        layer(x).sum().backward()
        assert [n for n, p in layer.named_parameters() if p.grad is None] == [frozen]
        layer.get_parameter(frozen).requires_grad_(True)
    model, std = nn.Sequential(layer, recoup.weight_noise(nn.Linear(4, 2))), layer.weight_std
    update(model, std=0.75)
    assert layer.weight_std is std
    assert (std == 0.75).all()
    assert repr(applied(model)[1]) == "1.weight: weight_noise(std=0.75)"


def kl_by_torch(weight, std, prior_std, prior_mean=0.0):
    numbers = [torch.as_tensor(x, dtype=weight.dtype) for x in (std, prior_mean, prior_std)]
    noisy = Normal(weight, numbers[0].abs().expand_as(weight))
    return kl_of_torch(noisy, Normal(*numbers[1:])).sum()


@pytest.mark.sampled(19)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("prior", [(1.0, 0.0), (0.3, -0.7), (None, 0.0)])
@pytest.mark.parametrize("learned", [*LEARNED, None])
def test_the_divergence_and_its_gradients_are_those_of_torch(learned, prior, normed):
    layer = noisy(nn.Conv1d(3, 4, 2).double(), learned)
    recoup.weight_dropout(recoup.weight_norm(layer) if normed else layer, p=0.5)
    if learned:
        layer.weight_std.data.copy_(torch.randn_like(layer.weight_std))  # of both signs
    parameters = [p for name, p in layer.named_parameters() if name.startswith("weight")]
    weight, std = layer.get_parameter("weight"), layer.weight_std if learned else 0.3
    weight = torch._weight_norm(weight, layer.weight_g, 0) if normed else weight
    prior_std, prior_mean = prior
    if prior_std is None:  # the one that fits best
        prior_mean = weight.mean()
        prior_std = ((weight - prior_mean).square() + torch.as_tensor(std).square()).mean().sqrt()
    want = kl_by_torch(weight, std, prior_std, prior_mean)
    stream = torch.get_rng_state()
    got = kl_divergence(layer, prior_std=prior[0], prior_mean=prior[1])
    assert torch.equal(stream, torch.get_rng_state())
    torch.testing.assert_close(got, want)
    gradients = (torch.autograd.grad(each, parameters) for each in (got, want))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


def test_a_parameter_counts_once_unless_its_uses_have_several_deviations():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    weight, last = model[0].weight.detach(), model[2].weight.detach()
    for std in (0.2, nn.Parameter(torch.tensor(0.2))):
        noised = recoup.weight_noise(copy.deepcopy(model), nn.Linear, std)
        want = kl_by_torch(weight, 0.2, 1.0) + kl_by_torch(last, 0.2, 1.0)
        torch.testing.assert_close(kl_divergence(noised, prior_std=1.0), want)
        got = kl_divergence(noised, r"2\..*", prior_std=1.0)
        torch.testing.assert_close(got, kl_by_torch(last, 0.2, 1.0))
    recoup.weight_noise(model[0], std=0.2), recoup.weight_noise(model[1], std=lambda step: 0.4)
    model = nn.Sequential(recoup.weight_dropout(nn.Linear(3, 3)), model)
    want = kl_by_torch(weight, 0.2, 1.0) + kl_by_torch(weight, 0.4, 1.0)
    torch.testing.assert_close(kl_divergence(model, prior_std=1.0), want)


def test_limits_of_the_divergence():
    layer = recoup.weight_noise(nn.Linear(3, 2), std=0.0)
    empty, prior = recoup.weight_noise(nn.Embedding(0, 2), std=0.5), nn.Parameter(torch.tensor(2.0))
    kl_divergence(recoup.weight_noise(nn.Linear(3, 2)), prior_std=prior).backward()
    assert prior.grad.abs() > 0
    for fitted in (1.0, None):
        assert kl_divergence(layer, prior_std=fitted) == math.inf
        assert kl_divergence(empty, prior_std=fitted) == 0
    scheduled = recoup.weight_noise(nn.Linear(3, 2), std=lambda step: 0.1 + step)
    got = kl_divergence(set_step(scheduled, 2), prior_std=1.0)
    torch.testing.assert_close(got, kl_by_torch(scheduled.get_parameter("weight"), 2.1, 1.0))


def test_a_module_is_registered_trained_saved_and_copied_beside_the_weight():
    layer, scaled, x = nn.Linear(4, 4), Scaled(), torch.randn(2, 4)
    raw = layer.weight  # in evaluation, in which its dropout of entries is none
    nn.init.constant_(scaled.scale, 0.7)  # is loaded below, and not that of a new one
    apply(layer, scaled, mode="always").eval()
    assert layer.weight_scaled is scaled
    assert list(layer.state_dict()) == ["weight", "bias", "weight_scaled.scale"]
    output = layer(x)
    torch.testing.assert_close(output, F.linear(x, raw * scaled.scale, layer.bias))
    output.sum().backward()
    torch.testing.assert_close(scaled.scale.grad, (x.sum(0) * raw).sum())
    again, other = copy.deepcopy(layer), apply(nn.Linear(4, 4), Scaled(), mode="always").eval()
    assert again.weight_scaled is applied(again)[0].reparametrization.function
    other.load_state_dict(layer.state_dict())
    for each in (again, other):
        assert torch.equal(each(x), output)
    assert list(recoup.weights.remove(layer).state_dict()) == ["weight", "bias"]


def test_draws_of_torch_within_a_function_are_repeated_and_a_buffer_counts_once():
    counts = nn.BatchNorm1d(3)
    counts.forward = lambda w, draw: nn.BatchNorm1d.forward(counts, w * torch.rand_like(w))
    layer, x = nn.Linear(3, 3, bias=False), torch.eye(3, requires_grad=True)
    made = apply(layer, counts)(x).T  # the weight of forward
    torch.rand(5)
    made.sum().backward()
    assert counts.num_batches_tracked == 1
    torch.testing.assert_close(x.grad, made.detach().sum(0).expand(3, 3))
    layer = apply(apply(nn.Linear(4, 4), lambda w, draw: w + 1), lambda w, draw: w * 2)  # in order
    torch.testing.assert_close(layer.weight, (layer.get_parameter("weight") + 1) * 2)


def test_the_draw_of_a_function_is_that_of_its_seed_and_has_its_distribution():
    zeros = torch.zeros(400, 500)
    one, two = Draw(zeros, 5), Draw(zeros, 5)
    for make in (Draw.normal, Draw.uniform, lambda draw: draw.bernoulli(0.3)):
        first, again, *others = make(one), make(two), make(one), make(Draw(zeros, 6))
        make(two)
        assert torch.equal(first, again)
        assert not any(torch.equal(first, each) for each in others)
        assert (first.shape, first.dtype) == (zeros.shape, zeros.dtype)
    uniform, bernoulli = one.uniform(), one.bernoulli(0.3)
    assert are_gaussian(one.normal().flatten())
    assert are_even(torch.histc(uniform, 256, 0, 1))
    assert 0 <= float(uniform.min()) < float(uniform.max()) <= 1
    assert set(bernoulli.unique().tolist()) == {0.0, 1.0}
    assert has_share(bernoulli == 1, 1 - round(0.7 * 65536) / 65536)
    low = Draw(zeros.bfloat16(), 5).bernoulli(1.0, (7, 2))
    assert (low.shape, low.dtype, low.sum()) == ((7, 2), torch.bfloat16, 14)
