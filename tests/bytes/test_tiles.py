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
    def loss(self, hidden, labels):
        return F.cross_entropy(self(hidden).flatten(0, -2), labels.flatten())


@pytest.fixture
def given():
    hidden, labels = torch.randn(ROWS, D, requires_grad=True), torch.randint(V, (ROWS,))
    return Head(D, V, bias=False), hidden, labels


def peak(step, *leaves):
    """The most bytes in a second step, its gradients with them."""
    for _ in range(2):
        for leaf in leaves:
            leaf.grad = None
        found = measure(step, device="cpu", repeats=0).peak_bytes
    return found


def test_the_peak_of_head_and_loss(given):
    head, hidden, labels = given

    def of(loss):
        return peak(lambda: loss(hidden, labels).backward(), head.weight, hidden)

    assert of(head.loss) >= 3 * LOGITS
    for tiles in (4, 64):
        found = of(recoup.tiled_loss(head.loss, 0, tiles))
        assert found <= 3 * LOGITS / tiles + WEIGHT + 2 * HIDDEN + SMALL
    found = of(recoup.tiled(head.loss, 0, 64, reduction="mean"))
    # The gradient of the weight for a tile, beside that of all, is what tiled_loss spares.
    assert 2 * WEIGHT < found <= 3 * LOGITS / 64 + 2 * WEIGHT + 2 * HIDDEN + SMALL


def test_what_is_held_after_forward_and_taken_in_backward(given):
    head, hidden, labels = given
    tiled = recoup.tiled_loss(head.loss, 0, 16)
    value = tiled(hidden, labels)
    found = measure(lambda: value.backward(retain_graph=True), device="cpu", repeats=0)
    assert WEIGHT + HIDDEN <= found.peak_bytes <= WEIGHT + HIDDEN + SMALL
    assert measure(value.backward, device="cpu", repeats=0).peak_bytes <= SMALL

    def held(fn):
        return held_after(lambda: fn(hidden, labels), ()).num_bytes

    assert WEIGHT + HIDDEN <= held(tiled) <= WEIGHT + HIDDEN + SMALL
    assert held(recoup.tiled(head.loss, 0, 16, reduction="mean")) <= SMALL
    head.requires_grad_(False)
    assert HIDDEN <= held(tiled) <= HIDDEN + SMALL


def test_an_mlp_holds_its_output_and_one_tile():
    mlp = nn.Sequential(nn.Linear(D, 64 * D), nn.GELU(), nn.Linear(64 * D, D)).requires_grad_(False)
    x = torch.randn(2, ROWS, D, requires_grad=True)
    between, output = 2 * 64 * x.nbytes, x.nbytes

    assert held_after(lambda: mlp(x), ()).num_bytes > between / 2
    for tiles in (8, 32):
        fn = recoup.tiled(mlp, 1, tiles)
        assert held_after(lambda fn=fn: fn(x), ()).num_bytes <= output + SMALL
        # GELU's input, output and gradients; the output and its tiles, or gradients in their place.
        found = peak(lambda fn=fn: fn(x).sum().backward(), x)
        assert found <= 1.5 * between / tiles + 3.5 * output + SMALL
