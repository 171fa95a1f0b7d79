from __future__ import annotations

import pytest
import torch

from recoup import schedules
from recoup.flows import FlowPlusPlus
from recoup.invertible import MixtureCoupling, VariationalDequantize
from tests.unit.flows.models import (
    digits,
    filled,
)


def flowpp(shape=(1, 8, 8), **options):
    torch.manual_seed(0)
    options = {"levels": 17, "width": 6, "num_steps": 2, "num_components": 3} | options
    return FlowPlusPlus(shape, **options)


def test_noise_is_learned():
    flow = flowpp(variational=True)
    assert isinstance(flow.dequantize, VariationalDequantize)
    flow.bits_per_dim(digits().float()).mean().backward()
    network = flow.dequantize.chain[-1].network
    assert (network[-1].weight.grad != 0).any()


def test_the_noise_has_the_memory_of_the_flow():
    flow = flowpp(variational=True, memory="constant")
    assert flow.dequantize.memory == "constant"
    num_stages = len(flow.chain)
    flow = flowpp(variational=True, memory=schedules.sqrt(num_stages))
    assert flow.dequantize.memory == "linear"


def test_the_order_of_the_layers():
    kinds = [
        stage.split if isinstance(stage, MixtureCoupling) else type(stage).__name__
        for stage in flowpp(num_steps=1).chain
    ]
    assert kinds == [
        "Logit", "ActNorm", "checkerboard", "Squeeze",
        "ActNorm", "InvertibleConv1x1", "channels", "ActNorm", "InvertibleConv1x1", "checkerboard",
    ]  # fmt: skip


def two_bumps(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 0.2 * torch.randn(n, 2, generator=generator)
    x[:, 0] += 3 * torch.randint(2, (n,), generator=generator) - 1.5
    return x


def test_two_bumps_are_pulled_apart_and_the_density_integrates_to_one():
    flow = FlowPlusPlus((2,), levels=None, num_steps=2, width=16, num_components=4)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    for step in range(250):
        loss = -flow.log_prob(two_bumps(256, step)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    flow.eval().double()
    # the entropy is that of one bump, and one bit (in nats) for which of them
    entropy = 2 * 0.5 * torch.log(2 * torch.pi * torch.e * torch.tensor(0.2) ** 2) + 0.6931
    with torch.no_grad():
        loss = -flow.log_prob(two_bumps(4000, 999).double()).mean()
        assert float(loss) < float(entropy) + 0.15
        line = -5 + 10 * (torch.arange(400, dtype=torch.float64) + 0.5) / 400
        mass = flow.log_prob(torch.cartesian_prod(line, line)).exp().sum() * 0.025**2
    assert float(mass) == pytest.approx(1.0, abs=1e-2)


def test_parameters_far_from_the_start_lose_no_sample():
    flow = filled(flowpp((5,), levels=None))
    samples = flow.sample(200)
    assert samples.isfinite().all()
    latents, _ = flow(samples)
    torch.testing.assert_close(flow.inverse(latents), samples, rtol=1e-6, atol=1e-6)
