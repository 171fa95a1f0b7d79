"""Blocks ``x + f(x)`` and their layers: bounds, log-determinants, the inverse, and gradients."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

import recoup
from recoup.errors import ConvergenceError
from recoup.invertible import InvertibleResidual, LipschitzConv2d, LipschitzLinear, LipSwish
from recoup.invertible.residual import power_series, probe_for, series_weights
from tests.alive import held_after, no_collector


def dense_norm(layer, *shape):
    unit = torch.eye(math.prod(shape), dtype=torch.float64).view(-1, *shape)
    with torch.no_grad():
        matrix = (layer(unit) - layer(torch.zeros_like(unit))).flatten(1)
    return torch.linalg.svdvals(matrix)[0].item()


@pytest.mark.parametrize(("make", "shape"), [
    (partial(LipschitzLinear, 7, 5), (7,)),
    (partial(LipschitzConv2d, 3, 4, 1), (3, 4, 4)),
    (partial(LipschitzConv2d, 3, 4, 2), (3, 9, 9)),
    (partial(LipschitzConv2d, 2, 3, (3, 5), padding=(1, 2)), (2, 9, 9)),
])  # fmt: skip
def test_norm_is_at_most_the_coefficient_and_not_much_less(make, shape):
    layer = make(coefficient=0.8).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.1)
    # A small image leaves less of an unbounded one.
    assert 0.8 * (0.99 if len(shape) == 1 else 0.6) <= dense_norm(layer, *shape)
    assert dense_norm(layer, *shape) <= 0.8 * (1 + 1e-9)
    layer.weight.data.mul_(-100)  # a change that leaves no version behind, and no state
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert dense_norm(layer, *shape) <= 0.8 * (1 + 1e-9)
    # Weights below the coefficient, and those of zeros, stay as they are.
    layer.weight.data.div_(layer.weight.data.abs().max() * 1e3)
    assert torch.equal(layer.normalized_weight(), layer.weight)
    layer.weight.data.zero_()
    layer(torch.ones(2, *shape, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad.isfinite().all()


def test_between_two_frequencies_of_the_grid_the_norm_is_no_higher():
    layer = LipschitzConv2d(1, 1, (1, 3), coefficient=0.9, dtype=torch.float64)
    # Of largest norm in the middle of two frequencies.
    layer.weight.data.copy_(torch.tensor([1.0, 7.02, -0.9]).view(1, 1, 1, 3))

    def largest(num_frequencies):
        frequencies = 2 * math.pi / num_frequencies * torch.arange(num_frequencies)
        waves = torch.exp(1j * frequencies[:, None] * torch.arange(3)).to(torch.complex128)
        return (waves @ layer.normalized_weight().detach().flatten().to(waves.dtype)).abs().max()

    assert largest(4096) > 1.001 * largest(16)
    assert largest(4096) <= 0.9


def test_gradients_go_through_the_norm():
    layer, x = LipschitzConv2d(2, 1, (1, 2), dtype=torch.float64), double(1, 2, 3, 3)
    layer.weight.data.normal_()

    def call(weight):
        return functional_call(layer, {"weight": weight}, (x,)).square().sum()

    assert torch.autograd.gradcheck(call, layer.weight)
    assert torch.autograd.gradgradcheck(call, layer.weight, fast_mode=True)
    # the output does not depend on the size of the weight, so its gradient is at a right angle
    (gradient,) = torch.autograd.grad(call(layer.weight), layer.weight)
    assert (gradient * layer.weight).sum().abs() < 1e-9 * gradient.norm() * layer.weight.norm()


def test_lipswish_rises_by_at_most_one():
    activation = LipSwish().double()
    x = torch.linspace(-30, 30, 20001, dtype=torch.float64, requires_grad=True)
    for beta in (-5.0, 0.5, 5.0):
        nn.init.constant_(activation.raw_beta, beta)
        slope = torch.autograd.grad(activation(x).sum(), x)[0]
        assert slope.abs().max() <= 1
    assert slope.abs().max() > 0.99
    assert LipSwish()(torch.ones(1)).item() == pytest.approx(1 / (1 + math.exp(-1)) / 1.1)


def dense(size=2, width=8, coefficient=0.9):
    torch.manual_seed(0)
    linear = partial(LipschitzLinear, coefficient=coefficient)
    network = nn.Sequential(linear(size, width), LipSwish(), linear(width, size)).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    return network


double = partial(torch.randn, dtype=torch.float64)


every_log_det = pytest.mark.parametrize("log_det", ["exact", "series", "unbiased"])


@every_log_det
def test_gradients_are_those_of_finite_differences(log_det):
    block = InvertibleResidual(dense(3, 4), log_det=log_det, num_terms=3)
    names = [name for name, _ in block.named_parameters()]

    def call(x, *parameters):
        torch.manual_seed(3)
        return torch.func.functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

    x = double(2, 3).requires_grad_()
    assert call(x, *block.parameters())[1].requires_grad  # or gradcheck leaves it out
    assert torch.autograd.gradcheck(call, (x, *block.parameters()))


def test_derivatives_within_forward_are_nobody_elses():
    block, x, seen = InvertibleResidual(dense()), double(3, 2).requires_grad_(), []
    for leaf in (x, *block.parameters()):
        leaf.register_hook(seen.append)
    _, log_det = block(x)
    assert seen == [p.grad for p in block.parameters() if p.grad is not None] == []
    log_det.sum().backward()
    assert len(seen) == 1 + sum(p.grad is not None for p in block.parameters()) > 3


def test_nothing_is_held_when_the_call_has_ended():
    block, x = InvertibleResidual(dense(3)), double(4, 3).requires_grad_()
    with no_collector():
        held = held_after(lambda: recoup.checkpoint(lambda x: block(x)[1].sum(), x))
    assert held.num_bytes <= 16  # the loss, and a seed


def test_series_converges_to_exact_within_the_stated_bound():
    block, x = InvertibleResidual(dense(coefficient=0.95)), double(50, 2).requires_grad_()
    lipschitz, exact, errors = 0.95**2, block(x)[1], []
    # The series without noise: in two dimensions these signs average to the identity.
    probes = [torch.tensor([1.0, sign]).to(x).expand_as(x) for sign in (1.0, -1.0)]
    for num_terms in (1, 4, 16, 64):
        series = partial(power_series, weights=series_weights(num_terms, 0, 0.5), wants_grad=False)
        found = sum(series(block.network, x, probe)[1] / 2 for probe in probes)
        error = (found - exact).abs().max().item()
        bound = 2 * lipschitz ** (num_terms + 1) / ((num_terms + 1) * (1 - lipschitz))
        assert error <= bound
        errors.append(error)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


@every_log_det
def test_draws_follow_from_one_seed_a_call(log_det):
    block, x = InvertibleResidual(dense(4), log_det=log_det, num_terms=2), double(3, 4)
    torch.manual_seed(0)
    first, second = block(x)[1], block(x)[1]
    after = torch.get_rng_state()
    assert torch.equal(first, second) is (log_det == "exact")
    torch.manual_seed(0)
    assert torch.equal(block(x)[1], first)
    torch.manual_seed(0)
    if log_det != "exact":  # the stream moves by one number a call
        torch.randint(2**63 - 1, (2,), dtype=torch.int64)
    assert torch.equal(torch.get_rng_state(), after)
    assert block(x[:0])[1].shape == (0,)


def test_lengths_of_a_roulette_have_the_chances_that_they_are_divided_by():
    torch.manual_seed(0)
    lengths = torch.tensor([probe_for(torch.zeros(1, 1), 0.7)[1] for _ in range(2000)])
    for j in (1, 2, 5):
        share, chance = (lengths >= j).double().mean().item(), 0.7**j
        assert share == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 2000))
    # A further term is divided by the probability that it is computed.
    assert series_weights(1, 2, 0.7) == pytest.approx([1, -1 / 2 / 0.7, 1 / 3 / 0.49])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("log_det", ["exact", "unbiased"])
def test_value_is_the_same_with_and_without_gradients(mode, log_det):
    block, x = InvertibleResidual(dense(), log_det=log_det), double(3, 2)
    torch.manual_seed(0)
    expected = block(x)
    torch.manual_seed(0)
    with mode():
        actual = block(x)
        back = block.inverse(actual[0])[0]
    assert all(map(torch.equal, actual, expected))
    assert {each.requires_grad for each in actual} == {mode is torch.enable_grad}
    torch.testing.assert_close(back, x, rtol=0, atol=1e-8)


def test_inverse_has_the_gradient_of_the_inverse_function():
    block, x = InvertibleResidual(dense()), double(1, 2)
    y, jacobian_of = block(x)[0].detach(), torch.autograd.functional.jacobian
    back = jacobian_of(lambda y: block.inverse(y)[0][0], y).view(2, 2)
    jacobian = jacobian_of(lambda x: block(x)[0][0], x).view(2, 2)
    torch.testing.assert_close(back @ jacobian, torch.eye(2, dtype=x.dtype), rtol=0, atol=1e-10)


def test_inverse_that_does_not_converge_names_the_block_and_the_way_out():
    doubles = nn.Linear(2, 2).double()
    nn.init.eye_(doubles.weight).data.mul_(2)
    block = InvertibleResidual(doubles, max_iterations=20)
    words = r"InvertibleResidual over Linear.*after 20 rep.*residual is .*LipschitzLinear"
    for y, said in ((double(3, 2), words), (double(3, 2) * math.inf, "not finite")):
        with pytest.raises(ConvergenceError, match=said):
            block.inverse(y)
    # A larger tolerance is met.
    block = InvertibleResidual(dense(), tolerance=1e-3)
    y = block(double(3, 2))[0]
    residual = (block(block.inverse(y)[0])[0] - y).abs().max()
    assert 1e-9 < residual <= 1e-3 * y.abs().max().clamp(min=1)


def test_a_large_sample_leaves_the_others_exact_and_half_precision_the_determinant():
    first = LipschitzLinear(2, 8, coefficient=0.9)
    block = InvertibleResidual(nn.Sequential(first, nn.Tanh(), LipschitzLinear(8, 2)))
    y = torch.tensor([[1e6, 1e6], [0.5, -0.3]])
    together, alone = block.inverse(y)[0][1], block.inverse(y[1:])[0][0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    # A determinant of half precision is computed in single precision.
    block, x = InvertibleResidual(dense()), double(3, 2)
    _, expected = block(x)
    _, log_det = block.bfloat16()(x.bfloat16())
    assert log_det.dtype is torch.bfloat16
    torch.testing.assert_close(log_det.double(), expected, rtol=0, atol=0.05)
