"""Bytes and times: measure, as the allocator has them, the tracker of storages, sizes as text."""

from __future__ import annotations

import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from recoup._core.devices import Peaks
from recoup._core.storage_tracking import StorageTracker
from recoup.memory import format_bytes, measure, parse_bytes
from recoup.memory.meter import Measurement
from tests.alive import allocated_bytes, no_collector
from tests.zoo import Fn, conv_norm

KIB = 1024


def bytes_of(fn):
    measured = measure(fn, device="cpu", repeats=0)
    return measured.peak_bytes, measured.held_bytes


MODELS = {
    "conv net": (lambda: nn.Sequential(*[conv_norm()] * 8), (16, 3, 16, 16)),
    "transformer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (8, 32, 32)),
    "lstm": (lambda: Fn(lambda x, lstm: lstm(x)[0], nn.LSTM(32, 32)), (8, 16, 32)),
}


def training_step(name):
    build, size = MODELS[name]
    module, x = build(), torch.randn(size)
    return module, lambda: module(x).square().mean().backward()


@pytest.mark.parametrize("name", MODELS)
def test_is_what_the_allocator_reports(name):
    module, step = training_step(name)
    expected = allocated_bytes(step)
    module.zero_grad()
    assert bytes_of(step) == expected


def step_again(x):
    x.grad = None
    x.exp().sum().backward()


STORE = []
BYTES = {  # peak and held, by hand
    "exp keeps its output, and sin that, too": (lambda x: x.exp().sin(), 2 * KIB, 2 * KIB),
    "what sin returned is gone": (lambda x: x.exp().sin().exp().cos(), 3 * KIB, 3 * KIB),
    # The numbers 1 and 2 become tensors of 8 bytes for a moment.
    "temporaries": (lambda x: ((x.detach() + 1) * 2).sum(), 2 * KIB + 12, 4),
    "elsewhere": (lambda x: STORE.append(x.detach().clone()), KIB, KIB),
    "what was alive before is not subtracted": (step_again, 2 * KIB + 8, None),
}


@pytest.mark.parametrize("name", BYTES)
def test_peak_and_held_bytes(name):
    fn, *expected = BYTES[name]
    x = torch.zeros(256, requires_grad=True)
    x.grad = torch.zeros(256)
    for _ in range(3):
        found = bytes_of(lambda: fn(x))
        assert all(want in (number, None) for number, want in zip(found, expected, strict=True))


def test_measurements_within_one_another_and_within_backward():
    inner = []

    def fn():
        y = torch.zeros(512)
        inner.append(bytes_of(lambda: torch.zeros(256)))
        return y.exp()

    assert bytes_of(fn) == (4 * KIB, 2 * KIB)
    x = torch.zeros(256, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda _: inner.append(bytes_of(lambda: x.cos())))
    y.sum().backward()
    assert inner == [(KIB, KIB)] * 2
    assert not torch.autograd._profiler_enabled()


def test_within_a_profiler_storages_are_followed_and_that_is_said():
    module, step = training_step("lstm")
    peak_bytes, held_bytes = bytes_of(step)
    module.zero_grad()
    with (
        profile(activities=[ProfilerActivity.CPU], acc_events=True),
        pytest.warns(UserWarning, match="What kernels allocate for a moment is left out"),
    ):
        found = bytes_of(step)
    assert found[1] == held_bytes
    assert 0.6 * peak_bytes < found[0] < peak_bytes


def test_nothing_is_kept_without_the_garbage_collector():
    results = []

    def fn():
        x = torch.zeros(256)
        assert all(result() is None for result in results)
        results.append(weakref.ref(x))
        return x

    with no_collector():
        measure(fn, device="cpu", repeats=2)
        assert [result() for result in results] == [None] * 3


def test_times_are_of_calls_that_are_not_followed():
    followed = []

    def fn():
        followed.append(torch.autograd._profiler_enabled())
        time.sleep(0.02)

    assert measure(fn, device="cpu", repeats=2).seconds >= 0.02
    assert followed == [True, False, False]
    device = "cuda:0" if torch.cuda.is_initialized() else "cpu"  # the one in use
    assert measure(lambda: None, repeats=0).device == device
    measured = measure(lambda: None, device="cpu", repeats=0)
    assert measured == Measurement(0, 0, None, "cpu", Peaks(0, 0))


def test_an_exception_passes_through_and_leaves_no_profiler(capfd):
    def fn():
        torch.zeros(3) + 1
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(fn, device="cpu")
    assert not torch.autograd._profiler_enabled()
    assert bytes_of(lambda: torch.zeros(256)) == (KIB, KIB)
    assert "Exception" not in capfd.readouterr().err


