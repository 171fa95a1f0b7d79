from __future__ import annotations

import math

import pytest
import torch

from recoup.invertible import Dequantize, Logit, Normalize


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize("std", [2.0, [2.0, 0.5, -3.0]])
def test_normalize_counts_every_position_in_the_log_det(shape, std):
    layer = Normalize([1.0, 2.0, 3.0], std)
    _, log_det = layer(torch.randn(shape))
    stds = [std] * 3 if isinstance(std, float) else std
    expected = -math.prod(shape[2:]) * sum(math.log(abs(s)) for s in stds)
    torch.testing.assert_close(log_det, torch.full((2,), expected))


def test_normalize_refuses_what_cannot_be_undone():
    with pytest.raises(ValueError, match="`std` may be 0"):
        Normalize(0.0, [1.0, 0.0])
    with pytest.raises(ValueError, match="finite"):
        Normalize(math.nan, 1.0)
    with pytest.raises(ValueError, match="2 and `std` 3"):
        Normalize([0.0, 1.0], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"`x` has shape \(2, 4\)"):
        Normalize([0.0, 1.0], 1.0)(torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"`x` has shape \(2,\)"):
        Normalize(0.0, 1.0)(torch.randn(2))


def test_normalize_is_saved_with_the_state():
    layer = Normalize([0.0, 0.0], [1.0, 1.0])
    layer.load_state_dict(Normalize([1.0, 2.0], 4.0).state_dict())
    assert layer(torch.tensor([[5.0, 6.0]]))[0].tolist() == [[1.0, 1.0]]


def test_logit_keeps_the_ends_finite():
    x = torch.tensor([[0.0, 1.0]], requires_grad=True)
    y, log_det = Logit()(x)
    (y.sum() + log_det.sum()).backward()
    assert y.isfinite().all()
    assert log_det.isfinite().all()
    assert x.grad.isfinite().all()


def test_logit_takes_back_latents_far_out():
    y = torch.tensor([[-200.0, 200.0]])
    x, log_det = Logit(0.05).inverse(y)
    assert x.isfinite().all()
    torch.testing.assert_close(log_det, torch.tensor([-400.0 - 2 * math.log(0.9)]))


@pytest.mark.parametrize("level", [0, 128, 255])
def test_a_margin_of_a_millionth_is_exact_enough_for_256_levels(level):
    """As published figures of MNIST have it: in float32, levels come back, and bits to 1e-4."""
    torch.manual_seed(0)
    noisy, logit = Dequantize(256), Logit(1e-6)
    x = torch.full((50, 1, 28, 28), level)
    y = noisy(x)[0]
    latent, log_det = logit(y)
    assert torch.equal(noisy.inverse(logit.inverse(latent)[0])[0], x.float())
    wanted = logit(y.double())[1]
    assert float((log_det - wanted).mean().abs()) / (784 * math.log(2)) < 1e-4


@pytest.mark.parametrize("alpha", [-0.1, 0.5, math.nan])
def test_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match="`alpha` is"):
        Logit(alpha)


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
