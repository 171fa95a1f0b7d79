"""The laws on a GPU: the same numbers, the same random stream, flat memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.invertible import AdditiveCoupling, Chain

pytestmark = pytest.mark.cuda

MODES = ("sqrt", "log", "constant", 3)


def network(dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(8, 8, 3, padding=1),
    )


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y, log_det = model(x)
    (y.pow(3).mean() + log_det.mean()).backward()
    found = {name: p.grad for name, p in model.named_parameters()} | {"input": x.grad}
    return found, torch.rand(1, device="cuda")


def chain(memory: recoup.schedules.Schedule | str | int, num_blocks: int = 6) -> Chain:
    torch.manual_seed(0)
    blocks = [AdditiveCoupling(network(0.2), network(0.2)) for _ in range(num_blocks)]
    return Chain(*blocks, memory=memory).to("cuda", torch.float64)


@pytest.mark.parametrize("memory", MODES)
def test_gradients_and_stream_equal_linear_with_dropout_and_batch_norm(memory):
    x = torch.randn(4, 16, 8, 8, device="cuda", dtype=torch.float64)
    reference_model, model = chain("linear"), chain(memory)
    reference, stream = gradients(reference_model, x)
    found, found_stream = gradients(model, x)
    assert found.keys() == reference.keys()
    for name, expected in reference.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12, msg=name)
    assert torch.equal(stream, found_stream)
    buffers = dict(reference_model.named_buffers())
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, buffers[name], msg=name)


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
