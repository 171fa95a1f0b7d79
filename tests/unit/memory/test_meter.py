from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from recoup.memory import measure
from recoup.memory.meter import Measurement

KIB = 1024


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(6)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def conv_net():
    blocks = [nn.Conv2d(3, 4, 3, padding=1)]
    for _ in range(32):
        blocks += [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*blocks), torch.randn(16, 3, 16, 16)


def mlp():
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers), torch.randn(128, 64)


def checkpointed():
    return Checkpointed(), torch.randn(256, 64)


def transformer():
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(8, 32, 32)


def training_step(build):
    torch.manual_seed(0)
    module, x = build()

    def step():
        module.zero_grad(set_to_none=True)
        module(x).square().mean().backward()

    return module, step


def allocated_bytes(fn):
    """Peak and final running sum of the allocations and frees that the profiler saw."""
    kinds = [ProfilerActivity.CPU]
    with profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        fn()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    running, peak = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return peak, running


@pytest.mark.parametrize("build", [mlp, conv_net, checkpointed, transformer])
def test_agrees_with_the_allocations_that_the_profiler_sees(build):
    module, step = training_step(build)
    peak_bytes, held_bytes = allocated_bytes(step)
    module.zero_grad(set_to_none=True)
    measured = measure(step, device="cpu", repeats=0)
    assert measured.peak_bytes == pytest.approx(peak_bytes, rel=0.05)
    assert measured.peak_bytes <= peak_bytes
    assert measured.held_bytes == held_bytes


def test_held_bytes_are_the_residuals_and_the_result():
    x = torch.zeros(256, requires_grad=True)
    # exp keeps its output, which sin keeps as well; the result is alive too.
    measured = measure(lambda: x.exp().sin(), device="cpu", repeats=0)
    assert (measured.peak_bytes, measured.held_bytes) == (2 * KIB, 2 * KIB)
    # Both exp keep their outputs, sin and cos keep those too, and what sin returned is gone.
    measured = measure(lambda: x.exp().sin().exp().cos(), device="cpu", repeats=0)
    assert measured.held_bytes == 3 * KIB


def test_temporaries_are_in_the_peak_and_not_held():
    x = torch.zeros(256)
    measured = measure(lambda: ((x + 1) * 2).sum(), device="cpu", repeats=0)
    assert (measured.peak_bytes, measured.held_bytes) == (2 * KIB, 4)


def test_what_is_stored_elsewhere_is_held():
    store = []
    measured = measure(lambda: store.append(torch.zeros(256)), device="cpu", repeats=2)
    assert measured.held_bytes == KIB
    assert len(store) == 3


def test_nothing_is_kept_without_the_garbage_collector():
    results = []

    def fn():
        x = torch.zeros(256)
        results.append(weakref.ref(x))
        assert all(result() is None for result in results[:-1])
        return x

    gc.disable()
    try:
        measure(fn, device="cpu", repeats=2)
        assert [result() for result in results] == [None] * 3
    finally:
        gc.enable()


def test_times_are_of_calls_without_the_tracker():
    depths = []

    def fn():
        depths.append(torch._C._len_torch_dispatch_stack())
        time.sleep(0.02)

    measured = measure(fn, device="cpu", repeats=2)
    assert depths == [1, 0, 0]
    assert measured.seconds >= 0.02 > measured.cpu_seconds


def test_without_repeats_there_are_no_times():
    measured = measure(lambda: None, device="cpu", repeats=0)
    assert measured == Measurement(0, 0, None, None, "cpu")
    assert str(measured) == "peak 0 B, held 0 B on cpu"


def test_printed():
    measured = Measurement(3 * 2**20, 512, 0.00125, 0.002, "cpu")
    assert str(measured) == "peak 3 MiB, held 512 B, 1.25 ms, CPU 2 ms on cpu"


def test_an_exception_passes_through_and_leaves_no_mode():
    def fn():
        torch.zeros(3) + 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(fn, device="cpu")
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_default_device_is_the_one_in_use():
    expected = "cuda:0" if torch.cuda.is_initialized() else "cpu"
    assert measure(lambda: None, repeats=0).device == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "meta"}, '`device` is "meta", but only "cpu" and CUDA'),
        ({"device": "gpu"}, '`device` is "gpu", which torch does not know'),
        ({"repeats": -1}, "`repeats` is -1, but must be at least 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(lambda: None, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device():
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        measure(lambda: None, device="cuda")


@pytest.mark.cuda
def test_bytes_on_cuda():
    x = torch.zeros(2**18, device="cuda", requires_grad=True)  # 1 MiB
    measured = measure(lambda: ((x + 1) * 2).exp(), device="cuda")
    assert (measured.peak_bytes, measured.held_bytes) == (2 * 2**20, 2**20)
    assert measured.device == "cuda:0"
    assert measure(lambda: None, repeats=0).device == "cuda:0"
