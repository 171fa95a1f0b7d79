"""The two forms of an invertible 1x1 convolution, beside each other and torch's `slogdet`."""

from __future__ import annotations

import math

import pytest
import torch

from recoup.invertible import InvertibleConv1x1, InvertibleConv1x1LU

kinds = pytest.mark.parametrize("kind", [InvertibleConv1x1, InvertibleConv1x1LU])


@kinds
@pytest.mark.parametrize("num_channels", [1, 2, 7])
def test_starts_as_a_rotation_that_follows_the_default_generator(kind, num_channels):
    weights = []
    for _ in "ab":
        torch.manual_seed(3)
        layer = kind(num_channels)
        weights.append(layer.weight() if kind is InvertibleConv1x1LU else layer.weight)
    weight = weights[0]
    assert torch.equal(*weights)
    assert num_channels == 1 or not torch.equal(weight, InvertibleConv1x1(num_channels).weight)
    torch.testing.assert_close(weight @ weight.T, torch.eye(num_channels), atol=1e-5, rtol=0)
    assert torch.linalg.det(weight) > 0
    assert all(parameter.is_contiguous() for parameter in layer.parameters())
    _, log_det = layer(torch.randn(2, num_channels, 3, 3))
    torch.testing.assert_close(log_det, torch.zeros(2), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 5), (2, 4, 3, 3)])
def test_lu_and_plain_agree(shape):
    plain = InvertibleConv1x1(4, dtype=torch.float64)
    torch.nn.init.normal_(plain.weight)
    layer = InvertibleConv1x1LU.from_plain(plain)
    x = torch.randn(shape, dtype=torch.float64)
    for direction in ("forward", "inverse"):
        for found, expected in zip(
            getattr(layer, direction)(x), getattr(plain, direction)(x), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_step_keeps_the_fixed_factors_fixed():
    layer, other = InvertibleConv1x1LU(4), InvertibleConv1x1LU(4)
    assert {name for name, _ in layer.named_parameters()} == {"lower", "upper", "log_s"}
    assert {name for name, _ in layer.named_buffers()} == {"permutation", "sign"}
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight(), layer.weight())


def test_the_log_determinant_is_that_of_slogdet():
    layer = InvertibleConv1x1(5, dtype=torch.float64)
    torch.nn.init.normal_(layer.weight)
    _, log_det = layer(torch.randn(3, 5, 2, dtype=torch.float64))
    found = []
    for each in (log_det, 2 * torch.linalg.slogdet(layer.weight)[1].expand(3)):
        (first,) = torch.autograd.grad(each.square().sum(), layer.weight, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), layer.weight)])
    torch.testing.assert_close(*found)


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
