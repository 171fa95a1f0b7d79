"""Reparametrized weights and values on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import recoup
from tests.unit.weights.plain_run import PlainRun

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS = {
    "linear": (lambda: nn.Linear(256, 256), (8, 256)),
    "conv": (lambda: nn.Conv2d(64, 64, 3, padding=1), (2, 64, 8, 8)),
    "lstm": (lambda: nn.LSTM(64, 64, 2), (5, 4, 64)),
}


def gradients(module, x, seed):
    torch.manual_seed(seed)
    module.zero_grad()
    output = module(x)
    output = output[0] if isinstance(output, tuple) else output
    output.float().square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def held(module, x):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = module(x)
    output = output[0] if isinstance(output, tuple) else output
    num_bytes = torch.cuda.memory_allocated() - before
    del output
    return num_bytes


@pytest.mark.parametrize("apply", [recoup.weight_dropout, recoup.weight_noise])
@pytest.mark.parametrize("name", ["linear", "conv"])
def test_gradients_are_those_of_the_drawn_weight(name, apply):
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    run = PlainRun(build().cuda(), lambda module: apply(module, "weight"))
    x = torch.randn(shape, device="cuda", requires_grad=True)
    assert run.compare(x)[0].seed != run.compare(x)[0].seed


@pytest.mark.parametrize("apply", [recoup.weight_dropout, recoup.weight_noise])
def test_a_seed_says_the_gradients_of_a_recurrent_layer(apply):
    build, shape = LAYERS["lstm"]
    module = apply(build().cuda(), r".*weight.*")
    x = torch.randn(shape, device="cuda", requires_grad=True)
    first, again = gradients(module, x, 1), gradients(module, x, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, gradients(module, x, 2), strict=True))


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_noise_is_not_held(name):
    build, shape = LAYERS[name]
    plain = build().cuda()
    noisy = recoup.weight_noise(copy.deepcopy(plain), r".*weight")
    x = torch.randn(shape, device="cuda", requires_grad=True)
    for module in (plain, noisy):
        gradients(module, x, 0)
    assert held(noisy, x) <= held(plain, x) + 512  # what the allocator rounds up


def test_parameters_of_a_recurrent_layer_stay_where_they_are():
    lstm = recoup.weight_dropout(nn.LSTM(64, 64, 2).cuda(), r"weight_hh_l\d")
    x = torch.randn(5, 4, 64, device="cuda")
    before = [p.data_ptr() for p in lstm.parameters()]
    for seed in range(3):
        gradients(lstm, x, seed)
    assert [p.data_ptr() for p in lstm.parameters()] == before


def test_a_value_is_not_held():
    x = torch.randn(256, 256, device="cuda", requires_grad=True)
    w = torch.randn(256, 256, device="cuda", requires_grad=True)
    found, num_bytes = [], []
    for make in (nn.functional.gelu, recoup.recompute(nn.functional.gelu)):
        (make(x) @ w).sum().backward()  # cuBLAS makes its workspace once
        num_bytes.append(held(lambda x, make=make: make(x) @ w, x))
        found.append(torch.autograd.grad((make(x) @ w).sum(), (x, w)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert num_bytes[1] <= num_bytes[0] - x.nbytes
