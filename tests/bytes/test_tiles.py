"""Law 2 for calls in tiles: what is alive falls by the number of tiles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.memory import measure
from tests.alive import held_after

pytestmark = pytest.mark.usefixtures("measured")

ROWS, D, V = 512, 32, 4096
LOGITS, WEIGHT, HIDDEN = 4 * ROWS * V, 4 * V * D, 4 * ROWS * D
SMALL = 8192  # labels, random states and numbers


class Head(nn.Linear):
    def __init__(self):
        super().__init__(D, V, bias=False)

    def loss(self, hidden, labels):
        return F.cross_entropy(self(hidden).flatten(0, -2), labels.flatten())


@pytest.fixture
def head():
    return Head()


@pytest.fixture
def hidden():
    return torch.randn(ROWS, D, requires_grad=True)


@pytest.fixture
def labels():
    return torch.randint(V, (ROWS,))


def peak(loss, head, hidden, labels):
    """The most bytes in a step, its gradients with them."""

    def step():
        head.weight.grad = hidden.grad = None
        loss(hidden, labels).backward()

    step()
    head.weight.grad = hidden.grad = None
    return measure(step, device="cpu", repeats=0).peak_bytes


def test_the_peak_of_head_and_loss(head, hidden, labels):
    plain = peak(head.loss, head, hidden, labels)
    assert plain >= 3 * LOGITS
    for tiles in (4, 16, 64):
        found = peak(recoup.tiled_loss(head.loss, 0, tiles), head, hidden, labels)
        assert found <= 3 * LOGITS / tiles + WEIGHT + 2 * HIDDEN + SMALL
    assert found <= plain / 8
    found = peak(recoup.tiled(head.loss, 0, 64, reduction="mean"), head, hidden, labels)
    assert found <= 3 * LOGITS / 64 + 2 * WEIGHT + 2 * HIDDEN + SMALL
    assert found > 2 * WEIGHT  # so the weight's gradient is what tiled_loss spares


def test_backward_needs_no_more_than_forward_left(head, hidden, labels):
    value = recoup.tiled_loss(head.loss, 0, 16)(hidden, labels)
    assert measure(value.backward, device="cpu", repeats=0).peak_bytes <= SMALL


def test_a_retained_graph_keeps_its_gradients(head, hidden, labels):
    value = recoup.tiled_loss(head.loss, 0, 16)(hidden, labels)
    found = measure(lambda: value.backward(retain_graph=True), device="cpu", repeats=0)
    assert WEIGHT + HIDDEN <= found.peak_bytes <= WEIGHT + HIDDEN + SMALL


def test_what_is_held_after_forward(head, hidden, labels):
    held = held_after(lambda: recoup.tiled_loss(head.loss, 0, 16)(hidden, labels), ())
    assert WEIGHT + HIDDEN <= held.num_bytes <= WEIGHT + HIDDEN + SMALL
    tiled = recoup.tiled(head.loss, 0, 16, reduction="mean")
    assert held_after(lambda: tiled(hidden, labels), ()).num_bytes <= SMALL
    head.requires_grad_(False)
    held = held_after(lambda: recoup.tiled_loss(head.loss, 0, 16)(hidden, labels), ())
    assert HIDDEN <= held.num_bytes <= HIDDEN + SMALL


def test_a_region_around_keeps_no_gradients(head, hidden, labels):
    tiled = recoup.tiled_loss(head.loss, 0, 16)

    def run():
        return recoup.checkpoint(lambda h: tiled(h, labels).exp(), hidden)

    run()  # the first run of some code keeps what it saves until it ends
    assert held_after(run, ()).num_bytes <= SMALL


def test_an_mlp_holds_its_output_and_one_tile():
    mlp = nn.Sequential(nn.Linear(D, 64 * D), nn.GELU(), nn.Linear(64 * D, D)).requires_grad_(False)
    x = torch.randn(2, ROWS, D, requires_grad=True)
    between, output = 2 * 64 * x.nbytes, x.nbytes

    def of(fn):
        def step():
            x.grad = None
            fn(x).sum().backward()

        step()
        x.grad = None
        return measure(step, device="cpu", repeats=0).peak_bytes

    plain = of(mlp)
    assert plain > between
    for tiles in (8, 32):
        # GELU's input, output and gradients; the output and its tiles, or gradients in their place.
        assert of(recoup.tiled(mlp, 1, tiles)) <= 1.5 * between / tiles + 3.5 * output + SMALL
    held = held_after(lambda: recoup.tiled(mlp, 1, 8)(x), ())
    assert held.num_bytes <= output + SMALL
    assert held_after(lambda: mlp(x), ()).num_bytes > between / 2


def test_forwards_are_counted(head, hidden, labels):
    calls = []

    def loss(hidden, labels):
        calls.append(len(labels))
        return head.loss(hidden, labels)

    recoup.tiled_loss(loss, 0, 8)(hidden, labels).backward()
    assert calls == [ROWS // 8] * 8
    calls.clear()
    recoup.tiled(loss, 0, 8, reduction="mean")(hidden, labels).backward()
    assert calls == [ROWS // 8] * 16
