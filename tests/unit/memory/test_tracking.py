"""The tracker of storages: bytes alive after each of some operators, and no trace of the look."""

from __future__ import annotations

import weakref

import pytest
import torch

from recoup._core.storage_tracking import StorageTracker
from tests.alive import no_collector

KIB = 1024


def kib(num_kib=1):
    return torch.zeros(256 * num_kib)


@pytest.fixture(autouse=True)
def without_garbage_collection():
    with no_collector():
        yield


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


def another_device(before):
    away = torch.zeros(256, device="meta")
    yield 0
    eye = torch.eye(16).to_sparse()  # 16 entries, and two indices of each
    yield (16 * 4 + 2 * 16 * 8) / KIB
    del away, eye


def a_transform(before):
    gradients = TRANSFORM(before.view(32, 32))
    yield 4
    del gradients


TRANSFORM = torch.func.vmap(torch.func.grad(lambda row: (row * row).sum()))
MOMENTS = [views, of_what_was_there, addresses_that_are_used_again, resized_by_an_operator,
           resized_behind_the_operators_back, another_device, a_transform]  # fmt: skip


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_storage_counts_from_its_operator_to_its_last_reference(moments):
    TRANSFORM(torch.zeros(2, 2))  # torch imports what it needs for it, with tensors of its own
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


def test_nothing_stays_behind_after_an_exception():
    def fail(gradient):
        raise KeyError("backward")

    x = kib().requires_grad_()
    x.register_hook(fail)
    for call in (lambda: x @ torch.zeros(3), lambda: x.exp().sum().backward()):
        tracker = StorageTracker()
        with pytest.raises((KeyError, RuntimeError)), tracker:
            call()
        assert torch._C._len_torch_dispatch_stack() == 0
        peak_bytes = tracker.peak_bytes
        kib(64)
        assert tracker.peak_bytes == peak_bytes
