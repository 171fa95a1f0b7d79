from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.distributions import (
    Categorical,
    Independent,
    Laplace,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Uniform,
)

from recoup.flows import NICE, Flow
from recoup.invertible import (
    ActNorm,
    AffineCoupling,
    Chain,
    Dequantize,
    Flip,
    InvertibleConv1x1,
    Split,
    Squeeze,
)


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def small_flow(**options):
    torch.manual_seed(3)
    stages = []
    for _ in range(3):
        stages += [ActNorm(2), InvertibleConv1x1(2), AffineCoupling(network(1, 2))]
    flow = Flow(Chain(*stages), shape=(2,), **options).double()
    for parameter in flow.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return flow.eval()


def multiscale_flow(split=True, **options):
    stages = [Squeeze(), ActNorm(4), *([Split()] if split else []), Flip()]
    return Flow(Chain(*stages), shape=(1, 4, 4), **options).eval()


# --- the density ----------------------------------------------------------------------------------


def test_density_integrates_to_one_over_the_plane():
    flow = small_flow()
    side = torch.linspace(-40, 40, 801, dtype=torch.float64)
    cell = float(side[1] - side[0]) ** 2
    with torch.no_grad():
        total = flow.log_prob(torch.cartesian_prod(side, side)).exp().sum() * cell
    assert total.item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("levels", [2, 17, 256])
def test_uniform_images_cost_exactly_the_bits_of_their_levels(levels):
    flow = Flow(Chain(Flip()), shape=(1, 4, 4), levels=levels, base=Uniform(0.0, 1.0))
    bits = flow.bits_per_dim(torch.randint(levels, (5, 1, 4, 4), dtype=torch.uint8))
    torch.testing.assert_close(bits, torch.full((5,), math.log2(levels)))


def test_likelihood_is_over_early_latents_too():
    # A split moves values between latents: an identity flow must not notice it.
    x = torch.randn(3, 1, 4, 4)
    expected = Normal(0.0, 1.0).log_prob(x).flatten(1).sum(1)
    for split in (False, True):
        torch.testing.assert_close(multiscale_flow(split).log_prob(x), expected)


def test_log_prob_of_levels_counts_the_noise():
    flow = Flow(Chain(Flip()), shape=(3,), levels=4, base=Uniform(0.0, 2.0))
    log_prob = flow.log_prob(torch.tensor([[0, 1, 3]]))
    assert log_prob.item() == pytest.approx(-3 * math.log(8))


@pytest.mark.parametrize("levels", [None, 17])
def test_parts_add_up_to_bits_per_dim(levels):
    flow = multiscale_flow(levels=levels)
    nn.init.constant_(flow.chain[1].log_scale, -0.7)
    x = torch.randint(17, (3, 1, 4, 4)).float()
    torch.manual_seed(1)
    parts = flow.parts(x)
    torch.manual_seed(1)
    assert set(parts) == {"latent", "log_det"}
    assert all(part.shape == (3,) for part in parts.values())
    torch.testing.assert_close(sum(parts.values()), flow.bits_per_dim(x))


def test_log_det_part_does_not_depend_on_the_image_size():
    # Bits a value: a sum over pixels that is not divided by their number, or counted once, shows.
    for size in (4, 8):
        flow = Flow(Chain(Squeeze(), ActNorm(4)), shape=(1, size, size)).eval()
        nn.init.constant_(flow.chain[1].log_scale, math.log(2))
        parts = flow.parts(torch.zeros(2, 1, size, size))
        torch.testing.assert_close(parts["log_det"], torch.full((2,), -1.0))


# --- latents, samples -----------------------------------------------------------------------------


