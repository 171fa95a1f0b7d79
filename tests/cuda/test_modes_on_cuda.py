"""The laws on a GPU: the same numbers, the same random stream, flat memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.invertible import AdditiveCoupling, Chain
from tests.oracle import assert_same_step, run_step

pytestmark = pytest.mark.cuda


def network():
    convolutions = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)]
    return nn.Sequential(
        convolutions[0], nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), convolutions[1]
    )


def chain(memory, num_blocks=6):
    blocks = [AdditiveCoupling(network(), network()) for _ in range(num_blocks)]
    return Chain(*blocks, memory=memory).to("cuda", torch.float64)


@pytest.mark.parametrize("memory", ["sqrt", "log", "constant", 3])
def test_gradients_and_stream_equal_linear_with_dropout_and_batch_norm(memory):
    model = chain("linear")
    x = torch.randn(4, 16, 8, 8, device="cuda", dtype=torch.float64).requires_grad_()
    (found, stream), (wanted, plain_stream) = (
        (run_step(model, x, memory=mode), torch.rand(1, device="cuda"))
        for mode in (memory, "linear")
    )
    assert_same_step(found, wanted, 1e-9)
    assert torch.equal(stream, plain_stream)


def test_constant_memory_is_flat():
    peaks = {}
    for depth in (8, 64):
        model = chain("constant", depth)
        x = torch.randn(64, 16, 32, 32, device="cuda", dtype=torch.float64)

        def step(model=model, x=x):
            y, _ = model(x)
            y.square().mean().backward()

        step()
        peaks[depth] = recoup.measure(step, device="cuda", repeats=0).peak_bytes
    assert peaks[64] <= 1.02 * peaks[8]
