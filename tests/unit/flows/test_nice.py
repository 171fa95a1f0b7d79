from __future__ import annotations

import pytest
import torch

from recoup.flows import NICE, Logistic
from recoup.invertible import ActNorm, AdditiveCoupling
from tests.unit.flows.models import (
    assert_invertible,
    assert_same_in_every_mode,
    classes,
    digits,
    filled,
    loss_and_gradients,
    stirred,
)


def nice(shape=(1, 8, 8), **options):
    torch.manual_seed(0)
    return NICE(shape, **{"levels": 17, "width": 8} | options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 4, 4), {}),
        ((7,), {"levels": None, "num_couplings": 3, "depth": 1}),
        ((2,), {"levels": None}),
    ],
    ids=str,
)
def test_the_chain_is_invertible_with_parameters_of_both_signs(shape, options):
    assert_invertible(nice(shape, **options), torch.rand(2, *shape))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("num_classes", [None, 3])
def test_gradients_are_those_of_linear_memory_with_dropout_too(exact, num_classes):
    flow = stirred(nice(exact=exact, num_classes=num_classes, dropout=0.4))
    labels = None if num_classes is None else classes(6, num_classes)
    assert_same_in_every_mode(flow, digits(), labels)


def test_even_and_odd_entries_take_turns():
    flow = filled(nice((6,), levels=None, num_couplings=1))
    x = torch.randn(1, 6, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow(v)[0], x)[0, :, 0]
    # latents: the even entries alone, and then the odd ones, which see all even ones
    assert ((jacobian[:3] != 0).nonzero()[:, 1] == torch.tensor([0, 2, 4])).all()
    assert (jacobian[3:, [0, 2, 4]] != 0).all()
    assert ((jacobian[3:, [1, 3, 5]] != 0) == torch.eye(3, dtype=torch.bool)).all()


def test_only_the_scaling_at_the_end_changes_volume():
    flow = filled(nice((6,), levels=None))
    x = torch.randn(5, 6, dtype=torch.float64)
    _, log_det = flow(x)
    torch.testing.assert_close(log_det, flow.chain[-1].log_scale.sum().expand(5))


def test_latents_are_logistic_unless_told_otherwise():
    assert isinstance(nice().base.distribution(), Logistic)
    other = torch.distributions.Normal(0.0, 1.0)
    assert isinstance(nice(base=other).base.distribution(), torch.distributions.Normal)


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"num_classes": 4}], ids=str)
def test_samples(options):
    flow = filled(nice(**options), 0.1)
    labels = classes(5, 4) if "num_classes" in options else None
    samples = flow.sample(5, labels=labels, temperature=0.7)
    assert samples.shape == (5, 1, 8, 8)
    assert set(samples.flatten().tolist()) <= set(range(17))
    x = digits(5)
    assert torch.equal(flow.reconstruct(x, labels), x)


def test_exact_couplings_return_the_very_bits():
    flow = filled(nice(exact=True, num_couplings=12).float(), 0.2).float()
    stages = [stage for stage in flow.chain if not isinstance(stage, ActNorm)]
    assert all(stage.exact for stage in stages if isinstance(stage, AdditiveCoupling))
    x = torch.randint(-8000, 8000, (4, 1, 8, 8)) / 2**14  # on the grid
    couplings = flow.chain[1:-1]
    y, _ = couplings(x)
    assert not torch.equal(y.flatten(), x.flatten())
    assert torch.equal(couplings.inverse(y)[0], x)


@pytest.mark.parametrize("levels", [2, 3, 17, 256])
@pytest.mark.parametrize("exact", [False, True])
def test_no_level_is_rounded_to_the_next(levels, exact):
    flow = nice((8, 8), levels=levels, exact=exact).eval()  # the couplings start as identities
    x = torch.arange(64 * 800).view(-1, 8, 8) % levels
    assert torch.equal(flow.reconstruct(x), x.float())


def test_training_lowers_the_loss():
    flow = nice().double()
    x = digits(64)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)
    history = []
    for _ in range(30):
        loss = flow.bits_per_dim(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < history[0] - 0.2


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((1,), {}, r"`shape` is \(1,\)"),
        ((), {}, r"`shape` is \(\)"),
        ((1, 8, 8), {"num_couplings": 0}, "`num_couplings` is 0"),
        ((1, 8, 8), {"depth": 0}, "`depth` is 0"),
        ((1, 8, 8), {"levels": 0}, "`levels` is 0"),
    ],
    ids=str,
)
def test_unsuitable_arguments_are_refused(shape, options, words):
    with pytest.raises(ValueError, match=words):
        nice(shape, **options)


def test_the_first_step_is_the_same_in_every_mode():
    # It holds the data-dependent start, which must be that of the batch, and happen once.
    results = {
        memory: loss_and_gradients(nice(memory=memory).double(), digits(), None)
        for memory in ("linear", "constant")
    }
    assert results["constant"][0] == results["linear"][0]
    for name, gradient in results["linear"][1].items():
        torch.testing.assert_close(
            results["constant"][1][name], gradient, rtol=1e-10, atol=1e-10, msg=name
        )


def test_more_levels_than_the_grid_has_places_are_refused():
    with pytest.raises(ValueError, match="`levels` is 131072, but with `exact`"):
        NICE((1, 4, 4), levels=131072, exact=True)