def test_inverse_takes_what_forward_gives():
    for flow in (small_flow(), multiscale_flow().double()):
        x = torch.randn(3, *flow.shape, dtype=torch.float64)
        latents, log_det = flow(x)
        assert log_det.shape == (3,)
        torch.testing.assert_close(flow.inverse(latents), x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_samples_have_the_shape_of_the_data(n):
    assert multiscale_flow().sample(n).shape == (n, 1, 4, 4)
    assert small_flow().sample(n).shape == (n, 2)
    levels = multiscale_flow(levels=5).sample(n)
    assert set(levels.flatten().tolist()) <= set(range(5))


def test_temperature_scales_the_spread_around_loc():
    flow = Flow(Chain(Flip()), shape=(2,), base=Normal(3.0, 2.0))
    for temperature in (0.0, 0.5, 1.0, 1.5):
        torch.manual_seed(0)
        x = flow.sample(20_000, temperature=temperature)
        assert x.mean().item() == pytest.approx(3, abs=0.06)
        assert x.std().item() == pytest.approx(2 * temperature, rel=0.02)


def test_temperature_is_refused_where_it_means_nothing():
    flow = Flow(Chain(Flip()), shape=(2,), base=Uniform(0.0, 1.0))
    assert flow.sample(1).shape == (1, 2)
    with pytest.raises(ValueError, match=r"`temperature` is 0.5.*Uniform"):
        flow.sample(1, temperature=0.5)
    with pytest.raises(ValueError, match="`temperature` is -1"):
        small_flow().sample(1, temperature=-1)


def test_generator_decides_the_sample_and_leaves_the_default_stream():
    flow = multiscale_flow()
    state = torch.random.get_rng_state()
    first, second = (
        flow.sample(4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1)
    )
    other = flow.sample(4, generator=torch.Generator().manual_seed(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)
    flow.sample(4)
    assert not torch.equal(torch.random.get_rng_state(), state)


def test_a_generator_gives_new_samples_at_each_call():
    generator = torch.Generator().manual_seed(1)
    flow = small_flow()
    assert not torch.equal(flow.sample(2, generator=generator), flow.sample(2, generator=generator))


def test_looking_for_latent_shapes_disturbs_nothing():
    flow = Flow(Chain(Dequantize(5), ActNorm(1), Squeeze(), Flip()), shape=(1, 4, 4))
    flow.chain[3].eval()  # a part that its user froze
    modes = [part.training for part in flow.modules()]
    state = torch.random.get_rng_state()
    flow.sample(1, generator=torch.Generator())
    assert not flow.chain[1].started
    assert [part.training for part in flow.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state)


def test_sampling_records_no_graph_but_inverse_does():
    flow = small_flow()
    assert not flow.sample(2).requires_grad
    assert flow.inverse(torch.randn(2, 2, dtype=torch.float64)).requires_grad


def test_interpolation_goes_from_one_to_the_other():
    for flow in (small_flow(), multiscale_flow().double()):
        x0, x1 = torch.randn(2, 3, *flow.shape, dtype=torch.float64)
        frames = flow.interpolate(x0, x1, 5)
        assert frames.shape == (5, 3, *flow.shape)
        torch.testing.assert_close(frames[0], x0, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(frames[-1], x1, rtol=1e-8, atol=1e-8)
    middle = multiscale_flow().interpolate(x0.float(), x1.float(), 3)[1]
    torch.testing.assert_close(middle, (x0 + x1).float() / 2)


# --- editing --------------------------------------------------------------------------------------


def test_each_latent_has_a_temperature_of_its_own():
    flow = multiscale_flow()
    generator = torch.Generator().manual_seed(1)
    x = flow.sample(2000, temperature=[0.5, 2.0], generator=generator)
    early, last = flow(x)[0]
    assert early.std().item() == pytest.approx(0.5, rel=0.03)
    assert last.std().item() == pytest.approx(2.0, rel=0.03)
    same = [
        flow.sample(3, temperature=t, generator=torch.Generator().manual_seed(1))
        for t in (0.7, (0.7, 0.7))
    ]
    assert torch.equal(*same)
    with pytest.raises(ValueError, match=r"`temperature` has 3 numbers.*has 2 latents"):
        flow.sample(1, temperature=[1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="`temperature` is -1"):
        flow.sample(1, temperature=[1.0, -1.0])


@pytest.mark.parametrize(
    ("indices", "redrawn"), [(0, {0}), (-1, {1}), ([0, 1], {0, 1}), ([], set())]
)
def test_vary_draws_the_latents_it_is_told_and_keeps_the_others(indices, redrawn):
    flow = multiscale_flow().double()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    varied = flow.vary(x, indices, generator=torch.Generator().manual_seed(1))
    for index, (before, after) in enumerate(zip(flow(x)[0], flow(varied)[0], strict=True)):
        if index in redrawn:
            assert (before - after).abs().min() > 1e-4
        else:
            torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)
    again = flow.vary(x, indices, generator=torch.Generator().manual_seed(1))
    assert torch.equal(varied, again)
    assert not varied.requires_grad


def test_vary_at_temperature_zero_puts_the_mean_in_place():
    flow = multiscale_flow().double()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    kept, mean = flow(flow.vary(x, 1, temperature=0.0))[0]
    assert mean.abs().max() < 1e-9
    torch.testing.assert_close(kept, flow(x)[0][0], rtol=1e-9, atol=1e-9)


def test_vary_refuses_latents_that_are_not_there():
    for index in (2, -3):
        with pytest.raises(ValueError, match=f"`indices` holds {index}, but this flow has 2"):
            multiscale_flow().vary(torch.zeros(1, 1, 4, 4), index)


# --- bases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base",
    [
        Laplace(0.5, 2.0),
        Normal(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])),
        MultivariateNormal(torch.zeros(2), torch.tensor([[2.0, 0.5], [0.5, 1.0]])),
        Independent(Normal(torch.zeros(2), torch.ones(2)), 1),
        MixtureSameFamily(
            Categorical(torch.ones(2)), Normal(torch.tensor([-1.0, 1.0]), torch.tensor([0.5, 0.5]))
        ),
    ],
    ids=lambda base: type(base).__name__,
)
def test_any_distribution_can_be_the_base(base):
    flow = Flow(Chain(Flip()), shape=(2,), base=base)
    x = flow.sample(7)
    assert x.shape == (7, 2)
    expected = base.log_prob(x.flip(1))
    torch.testing.assert_close(
        flow.log_prob(x), expected if expected.dim() == 1 else expected.sum(1)
    )


