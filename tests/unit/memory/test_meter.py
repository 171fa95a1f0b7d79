from __future__ import annotations

import gc
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from recoup._core import devices
from recoup._core.devices import Peaks
from recoup.memory import measure
from recoup.memory.meter import Measurement
from tests.alive import allocated_bytes

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


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


def lstm():
    return Recurrent(), torch.randn(8, 16, 32)


def depthwise():
    convs = [nn.Conv2d(3, 32, 7, padding=3), nn.Conv2d(32, 32, 7, groups=32, padding=3)]
    return nn.Sequential(*convs), torch.randn(4, 3, 32, 32)


def training_step(build):
    torch.manual_seed(0)
    module, x = build()

    def step():
        module.zero_grad(set_to_none=True)
        module(x).square().mean().backward()

    return module, step


@pytest.mark.parametrize("build", [mlp, conv_net, checkpointed, transformer, lstm, depthwise])
def test_is_what_the_allocator_reports(build):
    """F6: kernels that allocate for a moment count, and so do random states."""
    module, step = training_step(build)
    peak_bytes, held_bytes = allocated_bytes(step)
    module.zero_grad(set_to_none=True)
    measured = measure(step, device="cpu", repeats=0)
    assert (measured.peak_bytes, measured.held_bytes) == (peak_bytes, held_bytes)


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
    # The numbers 1 and 2 become tensors of 8 bytes for a moment.
    assert (measured.peak_bytes, measured.held_bytes) == (2 * KIB + 12, 4)


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


def test_times_are_of_calls_that_are_not_followed():
    followed = []

    def fn():
        followed.append(torch.autograd._profiler_enabled())
        time.sleep(0.02)

    measured = measure(fn, device="cpu", repeats=2)
    assert followed == [True, False, False]
    assert measured.seconds >= 0.02 > measured.cpu_seconds


def test_without_repeats_there_are_no_times():
    measured = measure(lambda: None, device="cpu", repeats=0)
    assert measured == Measurement(0, 0, None, None, "cpu", Peaks(0, 0))
    assert str(measured) == "peak 0 B, held 0 B on cpu"


def test_printed():
    mib = 2**20
    measured = Measurement(3 * mib, 512, 0.00125, 0.002, "cpu", Peaks(3 * mib, 3 * mib))
    assert str(measured) == "peak 3 MiB, held 512 B, 1.25 ms, CPU 2 ms on cpu"
    measured = Measurement(3 * mib, 0, None, None, "cuda:0", Peaks(2 * mib, 3 * mib, 20 * mib))
    peak = "peak 3 MiB (requested 2 MiB, reserved 20 MiB)"
    assert str(measured) == f"{peak}, held 0 B on cuda:0"


def test_an_exception_passes_through_and_leaves_no_profiler():
    def fn():
        torch.zeros(3) + 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(fn, device="cpu")
    assert not torch.autograd._profiler_enabled()
    assert measure(lambda: torch.zeros(256), device="cpu", repeats=0).held_bytes == KIB


def test_a_profiler_afterwards_sees_its_own_operators_alone(capfd):
    measure(lambda: torch.zeros(256), device="cpu", repeats=0)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.ones(3)
    assert [e.name for e in profiler.events()].count("aten::ones") == 1
    assert "Exception" not in capfd.readouterr().err


def test_within_a_profiler_storages_are_followed_and_that_is_said():
    """F6: a thread has one profiler; what is counted without it is said."""
    module, step = training_step(lstm)
    whole = measure(step, device="cpu", repeats=0)
    module.zero_grad(set_to_none=True)
    with (
        profile(activities=[ProfilerActivity.CPU], acc_events=True),
        pytest.warns(UserWarning, match="What kernels allocate for a moment is left out"),
    ):
        measured = measure(step, device="cpu", repeats=0)
    assert measured.held_bytes == whole.held_bytes
    assert 0.6 * whole.peak_bytes < measured.peak_bytes < whole.peak_bytes


def test_measurements_within_one_another_and_within_backward():
    inner = []

    def fn():
        y = torch.zeros(512)
        inner.append(measure(lambda: torch.zeros(256), device="cpu", repeats=0))
        return y.exp()

    measured = measure(fn, device="cpu", repeats=0)
    assert (measured.peak_bytes, measured.held_bytes) == (4 * KIB, 2 * KIB)
    assert (inner[0].peak_bytes, inner[0].held_bytes) == (KIB, KIB)

    x = torch.zeros(256, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda _: inner.append(measure(lambda: x.cos(), device="cpu", repeats=0)))
    y.sum().backward()
    assert inner[1].peak_bytes == inner[1].held_bytes == KIB
    assert not torch.autograd._profiler_enabled()


def test_what_was_alive_before_is_not_subtracted():
    x = torch.zeros(256, requires_grad=True)

    def step():
        x.grad = None
        x.exp().sum().backward()

    step()
    peaks = {measure(step, device="cpu", repeats=0).peak_bytes for _ in range(3)}
    assert peaks == {2 * KIB + 8}


def test_the_default_device_is_the_one_in_use():
    expected = "cuda:0" if torch.cuda.is_initialized() else "cpu"
    assert measure(lambda: None, repeats=0).device == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "meta"}, '`device` is "meta", but torch finds no such device here'),
        ({"device": "gpu"}, '`device` is "gpu", which torch does not know'),
        ({"repeats": -1}, "`repeats` is -1, but must be a whole number, at least 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(lambda: None, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device():
    with pytest.raises(ValueError, match="torch finds no such device here"):
        measure(lambda: None, device="cuda")


def test_a_device_that_tells_its_allocated_bytes_alone(monkeypatch):
    told = {"memory_allocated": 5, "max_memory_allocated": 7, "reset_peak_memory_stats": None}
    module = SimpleNamespace(**{name: lambda _, value=value: value for name, value in told.items()})
    monkeypatch.setattr(devices, "_module_of", lambda _: module)
    counts = devices.memory_counts(torch.device("cuda"))
    assert counts == devices.MemoryCounts(5, 5, Peaks(7, 7), 0)


@pytest.mark.cuda
def test_bytes_on_cuda():
    x = torch.zeros(2**18, device="cuda", requires_grad=True)  # 1 MiB
    measured = measure(lambda: ((x + 1) * 2).exp(), device="cuda")
    assert (measured.peak_bytes, measured.held_bytes) == (2 * 2**20, 2**20)
    assert measured.device == "cuda:0"
    assert measure(lambda: None, repeats=0).device == "cuda:0"
