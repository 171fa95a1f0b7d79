from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from recoup.flows import ConvNetwork, Glow
from recoup.invertible import AdditiveCoupling, InvertibleConv1x1LU, Normalize, check_invertible
from tests.unit.flows.models import gradients, stir


def digits(n=6, levels=17, shape=(1, 8, 8), seed=0):
    return torch.randint(levels, (n, *shape), generator=torch.Generator().manual_seed(seed)).float()


def glow(**options):
    torch.manual_seed(0)
    options = {"levels": 17, "num_steps": 2, "width": 6} | options
    return Glow((1, 8, 8), **options)


def test_digits_of_17_levels():
    flow, x = glow(), digits()
    assert flow.levels == 17
    bits = flow.bits_per_dim(x)
    assert bits.shape == (6,)
    assert bits.isfinite().all()
    latents, _ = flow(x)
    assert [z.shape[1:] for z in latents] == [(2, 4, 4), (8, 2, 2)]
    assert torch.equal(flow.reconstruct(x), x)
    samples = flow.sample(3, temperature=0.7)
    assert samples.shape == (3, 1, 8, 8)
    assert set(samples.flatten().tolist()) <= set(range(17))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"coupling": "additive", "conv1x1": "lu"},
        {"alpha": None, "num_levels": 1},
        {"num_levels": 3, "dropout": 0.3},
    ],
    ids=str,
)
def test_the_whole_chain_is_invertible_in_every_mode(options):
    flow = stir(glow(**options))
    y, _ = flow.dequantize(digits(3))
    report = check_invertible(flow.chain, y)
    assert report, str(report)


def test_first_batch_comes_out_of_every_actnorm_normalised():
    flow = glow(num_levels=1)
    latents, _ = flow(digits(200))
    # the last coupling is the identity and the mixing a rotation: unit variance is left
    assert latents.var().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("memory", ["sqrt", "log", "constant"])
def test_gradients_are_those_of_linear_memory_with_dropout_too(memory):
    flow = stir(glow(dropout=0.5).double())
    x = digits().double()
    flow(x)  # the start
    loss, expected = gradients(flow, x)
    flow.memory = memory
    other_loss, actual = gradients(flow, x)
    assert other_loss == pytest.approx(loss, rel=1e-12)
    assert set(actual) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-10, atol=1e-11, msg=name)


def test_the_first_step_is_the_same_in_every_mode():
    # It holds the data-dependent start, which must happen once and be that of the batch.
    results = {}
    for memory in ("linear", "sqrt", "constant"):
        flow = glow(memory=memory).double()
        results[memory] = gradients(flow, digits().double())
    for memory in ("sqrt", "constant"):
        assert results[memory][0] == pytest.approx(results["linear"][0], rel=1e-12)
        for name, gradient in results["linear"][1].items():
            torch.testing.assert_close(
                results[memory][1][name], gradient, rtol=1e-10, atol=1e-10, msg=name
            )


def test_autocast_leaves_latents_in_full_precision_and_gradients_alike():
    flow, x = stir(glow()), digits()
    flow(x)  # the start
    gradients = {}
    for memory in ("linear", "constant"):
        flow.memory = memory
        flow.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            latents, _ = flow(x)
            loss = flow.bits_per_dim(x).mean()
        assert all(z.dtype == torch.float32 for z in (*latents, loss))
        loss.backward()
        gradients[memory] = torch.cat([p.grad.flatten() for p in flow.parameters()])
    difference = (gradients["constant"] - gradients["linear"]).norm()
    assert difference < 0.02 * gradients["linear"].norm()


@pytest.mark.parametrize("memory", ["linear", "constant"])
def test_every_parameter_moves_before_and_after_the_first_and_last_squeeze(memory):
    flow = glow(memory=memory)
    optimizer = torch.optim.SGD(flow.parameters(), lr=0.1)
    for _ in range(2):  # behind a zero convolution a gradient comes with the second step
        optimizer.zero_grad()
        before = {name: p.detach().clone() for name, p in flow.named_parameters()}
        flow.bits_per_dim(digits()).mean().backward()
        optimizer.step()
        flow.eval().train()
    same = [name for name, p in flow.named_parameters() if torch.equal(p, before[name])]
    assert same == []


def test_the_trajectory_of_50_adam_steps_is_the_same_in_every_mode():
    histories = {}
    for memory in ("linear", "constant"):
        flow = glow(num_steps=1, width=4, memory=memory).double()
        optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
        history = []
        for step in range(50):
            x = digits(8, shape=(1, 1, 1), seed=step).double().expand(-1, 1, 8, 8)
            loss = flow.bits_per_dim(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        histories[memory] = torch.tensor(history, dtype=torch.float64)
        assert {float(state["step"]) for state in optimizer.state.values()} == {50.0}
    assert histories["linear"].isfinite().all()
    assert histories["linear"][-1] < histories["linear"][0] - 0.5
    torch.testing.assert_close(histories["constant"], histories["linear"], rtol=0, atol=1e-8)


def test_same_seed_builds_the_same_flow():
    first, second = glow(), glow()
    assert all(
        torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items()
    )


def test_options_choose_the_layers():
    flow = glow(coupling="additive", conv1x1="lu", alpha=None, dropout=0.2)
    kinds = [type(stage) for stage in flow.chain]
    assert kinds.count(AdditiveCoupling) == kinds.count(InvertibleConv1x1LU) == 4
    assert kinds[0] is Normalize
    assert sum(isinstance(m, nn.Dropout) for m in flow.modules()) == 4


def test_continuous_data_are_taken_as_they_are():
    flow = glow(levels=None).double().eval()
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(flow.reconstruct(x), x)
    # rotations and identities: the density is that of the base
    torch.testing.assert_close(
        flow.log_prob(x), -0.5 * (x.square() + math.log(2 * math.pi)).flatten(1).sum(1)
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_levels": 4}, "multiples of 16"),
        ({"num_levels": 0}, "`num_levels` is 0"),
        ({"num_steps": 0}, "`num_steps` is 0"),
        ({"coupling": "linear"}, "`coupling` is 'linear'"),
        ({"conv1x1": "qr"}, "`conv1x1` is 'qr'"),
        ({"levels": 0}, "`levels` is 0"),
        ({"memory": "big"}, "`memory` is 'big'"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_unsuitable_arguments_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        glow(**options)


def test_unsuitable_shape_is_refused():
    with pytest.raises(ValueError, match=r"`shape` is \(8, 8\)"):
        Glow((8, 8), levels=17)


def test_network_starts_at_zero_and_can_drop():
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(ConvNetwork(3, 5, width=7)(x), torch.zeros(2, 5, 4, 4))
    layers = [type(layer) for layer in ConvNetwork(3, 5, width=7, dropout=0.1)]
    assert layers == [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.ReLU, nn.Dropout, nn.Conv2d]
