"""`Flow`: the density, samples and edits, bases (a logistic one), and what it leaves alone."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import distributions as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from recoup.flows import Flow, Logistic, RealNVP
from recoup.invertible import ActNorm, AffineCoupling, Chain, Dequantize, Flip, Split, Squeeze
from tests.unit.flows.models import SMALL, built, filled


def multiscale_flow():
    return Flow(Chain(Squeeze(), ActNorm(4), Split(), Flip()), shape=(1, 4, 4)).eval()


def small_flow(**options):
    return filled(built("realnvp", (2,), levels=None, **options)).eval()


of_points = partial(small_flow, num_classes=3)


def base_alone(base):
    return Flow(Chain(Flip()), shape=(2,), base=base)


def data(flow, n=4):
    x = torch.randn(n, *flow.shape, dtype=torch.float64)
    return (x,) if flow.num_classes is None else (x, torch.arange(n) % 3)


PICTURES = filled(built("glow", SMALL, levels=None, num_classes=3)).eval()
every_flow = pytest.mark.parametrize("flow", [multiscale_flow().double(), of_points(), PICTURES])


@pytest.mark.parametrize("levels", [2, 256])
def test_uniform_images_cost_exactly_the_bits_of_their_levels(levels):
    x = torch.randint(levels, (5, 1, 4, 4), dtype=torch.uint8)
    for width in (1.0, 2.0):  # of the noisy values, of which the second base wastes half
        flow = Flow(Chain(Flip()), shape=(1, 4, 4), levels=levels, base=dist.Uniform(0.0, width))
        expected = torch.full((5,), math.log2(levels * width))
        torch.testing.assert_close(flow.bits_per_dim(x), expected)
        torch.testing.assert_close(flow.log_prob(x), -expected * 16 * math.log(2))


@pytest.mark.parametrize(("levels", "size"), [(None, 4), (17, 8)])
def test_parts_add_up_to_bits_per_dim_and_do_not_depend_on_the_size(levels, size):
    flow = Flow(Chain(Squeeze(), ActNorm(4)), shape=(1, size, size), levels=levels).eval()
    nn.init.constant_(flow.chain[1].log_scale, math.log(2))
    x = torch.randint(17, (3, 1, size, size)).float()
    torch.manual_seed(1)
    parts = flow.parts(x)
    torch.manual_seed(1)
    assert set(parts) == {"latent", "log_det"}
    torch.testing.assert_close(sum(parts.values()), flow.bits_per_dim(x))
    # Bits a value: a sum over pixels that is not divided by their number, or counted once, shows.
    noise = 0.0 if levels is None else math.log2(levels)
    torch.testing.assert_close(parts["log_det"], torch.full((3,), noise - 1.0))


@every_flow
def test_inverse_takes_what_forward_gives(flow):
    x, *labels = data(flow)
    latents, log_det = flow(x, *labels)
    assert log_det.shape == (4,)
    back = flow.inverse(latents, *labels)
    assert back.requires_grad
    torch.testing.assert_close(back, x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(flow.reconstruct(x, *labels), x, rtol=1e-9, atol=1e-9)
    bits = sum(flow.parts(x, *labels).values())
    torch.testing.assert_close(bits, flow.bits_per_dim(x, *labels))
    for other in [(each + 1) % 3 for each in labels]:
        change = flow.log_prob(x, *labels) - flow.log_prob(x, other)
        assert change.abs().min() > 1e-6
        assert (flow.inverse(latents, other) - x).abs().flatten(1).amax(1).min() > 1e-3


@every_flow
def test_interpolation_goes_from_one_to_the_other(flow):
    x, *labels = data(flow)
    frames = flow.interpolate(x, x.flip(0), 5, *labels)
    assert frames.shape == (5, *x.shape)
    torch.testing.assert_close(frames[[0, -1]], torch.stack([x, x.flip(0)]), rtol=1e-8, atol=1e-8)
    middle = multiscale_flow().interpolate(torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4), 3)[1]
    torch.testing.assert_close(middle, torch.full((1, 1, 4, 4), 0.5))


@every_flow
def test_a_generator_decides_the_sample_and_leaves_the_default_stream(flow):
    labels = {} if flow.num_classes is None else {"labels": torch.tensor([0, 1, 2, 0])}
    state, generator = torch.random.get_rng_state(), torch.Generator().manual_seed
    first, again, other = (flow.sample(4, **labels, generator=generator(n)) for n in (1, 1, 2))
    assert [torch.equal(first, each) for each in (again, other)] == [True, False]
    if labels:  # a sample is that of its label
        labels["labels"] = torch.tensor([0, 1, 1, 0])
        changed = flow.sample(4, **labels, generator=generator(1))
        same = [torch.equal(*pair) for pair in zip(first, changed, strict=True)]
        assert same == [True, True, False, True]
    assert torch.equal(torch.random.get_rng_state(), state)
    flow.sample(4, **labels)
    assert not torch.equal(torch.random.get_rng_state(), state)


def test_looking_for_latent_shapes_disturbs_nothing_and_sampling_records_no_graph():
    flow = Flow(Chain(Dequantize(5), ActNorm(1), Squeeze(), Flip()), shape=(1, 4, 4))
    flow.chain[3].eval()  # a part that its user froze
    modes = [part.training for part in flow.modules()]
    state = torch.random.get_rng_state()
    assert not flow.sample(1, generator=torch.Generator()).requires_grad
    assert not flow.chain[1].started
    assert [part.training for part in flow.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("base", [dist.Normal(3.0, 2.0), Logistic(3.0, 2.0)])
def test_temperature_scales_the_spread_around_loc(base):
    for temperature in (0.0, 1.5):
        x = base_alone(base).sample(20_000, temperature=temperature)
        assert x.mean().item() == pytest.approx(3, abs=0.12)
        assert x.std().item() == pytest.approx(base.stddev.item() * temperature, rel=0.02)


NORMAL = dist.Normal(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("base", [
    Logistic(1.0, 2.0), NORMAL, dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), NORMAL),
    dist.MultivariateNormal(torch.zeros(2), torch.tensor([[2.0, 0.5], [0.5, 1.0]])),
])  # fmt: skip
def test_any_distribution_can_be_the_base(base):
    flow = base_alone(base)
    x = flow.sample(7)
    assert x.shape == (7, 2)
    expected = base.log_prob(x.flip(1)).view(7, -1).sum(1)
    torch.testing.assert_close(flow.log_prob(x), expected)
    # Values outside the support are impossible, and no error.
    unit = base_alone(dist.Uniform(0.0, 1.0))
    assert unit.log_prob(torch.tensor([[0.5, 2.0]])).item() == -math.inf


def test_base_moves_with_the_flow_and_stays_out_of_the_state_dict():
    flow = Flow(Chain(ActNorm(2)), shape=(2,), base=Logistic(1.0, 2.0)).double().eval()
    assert flow.sample(1).dtype == flow.log_prob(torch.zeros(1, 2).double()).dtype == torch.float64
    meta = copy.deepcopy(flow).to("meta")
    assert {buffer.device.type for buffer in meta.base.buffers()} == {"meta"}
    assert all(name.startswith("chain.") for name in flow.state_dict())


LONGS = torch.arange(-1, 4)
NO_LABELS = [
    (None, r"`labels` is None, but this flow has 3 classes.* 0 to 2, of shape \(4,\)"),
    (LONGS[1:4], r"`labels` is .* shape \(3,\), but .* shape \(4,\)"),
    (torch.zeros(4), "`labels` is of type torch.float32"),
    (LONGS[1:], "`labels` holds 0 to 3, but this flow has 3 classes: .*, 0 to 2"),
    (LONGS[:4], "`labels` holds -1 to 2"),
]


@pytest.mark.parametrize(("labels", "message"), NO_LABELS)
def test_labels_that_are_none(labels, message):
    flow = of_points()
    x, _ = data(flow)
    for call in (flow.log_prob, flow.parts, flow, lambda _, labels: flow.sample(4, labels=labels)):
        with pytest.raises(ValueError, match=message):
            call(x, labels)


REFUSED = [
    (lambda: base_alone(dist.Uniform(0.0, 1.0)).sample(1, temperature=0.5),
     r"`temperature` is 0.5.*Uniform"),
    (lambda: multiscale_flow().sample(1, temperature=[1.0, 1.0]), r"`temperature` is \[1.0, 1.0\]"),
    (lambda: base_alone(dist.Normal(torch.zeros(2, requires_grad=True), 1.0)),
     "`loc` of the base Normal requires a gradient"),
    (lambda: multiscale_flow().log_prob(torch.randn(3, 1, 5, 5)),
     r"`x` has shape \(3, 1, 5, 5\).*\(N, 1, 4, 4\)"),
    (lambda: small_flow().log_prob(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)),
     "`labels` are given, but this flow is not conditional"),
    (lambda: Flow(Chain(AffineCoupling(nn.Linear(1, 2))), shape=(2,), num_classes=3),
     "nothing in `chain` takes a context"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_unsuitable_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_what_averaged_weights_and_empty_buffers_begin_with():
    x = torch.randn(64, 2) * 3 + 1
    flow = RealNVP((2,), levels=None, num_steps=2, width=8, base=dist.Laplace(1.0, 2.0))
    average = AveragedModel(flow)
    flow.train()(x)
    average.update_parameters(flow)
    bits = average.module.eval().bits_per_dim(x)
    average.module.train()(2 * x - 1)  # ActNorm has started
    assert torch.equal(average.module.eval().bits_per_dim(x), bits)
    state, want = flow.state_dict(), flow.eval().log_prob(x)
    flow.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(flow.log_prob(x), want)


def test_density_and_distribution_function_are_those_of_torch_and_far_values_finite():
    loc, scale = torch.tensor([[0.0, -3.0, 2.0], [1.0, 0.2, 5.0]], dtype=torch.float64)
    x = loc + scale * torch.linspace(-8, 8, 101, dtype=torch.float64)[:, None]
    unit = dist.Uniform(torch.zeros_like(loc), 1.0)
    ways = [dist.SigmoidTransform().inv, dist.AffineTransform(loc, scale)]
    theirs, ours = dist.TransformedDistribution(unit, ways), Logistic(loc, scale)
    torch.testing.assert_close(ours.log_prob(x), theirs.log_prob(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.icdf(theirs.cdf(x)), x, rtol=1e-9, atol=1e-9)
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([-largest, -1e4, 0.0, 1e4, largest], requires_grad=True)
    log_prob = Logistic(0.0, 1.0).log_prob(x)
    log_prob.sum().backward()
    assert log_prob[0] == log_prob[-1] == -largest
    assert log_prob[2].item() == pytest.approx(-math.log(4))
    assert x.grad.tolist() == [1.0, 1.0, 0.0, -1.0, -1.0]


def test_draws_are_those_of_the_density(monkeypatch):
    base = Logistic(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0]))
    draws = base.sample((40_000,))
    assert draws.shape == (40_000, 2)
    assert draws.isfinite().all()
    torch.testing.assert_close(draws.mean(0), base.mean, rtol=0, atol=0.08)
    torch.testing.assert_close(draws.var(0), base.variance, rtol=0.04, atol=0)
    entropy = base.scale.log() + 2
    torch.testing.assert_close(-base.log_prob(draws).mean(0), entropy, rtol=0, atol=0.02)
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.zeros(shape, **options))
    assert base.sample((3,)).isfinite().all()


def test_what_a_distribution_of_torch_can_do():
    # Said, since torch.compile turns the checks of all distributions off.
    base = Logistic(0.0, torch.tensor([1.0, 2.0]), validate_args=True)
    wide = base.expand((3, 2))
    assert wide.batch_shape == wide.loc.shape == wide.sample().shape == (3, 2)
    with pytest.raises(ValueError, match="scale"):
        Logistic(0.0, -1.0, validate_args=True)