def test_values_outside_the_support_are_impossible_and_no_error():
    flow = Flow(Chain(Flip()), shape=(2,), base=Uniform(0.0, 1.0))
    assert flow.log_prob(torch.tensor([[0.5, 2.0]])).item() == -math.inf


def test_base_moves_with_the_flow_and_stays_out_of_the_state_dict():
    flow = Flow(Chain(ActNorm(2)), shape=(2,), base=Normal(1.0, 2.0)).double().eval()
    assert flow.sample(1).dtype == torch.float64
    assert flow.log_prob(torch.zeros(1, 2).double()).dtype == torch.float64
    meta = copy.deepcopy(flow).to("meta")
    assert meta.base.distribution().loc.device.type == "meta"
    assert all(name.startswith("chain.") for name in flow.state_dict())


def test_base_that_would_silently_not_train_is_refused():
    loc = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"`loc` of the base Normal requires a gradient"):
        Flow(Chain(Flip()), shape=(2,), base=Normal(loc, 1.0))


# --- a good guest ---------------------------------------------------------------------------------


def test_memory_is_that_of_the_chain():
    flow = small_flow()
    assert flow.memory == "linear"
    flow.memory = "constant"
    assert flow.chain.memory == "constant"
    with pytest.raises(ValueError, match="`memory` is 'big'"):
        flow.memory = "big"


def test_state_dict_round_trip_through_a_file():
    flow, x = multiscale_flow().train(), torch.randn(8, 1, 4, 4)
    flow.log_prob(x)  # the start
    file = io.BytesIO()
    torch.save(flow.state_dict(), file)
    file.seek(0)
    other = multiscale_flow().train()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.log_prob(x), flow.log_prob(x))


def test_deepcopy_computes_the_same():
    flow, x = small_flow(), torch.randn(4, 2, dtype=torch.float64)
    assert torch.equal(copy.deepcopy(flow).log_prob(x), flow.log_prob(x))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_levels_of_any_type_are_taken_in_the_precision_of_the_flow(dtype, precision):
    flow = Flow(Chain(InvertibleConv1x1(3)), shape=(3, 2, 2), levels=4).to(precision)
    bits = flow.bits_per_dim(torch.randint(4, (2, 3, 2, 2)).to(dtype))
    assert bits.dtype == precision


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"`x` has shape \(3, 1, 5, 5\).*\(N, 1, 4, 4\)"):
        multiscale_flow().log_prob(torch.randn(3, 1, 5, 5))


def test_classes_may_be_more_than_layers():
    flow = NICE((4,), levels=None, num_couplings=2, width=4, num_classes=21_841)
    assert flow.num_classes == 21_841
    with pytest.raises(ValueError, match="`num_couplings` is 20000, but must be at most 10,000"):
        NICE((4,), levels=None, num_couplings=20_000)
