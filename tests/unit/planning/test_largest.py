"""The largest batch or sequence in a budget, beside a search through all sizes."""

from __future__ import annotations

import functools

import pytest
import torch

import recoup
from recoup.errors import BudgetError
from tests.neighbours.planned import Net, loss_of
from tests.plan_oracle import peak_of, step_of


def model(*args):
    torch.manual_seed(0)
    return Net(*(args or (16, 4)))


def batch(size):
    return torch.ones(size, 16)


largest = functools.partial(recoup.largest, least=2, loss=loss_of)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kib", [150, 260])
def test_the_largest_batch(kib):
    net, budget = model(), kib * 2**10
    found = largest(batch, net, budget=budget)
    best = found.size - 1  # of a search through all sizes
    for size in range(found.size - 1, found.size + 8):
        try:
            recoup.plan(net, batch(size), budget=budget, loss=loss_of)
        except BudgetError:
            break
        best = size
    assert best >= found.size >= 0.98 * best - 1
    assert found.plan.rehearsed_peak_bytes <= budget
    step = step_of(net, *found.args, loss=loss_of, **found.kwargs)
    assert peak_of(net, step) > 1.3 * budget  # of the model alone
    with found.plan.applied():
        assert peak_of(net, step) <= budget


def test_a_bound_that_fits_is_found_with_few_probes():
    sizes = []

    def build(size):
        sizes.append(size)
        return (batch(size),)

    assert largest(build, model(), budget="1 GiB", most=100).size == 100
    assert len(set(sizes)) <= 8


def test_a_batch_that_does_not_grow_will_do_where_one_size_is_asked_for():
    found = largest(lambda size: batch(20)[:size], model(), budget="1 MiB", least=20, most=20)
    assert found.size == 20


def test_a_model_that_takes_no_more_says_the_way_out():
    class Positions(Net):
        def forward(self, x):
            if len(x) > 20:
                raise IndexError("20 positions")
            return super().forward(x)

    with pytest.raises(IndexError, match="20 positions") as caught:
        largest(batch, Positions(16, 3), budget="1 MiB", least=8)
    (_, way_out) = caught.value.__notes__
    assert "Size 16 ran" in way_out
    assert "`most`" in way_out
