"""Bytes that sums of gradients and segments take, and how often segments run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup

NUM_BACKWARDS = 16


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


# The sum, one gradient on its way, and the activations of two samples.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mode", "most"), [("auto", 1.3), ("harvest", 1.3), ("grad", 2.3)])
def test_a_sum_takes_one_buffer(measured, model, mode, most):
    def run():
        store = recoup.GradStore(model.parameters())
        for _ in range(NUM_BACKWARDS):
            store.backward(loss_fn(model(torch.ones(2, 512))), mode=mode)
        assert store.nbytes() == size_of(model)

    assert peak_bytes(run) <= most * size_of(model)


def test_a_list_of_stores_takes_one_for_each(measured, model):
    """The control: what the others are measured against is seen by the meter."""

    def run():
        x = torch.ones(2, 512)
        return [
            recoup.GradStore.from_backward(loss_fn(model(x)), model.parameters())
            for _ in range(NUM_BACKWARDS)
        ]

    assert peak_bytes(run) >= NUM_BACKWARDS * size_of(model)


def test_a_merge_takes_nothing(measured, model):
    x = torch.ones(2, 512)
    stores = [
        recoup.GradStore.from_backward(loss_fn(model(x)), model.parameters()) for _ in range(2)
    ]
    assert peak_bytes(lambda: stores[0].extend_(stores[1], consume=False)) == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
    assert peak_bytes(lambda: recoup.step(optimizer, *stores)) <= 2 * size_of(model) / 4


# -- segments --------------------------------------------------------------------------------------


def cell():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())


def peak_of(num_segments, memory, x):
    segment = cell()

    def run():
        store = recoup.GradStore(segment.parameters())
        recoup.segments_backward([segment] * num_segments, x, loss_fn, store, memory=memory)

    return peak_bytes(run)


@pytest.mark.parametrize(("memory", "most"), [("inputs", 1.1), ("sqrt", 0.3), ("log", 0.15)])
def test_the_peak_grows_with_the_inputs_alone(measured, memory, most):
    x = torch.randn(512, 32)
    growth = peak_of(64, memory, x) - peak_of(4, memory, x)
    assert growth <= most * 60 * x.nbytes
    assert peak_of(64, "linear", x) - peak_of(4, "linear", x) >= 1.9 * 60 * x.nbytes


@pytest.mark.parametrize("num_segments", [1, 2, 16, 256])
def test_each_segment_but_the_last_runs_twice(num_segments):
    segment, num_runs = cell(), []

    def counted(x):
        num_runs.append(1)
        return segment(x)

    store = recoup.GradStore(segment.parameters())
    recoup.segments_backward([counted] * num_segments, torch.ones(2, 32), loss_fn, store)
    assert len(num_runs) == 2 * num_segments - 1
