from __future__ import annotations

import copy

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
from tests.unit.flows.models import gradients, stir


def flow_for(shape=(2,), levels=None, **options):
    torch.manual_seed(0)
    return IResNet(shape, levels=levels, **{"num_steps": 2, "width": 8} | options)


def two_moons(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    angle = torch.pi * torch.rand(n, generator=generator)
    side = torch.randint(2, (n,), generator=generator)
    x = torch.stack([angle.cos() + side - 0.5, angle.sin() * (1 - 2 * side) + 0.5 * side - 0.25], 1)
    return x + 0.1 * torch.randn(n, 2, generator=generator)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        {"shape": (2,)},
        {"shape": (5,), "depth": 1},
        {"shape": (1, 4, 4), "log_det": "exact"},
        {"shape": (1, 4, 4), "num_levels": 2, "log_det": "exact", "depth": 1},
    ],
    ids=str,
)
def test_the_whole_chain_is_invertible_in_every_mode(options):
    flow = stir(flow_for(**options), 0.5)
    report = check_invertible(flow.chain, torch.randn(2, *options["shape"]))
    assert report, str(report)


@pytest.mark.filterwarnings("ignore:Under memory=.constant.:UserWarning")
@pytest.mark.parametrize("log_det", ["exact", "series", "unbiased"])
@pytest.mark.parametrize("memory", ["sqrt", "log", "constant"])
def test_gradients_are_those_of_linear_memory(memory, log_det):
    flow = stir(flow_for((1, 4, 4), levels=17, log_det=log_det, num_terms=3), 0.5).double()
    x = torch.randint(17, (3, 1, 4, 4)).double()
    flow(x)  # the start
    loss, expected = gradients(flow, x)
    flow.memory = memory
    other_loss, actual = gradients(flow, x)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    assert set(actual) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-10, atol=1e-11, msg=name)


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
    flow = stir(flow_for((2,), num_steps=4), 0.5).double().eval()
    flow.chain[0].started = True
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


def test_every_parameter_moves_and_memory_may_change():
    flow = flow_for((1, 4, 4), levels=17, memory="sqrt")
    assert flow.memory == "sqrt"
    x = torch.randint(17, (16, 1, 4, 4)).float()
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    flow(x)  # the start
    before = copy.deepcopy(flow.state_dict())
    first = flow.bits_per_dim(x).mean()
    first.backward()
    optimizer.step()
    after = flow.state_dict()
    same = [name for name, _ in flow.named_parameters() if torch.equal(before[name], after[name])]
    assert same == []


def test_images_are_sampled_and_reconstructed():
    flow = flow_for((1, 8, 8), levels=17, num_levels=2)
    x = torch.randint(17, (5, 1, 8, 8)).float()
    assert flow.bits_per_dim(x).shape == (5,)
    assert torch.equal(flow.eval().reconstruct(x), x)
    samples = flow.sample(3)
    assert samples.shape == (3, 1, 8, 8)
    assert set(samples.flatten().tolist()) <= set(range(17))


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": (1, 6, 6), "num_levels": 2}, "multiples of 4"),
        ({"shape": (2,), "num_levels": 2}, "`num_levels` 1"),
        ({"shape": (2, 2)}, r"`shape` is \(2, 2\)"),
        ({"num_steps": 0}, "`num_steps` is 0"),
        ({"depth": 0}, "`depth` is 0"),
        ({"coefficient": 1.0}, "`coefficient` is 1.0"),
        ({"log_det": "none"}, "`log_det` is 'none'"),
        ({"memory": "big"}, "`memory` is 'big'"),
    ],
    ids=str,
)
def test_unsuitable_arguments_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        flow_for(**options)


def test_a_chain_of_blocks_alone():
    chain = Chain(
        *(stage for stage in flow_for((3,)).chain if isinstance(stage, InvertibleResidual))
    )
    assert check_invertible(chain, torch.randn(2, 3))
