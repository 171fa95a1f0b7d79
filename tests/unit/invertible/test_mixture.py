"""Couplings by mixtures of logistics: the function of the paper, and the search for its inverse."""

from __future__ import annotations

import copy

import pytest
import torch

from recoup.errors import NotInvertibleError
from recoup.flows import DenseNetwork
from recoup.invertible import MixtureCoupling
from recoup.invertible import mixture as module
from tests.invertible_zoo import Says
from tests.unit.flows.models import filled


def vectors(k=4):
    layer = MixtureCoupling(DenseNetwork(3, (3 * k + 2) * 2, width=6), num_components=k)
    return filled(layer, 1.0), torch.randn(3, 5, dtype=torch.float64)


def test_the_inverse_has_the_derivatives_of_the_inverse_function():
    layer, x = vectors()
    y = filled(layer, 0.5)(x)[0].detach().requires_grad_()
    # gradcheck changes parameters in place
    call = lambda y, *parameters: layer.inverse(y)  # noqa: E731
    assert torch.autograd.gradcheck(call, [y, *layer.parameters()], fast_mode=True)
    assert torch.autograd.gradgradcheck(
        lambda v: layer.inverse(v)[0], [y], fast_mode=True, atol=1e-4
    )


def test_it_is_the_coupling_of_the_paper_and_a_share_of_the_identity():
    logits, means, raw = [0.3, -1.0, 0.5], [2.0, -1.0, 0.5], [0.2, -0.9, 0.0]
    shift, raw_scale = -0.7, 0.4
    says = Says(*logits, *means, *raw, shift, raw_scale)
    x = torch.linspace(-4, 4, 21, dtype=torch.float64).view(-1, 1)
    y, log_det = MixtureCoupling(says, num_components=3, bound=3.0)(torch.cat([x, x], dim=1))
    logits, means, raw = torch.tensor([logits, means, raw], dtype=torch.float64)
    scales = (3 * torch.tanh(raw / 3)).exp()
    means = means + torch.tensor([-1.0, 0.0, 1.0])
    log_scale = 3 * torch.tanh(torch.tensor(raw_scale, dtype=torch.float64) / 3)
    x.requires_grad_()
    below = (torch.softmax(logits, -1) * torch.sigmoid((x.unsqueeze(-1) - means) / scales)).sum(-1)
    expected = (0.99 * torch.logit(below) + 0.01 * x) * log_scale.exp() + shift
    torch.testing.assert_close(y[:, 1:], expected, rtol=1e-7, atol=1e-7)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(log_det, slope.log().squeeze(1), rtol=1e-6, atol=1e-6)


def test_components_do_not_start_alike():
    layer = MixtureCoupling(DenseNetwork(1, 26, width=4), num_components=8)
    y, log_det = layer(torch.randn(64, 2))
    (y.pow(4).sum() + log_det.sum()).backward()
    means = layer.network[-1].bias.grad[8:16]
    assert len(set(means.tolist())) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [1.0, 1e5])
def test_far_values_have_a_finite_log_det_gradient_and_inverse(dtype, far):
    layer = vectors()[0].to(dtype)
    x = torch.randn(64, 5, dtype=dtype)
    x[:, 3:] *= far  # what is changed; the network sees ordinary values
    x.requires_grad_()
    y, log_det = layer(x)
    (y.sum() + log_det.sum()).backward()
    assert log_det.isfinite().all()
    assert x.grad.isfinite().all()
    back, undone = layer.inverse(y)
    # 0.01 is the least slope: what rounding does to y is at most a hundred times that in x
    tolerance = 4e3 * torch.finfo(dtype).eps
    torch.testing.assert_close(back, x, rtol=tolerance, atol=tolerance)
    assert (log_det + undone).abs().max() < 1e4 * tolerance


def test_in_a_wide_gap_the_inverse_is_not_lost():
    # Two sharp components 40 apart: between them the distribution function is flat to every digit.
    layer = MixtureCoupling(Says(0.0, 0.0, -19.0, 19.0, -9.0, -9.0, 0.0, 0.0), num_components=2)
    x = torch.zeros(41, 2)
    x[:, 1] = torch.linspace(-20, 20, 41)
    y, log_det = layer(x)
    assert log_det.min() == pytest.approx(torch.tensor(0.01).log().item(), rel=1e-3)
    torch.testing.assert_close(layer.inverse(y)[0], x, rtol=1e-4, atol=1e-4)
    # and without the floor there would be nothing to find
    no_floor = copy.copy(layer)
    no_floor.least_slope = 0.0
    back = no_floor.inverse(no_floor(x)[0])[0]
    assert not torch.allclose(back, x, rtol=1e-2, atol=1e-2)


def test_the_search_takes_few_steps_and_says_so_if_it_does_not_converge(monkeypatch):
    layer, _ = vectors(k=8)
    y, _ = layer(torch.randn(500, 5, dtype=torch.float64))
    calls, value_and_slope = [], module._Bend.value_and_slope
    monkeypatch.setattr(
        module._Bend, "value_and_slope", lambda *args: (calls.append(1), value_and_slope(*args))[1]
    )
    with torch.no_grad():
        layer.inverse(y)
    assert 2 <= len(calls) <= 40
    monkeypatch.setattr(module, "_MOST_STEPS", 1)
    with pytest.raises(NotInvertibleError, match="did not converge in 1 steps"):
        layer.inverse(y)


def test_values_that_are_not_finite_come_back_as_nan():
    layer, x = vectors()
    y = layer(x)[0].detach()
    y[:2, 4] = torch.tensor([torch.nan, torch.inf])
    back, _ = layer.inverse(y)
    assert back[:2, 4].isnan().all()
    torch.testing.assert_close(back[2:], x[2:])
