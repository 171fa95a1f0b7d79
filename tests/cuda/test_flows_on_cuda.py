"""Flows on a GPU: constant memory against linear, the drift guard, samples, bases, autocast."""

from __future__ import annotations

import pytest
import torch

from recoup.flows import NICE, FlowPlusPlus, Glow, IResNet, RealNVP
from recoup.invertible import ActNorm
from tests.oracle import assert_same_tensors

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:Under memory=:UserWarning"),
]

DEVICE = "cuda"
SHAPE = (1, 8, 8)
FLOWS = {
    "nice": lambda **o: NICE(SHAPE, width=32, **o),
    "nice exact": lambda **o: NICE(SHAPE, width=32, exact=True, **o),
    "realnvp": lambda **o: RealNVP(SHAPE, width=16, **o),
    "glow": lambda **o: Glow(SHAPE, width=16, num_steps=4, num_levels=2, **o),
    "flow++": lambda **o: FlowPlusPlus(SHAPE, width=16, num_steps=2, num_components=4, **o),
    "flow++ variational": lambda **o: FlowPlusPlus(
        SHAPE, width=16, num_steps=2, num_components=4, variational=True, **o
    ),
}


def stirred(flow, dtype=torch.float64):
    """Past the start of its ActNorms, and off the start of its networks."""
    for module in flow.modules():
        if isinstance(module, ActNorm):
            module.started = True
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    flow.chain.drift = "raise"  # so that nothing mends a wrong inverse
    return flow.to(DEVICE, dtype)


def pictures(n=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(17, (n, *SHAPE), generator=generator).to(DEVICE)


def gradients(flow, x, labels=None):
    flow.zero_grad()
    torch.manual_seed(7)
    loss = flow.bits_per_dim(x, labels).mean()
    loss.backward()
    found = {name: p.grad.clone() for name, p in flow.named_parameters() if p.grad is not None}
    return loss.item(), found, torch.rand(1, device=DEVICE)


@pytest.mark.parametrize("memory", ["constant", "sqrt"])
@pytest.mark.parametrize("name", FLOWS)
def test_gradients_and_stream_are_those_of_linear_with_dropout_and_labels(name, memory):
    torch.manual_seed(0)
    flow = stirred(FLOWS[name](levels=17, dropout=0.2, num_classes=3))
    x, labels = pictures(), torch.arange(16, device=DEVICE) % 3
    loss, want, stream = gradients(flow, x, labels)
    flow.memory = memory
    other, got, other_stream = gradients(flow, x, labels)
    assert other == pytest.approx(loss, rel=1e-10)
    assert torch.equal(stream, other_stream)
    assert_same_tensors(got, want, 1e-8)


@pytest.mark.parametrize("memory", ["constant", "sqrt"])
@pytest.mark.parametrize("log_det", ["exact", "series", "unbiased"])
def test_residual_flows_draw_the_same_probes_again(log_det, memory):
    torch.manual_seed(0)
    flow = stirred(IResNet((1, 4, 4), levels=17, num_steps=2, width=16, log_det=log_det))
    x = pictures(4)[..., :4, :4]
    loss, want, _ = gradients(flow, x)
    flow.memory = memory
    other, got, _ = gradients(flow, x)
    assert other == pytest.approx(loss, rel=1e-10)
    assert_same_tensors(got, want, 1e-8)
    assert torch.equal(flow.eval().reconstruct(x), x.double())
    assert flow.sample(3).shape == (3, 1, 4, 4)


@pytest.mark.parametrize("name", FLOWS)
def test_a_sample_follows_from_a_generator_on_the_device(name):
    torch.manual_seed(0)
    flow = stirred(FLOWS[name](levels=17, num_classes=3), torch.float32).eval()
    labels = torch.arange(6) % 3  # wherever they are
    before = torch.cuda.get_rng_state()

    def draw(seed):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        return flow.sample(6, labels=labels, generator=generator, temperature=0.7)

    first = draw(3)
    assert first.device.type == DEVICE
    assert first.shape == (6, *SHAPE)
    assert torch.equal(first, draw(3))
    assert not torch.equal(first, draw(4))
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert torch.equal(flow.reconstruct(pictures(6), labels), pictures(6).float())


@pytest.mark.drifts
@pytest.mark.parametrize("name", FLOWS)
def test_autocast_in_constant_memory_and_in_linear(name):
    found = {}
    for memory in ("linear", "constant"):
        torch.manual_seed(0)
        flow = stirred(FLOWS[name](levels=17, memory=memory), torch.float32)
        flow.chain.drift = "ignore"  # networks round what is delivered otherwise in bfloat16
        with torch.autocast(DEVICE, torch.bfloat16):
            bits = flow.bits_per_dim(pictures(64))
        assert bits.dtype is torch.float32
        bits.mean().backward()
        found[memory] = {key: p.grad for key, p in flow.named_parameters()}
    assert_same_tensors(found["constant"], found["linear"], 0.05)
