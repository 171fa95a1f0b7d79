from __future__ import annotations

import math

import pytest
import torch

from recoup.invertible import Dequantize


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("levels", [2, 17, 255, 256])
def test_every_level_is_found_again(dtype, levels):
    x = torch.arange(levels).repeat(400).view(1, -1).to(dtype)
    y, log_det = Dequantize(levels)(x)
    assert y.dtype == (dtype if dtype.is_floating_point else torch.float32)
    assert y.min() >= 0
    assert y.max() < 1
    back, inverse_log_det = Dequantize(levels).inverse(y)
    assert torch.equal(back, x.to(back.dtype))
    assert log_det.item() == pytest.approx(-x.numel() * math.log(levels), rel=1e-6)
    assert inverse_log_det.item() == -log_det.item()


@pytest.mark.parametrize("end", ["lowest", "highest"])
@pytest.mark.parametrize("levels", [3, 17, 100, 255, 256, 1000])
def test_the_ends_of_the_noise_do_not_round_to_another_level(monkeypatch, levels, end):
    def randint(high, size, *, generator, device):
        return torch.full(size, 0 if end == "lowest" else high - 1)

    x = torch.arange(float(levels)).view(1, -1)
    with monkeypatch.context() as patch:
        patch.setattr("recoup.invertible.preprocess.draw_seed", lambda: 0)
        patch.setattr(torch, "randint", randint)
        y, _ = Dequantize(levels)(x)
    assert torch.equal(Dequantize(levels).inverse(y)[0], x)


def test_noise_is_uniform_within_the_level():
    y, _ = Dequantize(17)(torch.full((1, 200_000), 3))
    noise = y.double() * 17 - 3
    assert noise.mean().item() == pytest.approx(0.5, abs=4e-3)
    assert noise.var().item() == pytest.approx(1 / 12, abs=2e-3)
    assert noise.min() < 1e-3
    assert noise.max() > 1 - 1e-3


def test_noise_is_new_each_call_and_follows_the_seed():
    layer, x = Dequantize(17), torch.zeros(2, 3)
    torch.manual_seed(5)
    first, second = layer(x)[0], layer(x)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(layer(x)[0], first)


def test_noise_moves_the_default_stream_by_one_seed_whatever_the_size():
    torch.manual_seed(5)
    Dequantize(17)(torch.zeros(2, 3))
    small = torch.random.get_rng_state()
    torch.manual_seed(5)
    Dequantize(17)(torch.zeros(200, 3, 8, 8))
    assert torch.equal(torch.random.get_rng_state(), small)


def test_the_first_batch_of_each_kind_is_looked_at():
    """N5: in training, in evaluation, and of each type; NaN shows in the loss."""
    layer, x = Dequantize(256), torch.rand(3, 5)
    with pytest.raises(ValueError, match=r"for continuous data leave `levels` out"):
        layer(x)
    layer(x[:0])
    layer((x * 255).round())
    layer(x)  # later batches cost nothing
    with pytest.raises(ValueError, match="`x` has values from"):
        layer(x.double())
    with pytest.raises(ValueError, match="`x` has values from"):
        layer.eval()(x)
    assert Dequantize(256)(torch.full((1, 2), math.nan))[0].isnan().all()
    with pytest.raises(ValueError, match=r"from 300 to 300.*Use `levels` 301"):
        Dequantize(256)(torch.full((1, 2), 300))


def test_levels_below_one_are_refused():
    with pytest.raises(ValueError, match="`levels` is 0"):
        Dequantize(0)
