"""Layers: gradients, manners, channels, and their order; test_check.py has what they compute."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from recoup.invertible import (
    ActNorm,
    Flatten,
    Flip,
    InvertibleConv1x1,
    InvertibleConv1x1LU,
    InvertibleResidual,
    Permute,
    Split,
    Squeeze,
)
from tests.oracle import assert_same_tensors


def flat(y: Any) -> Tensor:
    parts = y if isinstance(y, tuple) else (y,)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_calls_leave_input_stream_and_layer_as_they_were_and_take_an_empty_batch(case):
    layer, x = case
    # A log-determinant that is kept on the layer holds the graph of a call, and gets stale.
    before, version, same = dict(vars(layer)), x._version, x.clone()
    state = torch.random.get_rng_state()
    layer.inverse(layer(x)[0])
    assert vars(layer) == before
    assert x._version == version
    assert torch.equal(x, same)
    assert torch.equal(torch.random.get_rng_state(), state)
    empty, log_det = layer(x[:0])
    assert log_det.shape == (0,)
    assert layer.inverse(empty)[0].shape == x[:0].shape


def test_gradients_of_a_batch_hold_each_samples_own_and_no_parameter_is_without(case):
    layer, x = case

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y, log_det = layer(x)
        (flat(y).pow(3).sum() + log_det.sum()).backward()
        return x.grad

    close(gradient(x), torch.cat([gradient(x[:1]), gradient(x[1:])]))
    # A weight that the log-determinant does not depend on must still train.
    assert [name for name, p in layer.named_parameters() if p.grad is None] == []


def test_float32_stays_float32_under_autocast_too_and_copies_compute_the_same(case):
    layer, x = case[0].float(), case[1].float()
    plain, of_plain = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(flat(twin(x)[0]), flat(plain))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, log_det = layer(x)
        back, _ = layer.inverse(y)
    for each in (plain, y):
        assert flat(each).dtype == log_det.dtype == of_plain.dtype == torch.float32
    for each in (layer.inverse(plain)[0], back):
        torch.testing.assert_close(each, x, rtol=1e-4, atol=1e-4)
    # Only the networks of couplings are rounded.
    if not hasattr(layer, "network") or isinstance(layer, InvertibleResidual):
        assert torch.equal(flat(y), flat(plain))
        assert torch.equal(log_det, of_plain)


X = torch.arange(24.0).view(2, 3, 2, 2)
PIXELS = torch.arange(16.0).view(1, 1, 4, 4)
TO_DEPTH = torch.tensor(
    [[[0, 2], [8, 10]], [[1, 3], [9, 11]], [[4, 6], [12, 14]], [[5, 7], [13, 15]]]
)
ROWS = X.transpose(1, 2)  # not contiguous


@pytest.mark.parametrize(
    ("layer", "x", "wanted"),
    [
        (Flatten((3, 2, 2)), X, X.flatten(1)),
        (Flatten((2, 3, 2)), ROWS, ROWS.flatten(1)),
        (Squeeze(), PIXELS, TO_DEPTH[None].float()),  # space to depth, not a reshape
        (Split(), X, (X[:, :2], X[:, 2:])),  # the first part is the larger, and goes on
        (Permute([2, 0, 1]), X, X[:, [2, 0, 1]]),  # channel i is the one named
        (Flip(), X, X[:, [2, 1, 0]]),
    ],
    ids=repr,
)
def test_where_values_go(layer, x, wanted):
    y, log_det = layer(x)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    back, inverse_log_det = layer.inverse(y)
    assert torch.equal(back, x)
    assert log_det.tolist() == inverse_log_det.tolist() == [0.0] * len(x)


def test_early_latent_does_not_hold_the_whole_input():
    for n in (1, 4):
        (_, z), _ = Split()(torch.randn(n, 4, 3))
        assert z.untyped_storage().nbytes() == z.numel() * 4


def test_an_order_is_random_and_a_loaded_one_changes_the_inverse_too():
    order = Permute(20).permutation.tolist()
    assert order != sorted(order) == list(range(20))
    layer = Permute([0, 1, 2])
    layer.load_state_dict(Permute([1, 2, 0]).state_dict())
    y, _ = layer(X)
    assert torch.equal(y, X[:, [1, 2, 0]])
    assert torch.equal(layer.inverse(y)[0], X)


@pytest.mark.parametrize("shape", [(64, 3), (8, 3, 5, 7)])
def test_first_training_batch_has_mean_0_and_variance_1_a_channel(shape):
    scale = torch.tensor([0.01, 1.0, 50.0]).view(1, 3, *[1] * (len(shape) - 2))
    y, _ = ActNorm(3)(torch.randn(shape) * scale - 7)
    dims = [0, *range(2, y.dim())]
    torch.testing.assert_close(y.mean(dims), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(y.var(dims, correction=0), torch.ones(3), atol=1e-3, rtol=0)


def resumed(layer):
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = ActNorm(2)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    return other


@pytest.mark.parametrize("again", [lambda layer: layer, copy.deepcopy, resumed])
def test_start_happens_once(again):
    layer = ActNorm(2)
    assert not again(layer).started
    layer(5 + torch.randn(16, 2))
    other, before = again(layer), copy.deepcopy(layer.state_dict())
    other(torch.randn(16, 2))
    assert_same_tensors(dict(other.state_dict()), dict(before))


def test_evaluation_an_empty_batch_and_values_that_are_not_finite_do_not_start():
    layer, x = ActNorm(2).eval(), 3 + torch.randn(4, 2)
    y, log_det = layer(x)
    assert torch.equal(y, x)
    assert log_det.tolist() == [0.0] * 4
    assert not layer.started
    layer.train()(x[:0])
    x[3, 1] = math.inf
    with pytest.raises(ValueError, match="not finite"):
        layer(x)
    assert not layer.started
    assert layer.bias.tolist() == [0.0, 0.0]


def test_constant_channel_gives_finite_values():
    layer, x = ActNorm(2), torch.randn(30, 2)
    x[:, 1] = 1 / 3
    y, log_det = layer(x)
    assert y.isfinite().all()
    assert layer.log_scale[1] == 0
    assert y[:, 1].abs().max() < 1e-6
    assert log_det.isfinite().all()


kinds = pytest.mark.parametrize("kind", [InvertibleConv1x1, InvertibleConv1x1LU])


@kinds
@pytest.mark.parametrize("num_channels", [1, 7])
def test_starts_as_a_rotation_that_follows_the_default_generator(kind, num_channels):
    weights = []
    for seed in (0, 1, 2, 3, 3):  # the sign of a determinant is drawn
        torch.manual_seed(seed)
        layer = kind(num_channels)
        weights.append(layer.weight() if kind is InvertibleConv1x1LU else layer.weight)
        assert torch.linalg.det(weights[-1]) > 0
    weight = weights[-1]
    assert torch.equal(weight, weights[-2])
    assert num_channels == 1 or not torch.equal(weight, weights[0])
    torch.testing.assert_close(weight @ weight.T, torch.eye(num_channels), atol=1e-5, rtol=0)
    assert all(parameter.is_contiguous() for parameter in layer.parameters())


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 3, 3)])
def test_lu_and_plain_agree(shape):
    plain, layer = (
        kind(4, dtype=torch.float64) for kind in (InvertibleConv1x1, InvertibleConv1x1LU)
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    plain.weight.data.copy_(layer.weight())
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


@kinds
def test_type_and_device_are_torchs_defaults_or_those_that_are_given(kind):
    def found(**given):
        layer = kind(2, **given)
        return {(each.dtype, each.device.type) for each in (*layer.parameters(), *layer.buffers())}

    assert found(dtype=torch.float64) == {(torch.float64, "cpu")}
    with torch.device("meta"):
        assert found() == {(torch.float32, "meta")}
