"""Reparametrized weights and values on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from tests.weight_zoo import MORE, compare

pytestmark = pytest.mark.cuda
LAYERS = {
    "linear": (lambda: nn.Linear(256, 256), (8, 256), "weight"),
    "conv": (lambda: nn.Conv2d(64, 64, 3, padding=1), (2, 64, 8, 8), "weight"),
    "lstm": (lambda: nn.LSTM(64, 64, 2), (5, 4, 64), r"weight_.*"),
}


def held(run):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = run()
    num_bytes = torch.cuda.memory_allocated() - before
    del output
    return num_bytes


@pytest.mark.parametrize("way", ["dropout", "noise", "stacked", "learned"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_step_is_that_of_the_materialised_weights_which_are_not_held(name, way):
    build, size, pattern = LAYERS[name]
    plain, x = build().cuda(), torch.randn(size, device="cuda", requires_grad=True)
    ours, _ = compare(MORE[way], plain, (x,), pattern, rtol=1e-4)
    pointers = [p.data_ptr() for p in ours.parameters()]
    norms = sum(p.nbytes for n, p in ours.named_parameters() if n.endswith("_g"))
    assert held(lambda: ours(x)) <= held(lambda: plain(x)) + norms + 4096  # what is rounded up
    assert [p.data_ptr() for p in ours.parameters()] == pointers


def test_a_value_is_not_held():
    x, w = (torch.randn(256, 256, device="cuda", requires_grad=True) for _ in range(2))
    found, num_bytes = [], []
    for make in (nn.functional.gelu, recoup.recompute(nn.functional.gelu)):
        (make(x) @ w).sum().backward()  # cuBLAS makes its workspace once
        num_bytes.append(held(lambda make=make: make(x) @ w))
        found.append(torch.autograd.grad((make(x) @ w).sum(), (x, w)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert num_bytes[1] <= num_bytes[0] - x.nbytes + 512  # of a sketch
