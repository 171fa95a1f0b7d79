from __future__ import annotations

import pytest
import torch

from recoup.flows import IResNet
from recoup.invertible import (
    ActNorm,
    Chain,
    InvertibleResidual,
    LipschitzConv2d,
    Logit,
    Normalize,
    Squeeze,
    check_invertible,
)
from tests.unit.flows.models import stirred


def flow_for(shape=(2,), levels=None, **options):
    torch.manual_seed(0)
    return IResNet(shape, levels=levels, **{"num_steps": 2, "width": 8} | options)


def two_moons(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    angle = torch.pi * torch.rand(n, generator=generator)
    side = torch.randint(2, (n,), generator=generator)
    x = torch.stack([angle.cos() + side - 0.5, angle.sin() * (1 - 2 * side) + 0.5 * side - 0.25], 1)
    return x + 0.1 * torch.randn(n, 2, generator=generator)


@pytest.mark.slow
def test_density_in_the_plane_is_learned_and_integrates_to_one():
    flow = flow_for((2,), num_steps=6, width=16)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    losses = []
    for step in range(150):
        loss = flow.bits_per_dim(two_moons(256, seed=step)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    flow.eval()
    assert sum(losses[-10:]) / 10 < losses[0] - 0.25
    side = torch.linspace(-4, 4, 161)
    grid = torch.cartesian_prod(side, side)
    with torch.no_grad():
        density = flow.log_prob(grid).exp()
    total = density.sum().item() * (side[1] - side[0]).item() ** 2
    assert total == pytest.approx(1, abs=1e-2)
    x = two_moons(64, seed=1000)
    torch.testing.assert_close(flow.reconstruct(x), x, rtol=0, atol=1e-3)


def test_samples_come_from_the_density():
    flow = stirred(flow_for((2,), num_steps=4), 0.5).eval()
    torch.manual_seed(0)
    samples = flow.sample(4000)
    side = torch.linspace(-12, 12, 241, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    with torch.no_grad():
        density = flow.log_prob(grid).exp()
    density /= density.sum()
    mean = (grid * density[:, None]).sum(0)
    spread = ((grid - mean).square() * density[:, None]).sum(0).sqrt()
    assert ((samples.mean(0) - mean).abs() < 4 * spread / 4000**0.5 + 0.01).all()
    torch.testing.assert_close(samples.std(0), spread, rtol=0.06, atol=0)


def test_options_choose_the_layers():
    flow = flow_for((1, 8, 8), levels=17, num_levels=2, coefficient=0.7, num_terms=5)
    kinds = [type(stage) for stage in flow.chain]
    scale = [Squeeze, *(ActNorm, InvertibleResidual) * 2]
    assert kinds == [Logit, *scale, *scale, ActNorm]
    blocks = [stage for stage in flow.chain if isinstance(stage, InvertibleResidual)]
    assert {(block.log_det, block.num_terms) for block in blocks} == {("unbiased", 5)}
    assert all(0.7**6 < block.continuation == 0.5 for block in blocks)
    assert flow_for((2,), coefficient=0.95).chain[1].continuation == pytest.approx(0.95**3)
    layers = [layer for layer in flow.modules() if isinstance(layer, LipschitzConv2d)]
    assert [layer.kernel_size[0] for layer in layers[:3]] == [3, 1, 3]
    assert {layer.coefficient for layer in layers} == {0.7}
    assert isinstance(flow_for((2,), levels=17, alpha=None).chain[0], Normalize)
    assert flow_for((2,)).chain[1].log_det == "exact"


def test_a_chain_of_blocks_alone():
    chain = Chain(
        *(stage for stage in flow_for((3,)).chain if isinstance(stage, InvertibleResidual))
    )
    assert check_invertible(chain, torch.randn(2, 3))
