"""The densities of whole flows, beside what knows nothing of layers.

That is the change of variables with autograd's full Jacobian, sums over the plane, and data whose
entropy is known.
"""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.datasets import make_moons
from torch.distributions import Normal

from recoup.flows.latents import as_tuple
from tests.unit.flows.models import SMALL, built, check_density, digits, stirred

LEVELS, DIMS = 17, math.prod(SMALL)
FLOWS = [
    ("glow", {}), ("glow", {"conv1x1": "lu", "alpha": 1e-6}), ("realnvp", {}), ("flow++", {}),
]  # fmt: skip
every_flow = pytest.mark.parametrize(("name", "options"), FLOWS, ids=str)


def stirred_flow(name, **options):
    return stirred(built(name, SMALL, **options)).eval()


# -- the change of variables -----------------------------------------------------------------------


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
@every_flow
def test_log_prob_is_the_density_of_the_noisy_picture(name, options):
    flow, x = stirred_flow(name, **options), digits(2, SMALL)
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
    flow, x = stirred_flow("flow++", variational=True), digits(1, SMALL)
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
@every_flow
def test_samples_come_back_as_the_latents_they_were(name, options):
    flow = stirred_flow(name, **options)
    shapes = [z.shape[1:] for z in as_tuple(flow(digits(1, SMALL))[0])]
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


# -- over the plane --------------------------------------------------------------------------------


def moons(n, seed):
    return torch.from_numpy(make_moons(n, noise=0.1, random_state=seed)[0]).float()


def two_bumps(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 0.2 * torch.randn(n, 2, generator=generator)
    x[:, 0] += 3 * torch.randint(2, (n,), generator=generator) - 1.5
    return x


# The entropy of one bump, and one bit for which of them, over two values.
OF_BUMPS = (math.log2(2 * math.pi * math.e * 0.2**2) + 1) / 2
LEARNED = {  # data, options, rate, steps, and the bits that are reached, or gained
    "realnvp": (moons, {"num_steps": 6, "width": 32}, 5e-3, 300, lambda first: first - 0.4),
    "iresnet": (moons, {"num_steps": 6, "width": 16}, 1e-2, 150, lambda first: first - 0.25),
    "flow++": (
        two_bumps, {"num_steps": 2, "width": 16, "num_components": 4}, 1e-2, 250,
        lambda first: OF_BUMPS + 0.1,
    ),
}  # fmt: skip


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("realnvp", "iresnet")]


@pytest.mark.parametrize("name", ["flow++", *SLOW])
def test_a_density_is_learned_and_samples_come_from_it(name):
    data, options, rate, num_steps, reached = LEARNED[name]
    flow = built(name, (2,), levels=None, **options)
    optimizer = torch.optim.Adam(flow.parameters(), lr=rate)
    for step in range(num_steps):
        loss = flow.bits_per_dim(data(256, step)).mean()
        if step == 0:
            most = reached(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    flow.eval()
    known = data(2000, 999)
    with torch.no_grad():
        assert flow.bits_per_dim(known).mean().item() < most
    torch.testing.assert_close(flow.reconstruct(known[:64]), known[:64], rtol=0, atol=1e-3)
    check_density(flow.double(), 5.0)


def test_samples_of_blocks_come_from_the_density():
    flow = stirred(built("iresnet", (2,), levels=None, num_steps=4), 0.5).eval()
    check_density(flow, 12.0, num_cells=241)
