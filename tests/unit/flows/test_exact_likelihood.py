"""The likelihood of whole flows, beside the change of variables with autograd's full Jacobian.

Nothing that a layer says of its log-determinant is used here: only what `forward` makes of numbers,
and the density of the latents, by torch.distributions.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from recoup.flows import FlowPlusPlus, Glow, RealNVP
from recoup.flows.latents import as_tuple
from tests.unit.flows.models import digits, stirred

SHAPE, LEVELS = (1, 4, 4), 17
DIMS = math.prod(SHAPE)
FLOWS = {
    "glow": (Glow, {"width": 6, "num_steps": 2}),
    "glow, lu": (Glow, {"width": 6, "num_steps": 2, "conv1x1": "lu", "alpha": 1e-6}),
    "realnvp": (RealNVP, {"width": 6, "num_steps": 2}),
    "flowpp": (FlowPlusPlus, {"width": 6, "num_steps": 2, "num_components": 3}),
}


def built(name, **options):
    torch.manual_seed(0)
    build, own = FLOWS[name]
    return stirred(build(SHAPE, levels=LEVELS, **own, **options)).eval()


def log_abs_det(function, x):
    """Of a function of one sample."""
    jacobian = torch.autograd.functional.jacobian(function, x)
    return torch.linalg.slogdet(jacobian.view(DIMS, DIMS)).logabsdet


def log_normal(z):
    return Normal(0.0, 1.0).log_prob(z).sum()


def latents_of(flow, y):
    return torch.cat([z.flatten() for z in as_tuple(flow.chain(y)[0])])


def by_change_of_variables(flow, y):
    """Return the log-density of one dequantized picture, in the unit cube."""
    return log_normal(latents_of(flow, y)) + log_abs_det(lambda v: latents_of(flow, v), y)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FLOWS)
def test_log_prob_is_the_density_of_the_noisy_picture(name):
    flow, x = built(name), digits(2, SHAPE)
    torch.manual_seed(5)
    found = flow.log_prob(x).detach()
    torch.manual_seed(5)
    y = flow.dequantize(x)[0]
    wanted = torch.stack([by_change_of_variables(flow, each[None]) for each in y])
    # Of a cube with sides of one level, so that it bounds the probability of a level.
    torch.testing.assert_close(found, wanted - DIMS * math.log(LEVELS), rtol=1e-10, atol=1e-9)
    bits = -found / (DIMS * math.log(2))
    torch.manual_seed(5)
    torch.testing.assert_close(flow.bits_per_dim(x).detach(), bits, rtol=1e-12, atol=1e-12)


def test_learned_noise_is_paid_for(monkeypatch):
    """Its density, too, by a Jacobian: that of the picture with noise, from the normal noise."""
    flow, x = built("flowpp", variational=True), digits(1, SHAPE)
    eps = torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    given = [eps]
    monkeypatch.setattr(torch, "randn", lambda *args, **kwargs: given[0])

    def noisy(e):
        given[0] = e
        return flow.dequantize(x)[0]

    density_of_noise = log_normal(eps) - log_abs_det(noisy, eps)
    wanted = by_change_of_variables(flow, noisy(eps)) - density_of_noise
    given[0] = eps
    torch.testing.assert_close(flow.log_prob(x)[0].detach(), wanted, rtol=1e-10, atol=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FLOWS)
def test_samples_come_back_as_the_latents_they_were(name):
    flow = built(name)
    shapes = [z.shape[1:] for z in as_tuple(flow(digits(1, SHAPE))[0])]
    drawn = tuple(torch.randn(5, *shape, dtype=torch.float64) for shape in shapes)
    latents = drawn if len(drawn) > 1 else drawn[0]
    with torch.no_grad():
        y, log_det = flow.chain.inverse(latents)
        again, forward_log_det = flow.chain(y)
    for z, back in zip(drawn, as_tuple(again), strict=True):
        torch.testing.assert_close(back, z, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(forward_log_det, -log_det, rtol=1e-7, atol=1e-7)
    levels = flow.inverse(latents)
    assert torch.equal(levels, (y * LEVELS).floor().clamp(0, LEVELS - 1))
    assert torch.equal(flow.reconstruct(levels), levels)