def test_printed():
    mib = 2**20
    timed = Measurement(3 * mib, 512, 0.00125, "cpu", Peaks(3 * mib, 3 * mib))
    assert str(timed) == "peak 3 MiB, held 512 B, 1.25 ms on cpu"
    far = Measurement(3 * mib, 0, None, "cuda:0", Peaks(2 * mib, 3 * mib, 20 * mib))
    assert str(far) == "peak 3 MiB (requested 2 MiB, reserved 20 MiB), held 0 B on cuda:0"


@pytest.mark.cuda
def test_bytes_on_cuda():
    x = torch.zeros(2**18, device="cuda", requires_grad=True)  # 1 MiB
    measured = measure(lambda: ((x + 1) * 2).exp(), device="cuda")
    assert (measured.peak_bytes, measured.held_bytes) == (2 * 2**20, 2**20)
    assert measured.device == "cuda:0"
    assert measure(lambda: None, repeats=0).device == "cuda:0"


def test_bytes_as_text():
    given = 0, "17 B", "1.5 GiB", "  2GB ", "1 kb", ".5 KiB", "3. KiB", "1.0001 KiB"
    wanted = 0, 17, 3 * 2**29, 2_000_000_000, 1000, 512, 3072, 1024
    assert tuple(map(parse_bytes, given)) == wanted
    assert parse_bytes("0.1 GB") == 10**8  # exact, though 0.1 is no binary fraction


@pytest.mark.parametrize(("call", "words"), [
    (partial(measure, torch.seed, device="meta"), '`device` is "meta", but torch finds no such'),
    (partial(measure, torch.seed, device="gpu"), '`device` is "gpu", which torch does not know'),
    (partial(measure, torch.seed, repeats=-1), "`repeats` is -1, but must be a whole"),
    *((partial(parse_bytes, value), r'`value` is .*such as "1.5 GiB"')
      for value in ("", "GiB", "-1 KiB", "1 XB", "1,5 GiB", "1 2", "1_0", -1, True, 1.5, None)),
])  # fmt: skip
def test_wrong_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call()
    for num_bytes in (1, 10**5, 2**50 - 7, 2**68):
        assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=5e-4)
    given = 0, 1023, 1024, 2**20 - 1, -1536, 123_456_789
    wanted = "0 B", "1023 B", "1 KiB", "1 MiB", "-1.5 KiB", "117.7 MiB"
    assert tuple(map(format_bytes, given)) == wanted


def kib(num_kib=1):
    return torch.zeros(256 * num_kib)


def views(before):
    whole = kib(4)
    part, row = whole[:10], whole.view(4, 256)
    yield 4
    del whole, row
    yield 4
    del part
    yield 0


def of_what_was_there(before):
    kept = [before.view(2, -1), before.detach(), before[::2], before.add_(1)]
    yield 0
    kept.append(before + 1)
    yield 4


def addresses_that_are_used_again(before):
    for num_kib in range(1, 200):
        x = kib(num_kib)
        yield num_kib
        del x
        yield 0


def resized_by_an_operator(before):
    x = kib(1)
    x.resize_(256 * 3)
    yield 3
    before.resize_(256 * 6)  # was there, and grows by 2 KiB
    yield 5


def resized_behind_the_operators_back(before):
    x = kib(4)
    yield 4
    x.untyped_storage().resize_(KIB)
    x[:1] + 1
    yield 1


MOMENTS = [views, of_what_was_there, addresses_that_are_used_again, resized_by_an_operator,
           resized_behind_the_operators_back]  # fmt: skip


@no_collector()
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_storage_counts_from_its_operator_to_its_last_reference(moments):
    before, most = kib(4), 0
    with StorageTracker("cpu") as tracker:
        for num_kib in moments(before):
            assert tracker.current_bytes == num_kib * KIB
            most = max(most, num_kib * KIB)
            with StorageTracker() as within:
                kib(1)
            assert (within.current_bytes, within.peak_bytes) == (0, KIB)
    assert tracker.peak_bytes >= most
    del before
    assert tracker.current_bytes == 0


@no_collector()
def test_after_the_context_only_what_is_freed_counts():
    with StorageTracker() as tracker:
        x, y = kib(2), kib(2)
        y.untyped_storage().resize_(0)  # seen at the end
    kib(64)
    assert (tracker.current_bytes, tracker.peak_bytes) == (2 * KIB, 4 * KIB)
    alive, owner = weakref.ref(x), weakref.ref(tracker)
    del x
    assert tracker.current_bytes == 0
    del tracker
    assert alive() is owner() is None
