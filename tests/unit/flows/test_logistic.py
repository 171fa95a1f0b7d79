"""The logistic distribution, beside the same one composed of torch's own."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch.distributions import AffineTransform, SigmoidTransform, TransformedDistribution, Uniform

from recoup.flows import Logistic


def test_density_and_distribution_function_are_those_of_torch():
    loc, scale = torch.tensor([[0.0, -3.0, 2.0], [1.0, 0.2, 5.0]], dtype=torch.float64)
    x = loc + scale * torch.linspace(-8, 8, 101, dtype=torch.float64)[:, None]
    unit = Uniform(torch.zeros_like(loc), 1.0)
    theirs = TransformedDistribution(unit, [SigmoidTransform().inv, AffineTransform(loc, scale)])
    ours = Logistic(loc, scale)
    torch.testing.assert_close(ours.log_prob(x), theirs.log_prob(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.icdf(theirs.cdf(x)), x, rtol=1e-9, atol=1e-9)


def test_far_values_have_a_finite_density_and_gradient():
    dtype = torch.float32
    largest = torch.finfo(dtype).max
    x = torch.tensor([-largest, -1e4, 0.0, 1e4, largest], dtype=dtype, requires_grad=True)
    log_prob = Logistic(torch.zeros((), dtype=dtype), 1.0).log_prob(x)
    log_prob.sum().backward()
    assert log_prob[0] == log_prob[-1] == -largest
    assert log_prob[2].item() == pytest.approx(-math.log(4))
    assert x.grad.tolist() == [1.0, 1.0, 0.0, -1.0, -1.0]


def test_draws_are_those_of_the_density(monkeypatch):
    base = Logistic(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0]))
    draws = base.sample((40_000,))
    assert draws.shape == (40_000, 2)
    assert draws.isfinite().all()
    torch.testing.assert_close(draws.mean(0), base.mean, rtol=0, atol=0.08)
    torch.testing.assert_close(draws.var(0), base.variance, rtol=0.04, atol=0)
    entropy = base.scale.log() + 2
    torch.testing.assert_close(-base.log_prob(draws).mean(0), entropy, rtol=0, atol=0.02)
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.zeros(shape, **options))
    assert base.sample((3,)).isfinite().all()


def test_what_a_distribution_of_torch_can_do():
    # Said, since torch.compile turns the checks of all distributions off.
    base = Logistic(0.0, torch.tensor([1.0, 2.0]), validate_args=True)
    wide = base.expand((3, 2))
    assert wide.batch_shape == wide.loc.shape == wide.sample().shape == (3, 2)
    for twin in (copy.deepcopy(base), pickle.loads(pickle.dumps(base))):
        assert torch.equal(twin.log_prob(torch.ones(2)), base.log_prob(torch.ones(2)))
    with pytest.raises(ValueError, match="scale"):
        Logistic(0.0, -1.0, validate_args=True)
    with pytest.raises(ValueError, match="support"):
        base.log_prob(torch.tensor([math.nan, 0.0]))
