"""Flows on a GPU: constant memory against linear, the drift guard, samples, bases, autocast."""

from __future__ import annotations

import pytest
import torch

from tests.oracle import assert_same_tensors
from tests.unit.flows.models import built, classes, digits, stirred

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:Under memory=:UserWarning")]

DEVICE = "cuda"
SHAPE = (1, 8, 8)
OF_FLOWPP = {"width": 16, "num_components": 4}
FLOWS = {
    "nice": {"width": 32},
    "nice exact": {"width": 32, "exact": True},
    "realnvp": {"width": 16},
    "glow": {"width": 16, "num_steps": 4, "num_levels": 2},
    "flow++": OF_FLOWPP,
    "flow++ variational": OF_FLOWPP | {"variational": True},
}
in_modes = pytest.mark.parametrize("memory", ["constant", "sqrt"])
of_all_flows = pytest.mark.parametrize("name", FLOWS)


def fresh(name, shape=SHAPE, dtype=torch.float64, **options):
    options = FLOWS.get(name, {"width": 16}) | options
    flow = stirred(built(name.partition(" ")[0], shape, **options), 0.05)
    flow.chain.drift = "raise"  # so that nothing mends a wrong inverse
    return flow.to(DEVICE, dtype)


def pictures(n=16, shape=SHAPE):
    return digits(n, shape).long().to(DEVICE)


def assert_as_linear(flow, memory, *batch):
    """The loss, the gradients, and the stream of the device."""
    found = []
    for flow.memory in ("linear", memory):
        flow.zero_grad()
        torch.manual_seed(7)
        loss = flow.bits_per_dim(*batch).mean()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in flow.named_parameters() if p.grad is not None}
        found.append((loss.item(), gradients, torch.rand(1, device=DEVICE)))
    (loss, want, stream), (other, got, other_stream) = found
    assert other == pytest.approx(loss, rel=1e-10)
    assert torch.equal(stream, other_stream)
    assert_same_tensors(got, want, 1e-8)


@in_modes
@of_all_flows
def test_gradients_and_stream_are_those_of_linear_with_dropout_and_labels(name, memory):
    flow = fresh(name, dropout=0.2, num_classes=3)
    assert_as_linear(flow, memory, pictures(), classes(16, 3).to(DEVICE))


@in_modes
@pytest.mark.parametrize("log_det", ["exact", "series", "unbiased"])
def test_residual_flows_draw_the_same_probes_again(log_det, memory):
    flow, x = fresh("iresnet", (1, 4, 4), log_det=log_det), pictures(4, (1, 4, 4))
    assert_as_linear(flow, memory, x)
    assert torch.equal(flow.eval().reconstruct(x), x.double())
    assert flow.sample(3).shape == (3, 1, 4, 4)


@of_all_flows
def test_a_sample_follows_from_a_generator_on_the_device(name):
    flow = fresh(name, dtype=torch.float32, num_classes=3).eval()
    labels = classes(6, 3)  # wherever they are
    before = torch.cuda.get_rng_state()

    def draw(seed):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        return flow.sample(6, labels=labels, generator=generator, temperature=0.7)

    first = draw(3)
    assert (first.device.type, first.shape) == (DEVICE, (6, *SHAPE))
    assert torch.equal(first, draw(3))
    assert not torch.equal(first, draw(4))
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert torch.equal(flow.reconstruct(pictures(6), labels), pictures(6).float())


@pytest.mark.drifts
@of_all_flows
def test_autocast_in_constant_memory_and_in_linear(name):
    found = {}
    for memory in ("linear", "constant"):
        flow = fresh(name, dtype=torch.float32, memory=memory)
        flow.chain.drift = "ignore"  # networks round what is delivered otherwise in bfloat16
        with torch.autocast(DEVICE, torch.bfloat16):
            bits = flow.bits_per_dim(pictures(64))
        assert bits.dtype is torch.float32
        bits.mean().backward()
        found[memory] = {key: p.grad for key, p in flow.named_parameters()}
    assert_same_tensors(found["constant"], found["linear"], 0.05)
