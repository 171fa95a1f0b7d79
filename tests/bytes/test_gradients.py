"""Bytes that sums of gradients and segments take, and how often segments run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup

NUM_BACKWARDS = 16

pytestmark = pytest.mark.usefixtures("measured")


def loss_fn(y):
    return y.square().mean()


def peak_bytes(fn):
    return recoup.measure(fn, device="cpu", repeats=0).peak_bytes


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))


def size_of(model):
    return sum(each.nbytes for each in model.parameters())


def stores_of(model, num):
    x = torch.ones(2, 512)
    return [
        recoup.GradStore.from_backward(loss_fn(model(x)), model.parameters()) for _ in range(num)
    ]


# The sum, one gradient on its way, and the activations of two samples.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "most"), [("auto", 1.3), ("harvest", 1.3), ("grad", 2.3)])
def test_a_sum_takes_one_buffer(model, mode, most):
    def run():
        store = recoup.GradStore(model.parameters())
        for _ in range(NUM_BACKWARDS):
            store.backward(loss_fn(model(torch.ones(2, 512))), mode=mode)
        assert store.nbytes() == size_of(model)

    assert peak_bytes(run) <= most * size_of(model)
    # The control: what it is measured against is seen by the meter.
    assert peak_bytes(lambda: stores_of(model, NUM_BACKWARDS)) >= NUM_BACKWARDS * size_of(model)


def test_a_merge_takes_nothing(model):
    stores = stores_of(model, 2)
    assert peak_bytes(lambda: stores[0].extend_(stores[1], consume=False)) == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    assert peak_bytes(lambda: recoup.step(optimizer, *stores)) <= 2 * size_of(model) / 4


# -- segments --------------------------------------------------------------------------------------


def run_segments(num_segments, memory, x):
    """A backward of as many segments, which are one cell; how often it ran."""
    cell = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    num_runs = []
    cell.register_forward_hook(lambda *_: num_runs.append(1))
    store = recoup.GradStore(cell.parameters())
    recoup.segments_backward([cell] * num_segments, x, loss_fn, store, memory=memory)
    return len(num_runs)


@pytest.mark.parametrize(("memory", "most"), [("inputs", 1.1), ("sqrt", 0.3), ("log", 0.15)])
def test_the_peak_grows_with_the_inputs_alone(memory, most):
    x = torch.randn(512, 32)

    def growth(memory):
        peaks = [peak_bytes(lambda num=num: run_segments(num, memory, x)) for num in (4, 64)]
        return (peaks[1] - peaks[0]) / (60 * x.nbytes)

    assert growth(memory) <= most
    assert growth("linear") >= 1.9


@pytest.mark.parametrize("num_segments", [1, 2, 16])
def test_each_segment_but_the_last_runs_twice(num_segments):
    assert run_segments(num_segments, "inputs", torch.ones(2, 32)) == 2 * num_segments - 1
