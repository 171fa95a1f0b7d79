"""Flows that are given a label."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup.flows import ConvNetwork, DenseNetwork, Flow
from recoup.invertible import ActNorm, AffineCoupling, Chain, Flip, Split, Squeeze


def randomised(flow):
    torch.manual_seed(3)
    for parameter in flow.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return flow.double().eval()


def points(**options):
    torch.manual_seed(2)
    stages = []
    for _ in range(2):
        stages += [ActNorm(2), AffineCoupling(DenseNetwork(1, 2, width=8, num_context=3)), Flip()]
    return randomised(Flow(Chain(*stages), shape=(2,), num_classes=3, **options))


def pictures(**options):
    torch.manual_seed(2)

    def coupling():
        return AffineCoupling(ConvNetwork(2, 4, width=4, num_context=3))

    stages = [Squeeze(), coupling(), Split(), AffineCoupling(ConvNetwork(1, 2, width=4)), Flip()]
    chain = Chain(ActNorm(1), *stages[:2], Chain(Flip(), coupling()), *stages[2:])
    return randomised(Flow(chain, shape=(1, 4, 4), num_classes=3, **options))


def data(flow, n=4):
    torch.manual_seed(0)
    return torch.randn(n, *flow.shape, dtype=torch.float64), torch.arange(n) % 3


@pytest.mark.parametrize("build", [points, pictures])
def test_labels_change_the_density_and_the_latents_go_back(build):
    flow = build()
    x, labels = data(flow)
    first, second = flow.log_prob(x, labels), flow.log_prob(x, (labels + 1) % 3)
    assert (first - second).abs().min() > 1e-6
    latents, _ = flow(x, labels)
    torch.testing.assert_close(flow.inverse(latents, labels), x, rtol=1e-9, atol=1e-9)
    other = flow.inverse(latents, (labels + 1) % 3)
    assert (other - x).abs().flatten(1).amax(1).min() > 1e-3
    torch.testing.assert_close(flow.reconstruct(x, labels), x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("label", range(3))
def test_the_density_of_each_class_integrates_to_one(label):
    flow = points()
    side = torch.linspace(-25, 25, 501, dtype=torch.float64)
    plane = torch.cartesian_prod(side, side)
    labels = torch.full((len(plane),), label)
    with torch.no_grad():
        total = flow.log_prob(plane, labels).exp().sum() * float(side[1] - side[0]) ** 2
    assert total.item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("memory", ["sqrt", "constant"])
def test_gradients_are_the_same_in_every_memory_mode(memory):
    gradients = {}
    for mode in ("linear", memory):
        flow = pictures()
        flow.memory = mode
        x, labels = data(flow)
        flow.bits_per_dim(x.requires_grad_(), labels).mean().backward()
        gradients[mode] = {"x": x.grad} | {name: p.grad for name, p in flow.named_parameters()}
    for name, expected in gradients["linear"].items():
        assert expected is not None, name
        torch.testing.assert_close(gradients[memory][name], expected, rtol=1e-9, atol=1e-11)


def test_every_method_takes_labels():
    flow = pictures()
    x, labels = data(flow)
    parts = flow.parts(x, labels)
    torch.testing.assert_close(sum(parts.values()), flow.bits_per_dim(x, labels))
    frames = flow.interpolate(x, x.flip(0), 3, labels)
    torch.testing.assert_close(frames[0], x, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(frames[-1], x.flip(0), rtol=1e-8, atol=1e-8)
    a, b, c = (
        flow.sample(3, labels=torch.tensor(given), generator=torch.Generator().manual_seed(1))
        for given in ([0, 1, 2], [0, 1, 2], [0, 1, 1])
    )
    assert torch.equal(a, b)
    assert torch.equal(a[:2], c[:2])
    assert not torch.equal(a[2], c[2])
    varied = flow.vary(x, 1, labels=labels, temperature=0.0)
    kept, last = flow(varied, labels)[0]
    torch.testing.assert_close(kept, flow(x, labels)[0][0], rtol=1e-8, atol=1e-8)
    assert last.abs().max() < 1e-8


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, r"`labels` are missing: this flow has 3 classes.*shape \(4,\), 0 to 2"),
        (torch.zeros(4, 3, dtype=torch.long), r"`labels` has shape \(4, 3\), but must be \(4,\)"),
        (torch.zeros(3, dtype=torch.long), r"`labels` has shape \(3,\), but must be \(4,\)"),
        (torch.zeros(4), "`labels` is of type torch.float32"),
        (torch.ones(4, dtype=torch.bool), "`labels` is of type torch.bool"),
        (torch.tensor([0, 1, 2, 3]), "`labels` holds 0 to 3, but this flow has 3 classes: 0 to 2"),
        (torch.tensor([0, 1, 2, -1]), "`labels` holds -1 to 2"),
    ],
)
def test_labels_that_are_none(labels, message):
    flow = points()
    x, _ = data(flow)
    for call in (flow.log_prob, flow.parts, flow):
        with pytest.raises(ValueError, match=message):
            call(x, labels)
    with pytest.raises(ValueError, match=message):
        flow.sample(4, labels=labels)


def test_labels_of_any_whole_type_are_taken():
    flow = points()
    x, labels = data(flow)
    expected = flow.log_prob(x, labels)
    for dtype in (torch.uint8, torch.int32):
        assert torch.equal(flow.log_prob(x, labels.to(dtype)), expected)
    assert flow.log_prob(x[:0], labels[:0]).shape == (0,)


def test_a_flow_without_classes_refuses_labels():
    flow = Flow(Chain(Flip()), shape=(2,))
    with pytest.raises(ValueError, match="`labels` are given, but this flow is not conditional"):
        flow.log_prob(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long))


def test_classes_that_would_change_nothing_are_refused():
    chain = Chain(AffineCoupling(nn.Linear(1, 2)))
    with pytest.raises(ValueError, match="nothing in `chain` takes a context"):
        Flow(chain, shape=(2,), num_classes=3)
    with pytest.raises(ValueError, match="`num_classes` is 0"):
        Flow(chain, shape=(2,), num_classes=0)


def test_the_number_of_classes_is_shown():
    assert "num_classes=3" in repr(points())
    assert "num_classes" not in repr(Flow(Chain(Flip()), shape=(2,)))
