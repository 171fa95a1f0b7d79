"""Layers of channels: when ActNorm starts, and from what; the two forms of a 1x1 convolution."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import distributed, multiprocessing

from recoup.invertible import ActNorm, InvertibleConv1x1, InvertibleConv1x1LU
from tests.oracle import assert_same_tensors

# -- ActNorm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 3), (8, 3, 5, 7), (1, 3, 4, 4)])
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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_evaluation_an_empty_batch_and_values_that_are_not_finite_do_not_start(bad):
    layer, x = ActNorm(2).eval(), 3 + torch.randn(4, 2)
    y, log_det = layer(x)
    assert torch.equal(y, x)
    assert log_det.tolist() == [0.0] * 4
    assert not layer.started
    layer.train()(x[:0])
    x[3, 1] = bad
    with pytest.raises(ValueError, match="not finite"):
        layer(x)
    assert not layer.started
    assert layer.bias.tolist() == [0.0, 0.0]


def test_constant_channel_gives_finite_values_and_a_start_keeps_what_a_later_forward_does():
    layer, x, kept = ActNorm(2), torch.randn(16, 2, requires_grad=True), ([], [])
    x.data[:, 1] = 1 / 3
    for found in kept:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, found=found: found.append((tensor.shape, tensor.dtype)), lambda _: None
        ):
            y, log_det = layer(x)
    assert kept[0] == kept[1] != []
    assert y.isfinite().all()
    assert layer.log_scale[1] == 0
    assert y[:, 1].abs().max() < 1e-6
    assert log_det.isfinite().all()


def start_on_a_rank(rank, port_file, out):
    distributed.init_process_group(
        "gloo", init_method=f"file://{port_file}", rank=rank, world_size=2
    )
    torch.manual_seed(rank)
    x = 3 * rank + torch.randn(5 + rank, 2)  # ranks with other batches, even of other sizes
    layer = ActNorm(2)
    layer(x)
    torch.save((x, layer.state_dict()), f"{out}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_all_ranks_start_from_the_batches_of_all(tmp_path):
    multiprocessing.spawn(start_on_a_rank, (tmp_path / "port", tmp_path), nprocs=2)
    (x0, state0), (x1, state1) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    whole = ActNorm(2)
    whole(torch.cat([x0, x1]))
    for name, value in whole.state_dict().items():
        assert torch.equal(state0[name], state1[name])
        torch.testing.assert_close(state0[name], value)


# -- 1x1 convolutions ------------------------------------------------------------------------------

kinds = pytest.mark.parametrize("kind", [InvertibleConv1x1, InvertibleConv1x1LU])


@kinds
@pytest.mark.parametrize("num_channels", [1, 7])
def test_starts_as_a_rotation_that_follows_the_default_generator(kind, num_channels):
    for seed in range(8):  # the sign of a determinant is drawn
        weights = []
        for _ in "ab":
            torch.manual_seed(seed)
            layer = kind(num_channels)
            weights.append(layer.weight() if kind is InvertibleConv1x1LU else layer.weight)
        assert torch.equal(*weights)
        assert torch.linalg.det(weights[0]) > 0
    weight = weights[0]
    assert num_channels == 1 or not torch.equal(weight, InvertibleConv1x1(num_channels).weight)
    torch.testing.assert_close(weight @ weight.T, torch.eye(num_channels), atol=1e-5, rtol=0)
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


@kinds
def test_type_and_device_are_torchs_defaults_or_those_that_are_given(kind):
    def found(**given):
        layer = kind(2, **given)
        return {(each.dtype, each.device.type) for each in (*layer.parameters(), *layer.buffers())}

    assert found() == {(torch.float32, "cpu")}
    assert found(dtype=torch.float64) == {(torch.float64, "cpu")}
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert found() == {(torch.float64, "meta")}
    finally:
        torch.set_default_dtype(torch.float32)
