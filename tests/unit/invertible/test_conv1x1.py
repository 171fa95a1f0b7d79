from __future__ import annotations

import math

import pytest
import torch

from recoup.invertible import InvertibleConv1x1, InvertibleConv1x1LU


@pytest.mark.parametrize("kind", [InvertibleConv1x1, InvertibleConv1x1LU])
@pytest.mark.parametrize("num_channels", [1, 2, 7])
def test_starts_as_a_rotation(kind, num_channels):
    layer = kind(num_channels)
    weight = layer.weight() if kind is InvertibleConv1x1LU else layer.weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(num_channels), atol=1e-5, rtol=0)
    assert torch.linalg.det(weight) > 0
    assert all(parameter.is_contiguous() for parameter in layer.parameters())
    _, log_det = layer(torch.randn(2, num_channels, 3, 3))
    torch.testing.assert_close(log_det, torch.zeros(2), atol=1e-4, rtol=0)


def test_start_follows_the_default_generator():
    torch.manual_seed(3)
    first = InvertibleConv1x1(4)
    torch.manual_seed(3)
    assert torch.equal(first.weight, InvertibleConv1x1(4).weight)
    assert not torch.equal(first.weight, InvertibleConv1x1(4).weight)


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 5), (2, 4, 3, 3)])
def test_lu_and_plain_agree(shape):
    plain = InvertibleConv1x1(4, dtype=torch.float64)
    torch.nn.init.normal_(plain.weight)
    layer = InvertibleConv1x1LU.from_plain(plain)
    x = torch.randn(shape, dtype=torch.float64)
    for direction in ("forward", "inverse"):
        expected, expected_log_det = getattr(plain, direction)(x)
        actual, log_det = getattr(layer, direction)(x)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(log_det, expected_log_det, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["plain", "lu"])
def test_negative_determinants(kind):
    layer = InvertibleConv1x1(2, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0, 2.0], [3.0, 0.0]]))
    if kind == "lu":
        layer = InvertibleConv1x1LU.from_plain(layer)
    x = torch.randn(1, 2, 2, 2, dtype=torch.float64)
    y, log_det = layer(x)
    assert log_det.item() == pytest.approx(4 * math.log(6))
    torch.testing.assert_close(layer.inverse(y)[0], x)


def test_a_step_keeps_the_fixed_factors_fixed():
    layer = InvertibleConv1x1LU(4)
    assert {name for name, _ in layer.named_parameters()} == {"lower", "upper", "log_s"}
    assert {name for name, _ in layer.named_buffers()} == {"permutation", "sign"}
    other = InvertibleConv1x1LU(4)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight(), layer.weight())


@pytest.mark.parametrize("kind", [InvertibleConv1x1, InvertibleConv1x1LU])
def test_autocast_does_not_round_the_mixing(kind):
    layer, x = kind(4), torch.randn(2, 4, 3, 3)
    expected, expected_log_det = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, log_det = layer(x)
        back, _ = layer.inverse(y)
    assert torch.equal(y, expected)
    assert torch.equal(log_det, expected_log_det)
    torch.testing.assert_close(back, x, rtol=1e-4, atol=1e-4)


def test_the_log_determinant_is_that_of_slogdet():
    layer = InvertibleConv1x1(5, dtype=torch.float64)
    torch.nn.init.normal_(layer.weight)
    _, log_det = layer(torch.randn(3, 5, 2, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(log_det.square().sum(), layer.weight, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), layer.weight)
    expected = 2 * torch.linalg.slogdet(layer.weight)[1].expand(3)
    (first,) = torch.autograd.grad(expected.square().sum(), layer.weight, create_graph=True)
    torch.testing.assert_close(gradient, first)
    torch.testing.assert_close(second, torch.autograd.grad(first.square().sum(), layer.weight)[0])


def test_a_singular_matrix_has_no_gradient():
    layer = InvertibleConv1x1(4)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    y, log_det = layer(torch.randn(2, 4, 3))
    assert bool((log_det == -math.inf).all())
    (y.sum() + log_det.sum()).backward()
    assert bool(layer.weight.grad.isnan().any())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of jacfwd
def test_the_log_determinant_under_transforms():
    layer = InvertibleConv1x1(3, dtype=torch.float64)
    x = torch.randn(2, 3, 2, dtype=torch.float64)

    def log_det(weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))[1].sum()

    weight = layer.weight.detach()
    expected = 4 * torch.linalg.inv(weight).T
    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.jacrev):
        torch.testing.assert_close(transform(log_det)(weight), expected)
    both = torch.func.vmap(torch.func.grad(log_det))(torch.stack([weight, 2 * weight]))
    torch.testing.assert_close(both, torch.stack([expected, expected / 2]))
