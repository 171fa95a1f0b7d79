"""The largest batch or sequence in a budget, beside a search through all sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from recoup.invertible import AdditiveCoupling, Chain
from tests.neighbours.planned import Net, loss_of


def model():
    torch.manual_seed(0)
    return Net(16, 4)


def batch(size):
    return torch.ones(size, 16)


def exhaustive(model, build, budget, sizes, **options):
    """The largest of all sizes for which there is a plan."""
    best = 0
    for size in sizes:
        try:
            recoup.plan(model, build(size), budget=budget, **options)
        except BudgetError:
            break
        best = size
    return best


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kib", [150, 260])
def test_the_largest_batch(kib):
    net = model()
    budget = kib * 2**10
    found = recoup.largest(batch, net, budget=budget, least=2, loss=loss_of)
    near = range(found.size - 1, found.size + 8)
    best = exhaustive(net, batch, budget, near, loss=loss_of)
    assert best >= found.size >= 0.98 * best - 1
    assert found.plan.rehearsed_peak_bytes <= budget
    with found.plan.applied():
        peak = recoup.measure(
            lambda: loss_of(net(*found.args, **found.kwargs)).backward(), device="cpu", repeats=0
        )
    assert peak.peak_bytes <= budget


@pytest.mark.slow
def test_a_plan_trains_more_than_the_model_alone():
    net, budget = model(), 300 * 2**10
    found = recoup.largest(batch, net, budget=budget, least=2, loss=loss_of)

    def peak(size):
        x = batch(size)
        step = recoup.measure(lambda: loss_of(net(x)).backward(), device="cpu", repeats=0)
        return step.peak_bytes

    assert peak(found.size) > 1.5 * budget


@pytest.mark.slow
def test_sequences_and_keywords():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)]
    net = nn.Sequential(*layers)
    found = recoup.largest(
        lambda size: {"input": torch.ones(2, size, 16)}, net, budget="400 KiB", most=64
    )
    assert 1 < found.size <= 64
    assert found.args == ()
    assert found.kwargs["input"].shape == (2, found.size, 16)


@pytest.mark.exhaustive
def test_blocks_that_may_be_inverted_never_train_less():
    torch.manual_seed(0)
    halves = lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())  # noqa: E731
    net = Chain(*(AdditiveCoupling(halves(), halves()) for _ in range(6))).double()
    build = lambda size: torch.ones(size, 16, dtype=torch.float64)  # noqa: E731
    options = {"budget": "256 KiB", "least": 192, "loss": lambda output: output[0].square().sum()}
    exact = recoup.largest(build, net, **options)
    found = recoup.largest(build, net, exact=False, **options)
    assert found.size >= 0.99 * exact.size
    assert found.plan.rehearsed_peak_bytes <= 256 * 2**10
    assert "exact=False" not in str(found.plan)
    less = recoup.largest(build, net, exact=False, most=192, **options)
    assert "invert" in {row.way for row in less.plan.blocks}


def test_a_bound_that_fits_is_found_with_few_probes():
    sizes = []

    def build(size):
        sizes.append(size)
        return (batch(size),)

    found = recoup.largest(build, model(), budget="1 GiB", least=2, most=100, loss=loss_of)
    assert found.size == 100
    assert len(set(sizes)) <= 8


def test_a_model_that_takes_no_more_says_the_way_out():
    class Positions(Net):
        def forward(self, x):
            if len(x) > 20:
                raise IndexError("20 positions")
            return super().forward(x)

    with pytest.raises(IndexError, match="20 positions") as caught:
        recoup.largest(batch, Positions(16, 3), budget="1 MiB", least=8, loss=loss_of)
    assert "Size 16 ran" in caught.value.__notes__[0]
    assert "`most`" in caught.value.__notes__[0]


@pytest.mark.slow
def test_errors():
    net = model()
    with pytest.raises(BudgetError, match="a step of size 2 takes at least"):
        recoup.largest(batch, net, budget=100, least=2)
    for most in (None, 40):
        with pytest.raises(ValueError, match="must return larger arguments"):
            recoup.largest(lambda size: batch(20)[:size], net, budget="1 MiB", least=2, most=most)
    alone = recoup.largest(lambda size: batch(20)[:size], net, budget="1 MiB", least=20, most=20)
    assert alone.size == 20
    with pytest.raises(ValueError, match="`least` is 3 and `most` is 2"):
        recoup.largest(batch, net, budget="1 MiB", least=3, most=2)
    for least in ("1", 1.5):
        with pytest.raises(ValueError, match=f"`least` is {least!r}"):
            recoup.largest(batch, net, budget="1 MiB", least=least)
    with pytest.raises(ValueError, match="`build_batch` is 3, but must be a function"):
        recoup.largest(3, net, budget="1 MiB")
    with pytest.raises(ValueError, match="`build_batch` returned None for size 1"):
        recoup.largest(lambda size: None, net, budget="1 MiB")
    with pytest.raises(ValueError, match="`budget` is 'much'"):
        recoup.largest(batch, net, budget="much")
