from __future__ import annotations

import pytest
import torch
from sklearn.datasets import make_moons

from recoup.flows import RealNVP
from recoup.invertible import AffineCoupling
from tests.unit.flows.models import (
    filled,
)


def realnvp(shape=(1, 8, 8), **options):
    torch.manual_seed(0)
    return RealNVP(shape, **{"levels": 17, "width": 6, "num_steps": 2} | options)


def test_the_order_of_the_paper():
    kinds = [
        (stage.split, stage.condition)
        if isinstance(stage, AffineCoupling)
        else type(stage).__name__
        for stage in realnvp(num_steps=3).chain
    ]
    board = ["ActNorm", ("checkerboard", "first"), "ActNorm", ("checkerboard", "second")]
    halves = ["ActNorm", ("channels", "first"), "ActNorm", ("channels", "second")]
    assert kinds == [
        "Logit", *board, *board[:2], "Squeeze", *halves, *halves[:2], "Split", *board, *board[:2],
    ]  # fmt: skip


def test_every_latent_depends_on_every_pixel():
    flow = filled(realnvp((1, 4, 4), levels=None, num_steps=3, depth=2), 0.5)
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64)

    def flat(v):
        return torch.cat([z.flatten() for z in flow(v)[0]])

    jacobian = torch.autograd.functional.jacobian(flat, x).view(16, 16)
    assert (jacobian != 0).any(0).all()
    assert (jacobian != 0).any(1).all()


def moons(n, seed):
    x, _ = make_moons(n, noise=0.1, random_state=seed)
    return torch.from_numpy(x).float()


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    flow = RealNVP((2,), levels=None, num_steps=6, width=32)
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
    history = []
    for step in range(300):
        loss = flow.bits_per_dim(moons(256, step)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert sum(history[-20:]) / 20 < history[0] - 0.4
    return flow.eval()


@torch.no_grad()
def integral(flow, low, high, steps=400):
    """The mass of the density in a square, by the midpoint rule."""
    width = (high - low) / steps
    line = low + width * (torch.arange(steps, dtype=torch.float64) + 0.5)
    grid = torch.cartesian_prod(line, line)
    return sum(float(flow.log_prob(part).exp().sum()) for part in grid.split(60_000)) * width**2


@pytest.mark.slow
def test_the_density_of_moons_integrates_to_one(trained):
    flow = trained.double()
    assert integral(flow, -6.0, 6.0) == pytest.approx(1.0, abs=1e-2)
    # and most of it is where the data are
    assert integral(flow, -1.6, 2.6) > 0.9
    flow.float()


@pytest.mark.slow
def test_samples_of_moons_lie_on_the_moons(trained):
    samples = trained.sample(500, temperature=0.8)
    nearest = torch.cdist(samples, moons(2000, 999)).amin(1)
    assert (nearest < 0.2).float().mean() > 0.9
