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
