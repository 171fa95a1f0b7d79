from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from recoup._core.storage_tracking import StorageTracker

KIB = 1024


def kib(num_kib=1):
    return torch.zeros(256 * num_kib)


@pytest.fixture(autouse=True)
def no_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_storage_counts_until_its_last_view_is_gone():
    with StorageTracker() as tracker:
        whole = kib(4)
        part = whole[:10]
        row = whole.view(4, 256)
        assert tracker.current_bytes == 4 * KIB
        del whole, row
        assert tracker.current_bytes == 4 * KIB
        del part
        assert tracker.current_bytes == 0
    assert tracker.peak_bytes == 4 * KIB


def test_what_was_there_before_does_not_count():
    before = kib(4)
    with StorageTracker() as tracker:
        views = [before.view(2, -1), before.detach(), before[::2], before.add_(1)]
        assert tracker.peak_bytes == 0
        views.append(before + 1)
        assert tracker.current_bytes == 4 * KIB


def test_freed_after_the_context_ends():
    with StorageTracker() as tracker:
        x = kib(2)
    kib(64)  # No longer counted.
    assert (tracker.current_bytes, tracker.peak_bytes) == (2 * KIB, 2 * KIB)
    del x
    assert tracker.current_bytes == 0


def test_nothing_is_kept_alive():
    with StorageTracker() as tracker:
        x = kib()
        alive = weakref.ref(x)
        del x
        assert alive() is None
    owner = weakref.ref(tracker)
    del tracker
    assert owner() is None


def test_a_reused_address_is_a_new_storage():
    with StorageTracker() as tracker:
        for num_kib in range(1, 200):
            x = kib(num_kib)
            assert tracker.current_bytes == num_kib * KIB
            del x
            assert tracker.current_bytes == 0
    assert tracker.peak_bytes == 199 * KIB


def test_resized_by_an_operator():
    before = kib(1)
    with StorageTracker() as tracker:
        x = kib(1)
        x.resize_(256 * 3)
        assert tracker.current_bytes == 3 * KIB
        before.resize_(256 * 3)  # Was there, and grows by 2 KiB.
        assert tracker.current_bytes == 5 * KIB
    del before
    assert tracker.current_bytes == 3 * KIB


def test_resized_behind_the_operators_back():
    with StorageTracker() as tracker:
        x = kib(4)
        y = kib(2)
        x.untyped_storage().resize_(KIB)
        x[:1] + 1
        assert tracker.current_bytes == 3 * KIB
        y.untyped_storage().resize_(0)
    assert tracker.current_bytes == KIB


def test_tensors_made_from_python_values_count():
    with StorageTracker() as tracker:
        x = torch.tensor([1.0, 2.0])
        assert tracker.current_bytes == 8
        del x
        assert tracker.current_bytes == 0


def test_operators_on_lists_of_tensors():
    with StorageTracker() as tracker:
        parts = torch.split(kib(4), 256)
        sums = torch._foreach_add(list(parts), 1.0)
        assert tracker.current_bytes == 8 * KIB
        torch._foreach_add_(sums, parts)
        assert tracker.current_bytes == 8 * KIB


def test_backward_is_seen_and_leaves_the_gradients():
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(8, 64)
    with StorageTracker() as tracker:
        loss = net(x).sum()
        forward_peak = tracker.peak_bytes
        loss.backward()
        del loss
        peak = tracker.peak_bytes
    assert peak > forward_peak
    assert tracker.current_bytes == sum(parameter.nbytes for parameter in net.parameters())


def test_hooks_of_others_work_within_and_around():
    x = kib().requires_grad_()
    packed = []
    with (
        saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t),
        StorageTracker() as tracker,
    ):
        y = x.exp()  # The output and the copy of it that the hook made.
        assert tracker.current_bytes == 2 * KIB
        y.sum().backward()
    assert packed == [(256,)]
    torch.testing.assert_close(x.grad, torch.ones(256))


def test_each_of_two_nested_trackers_counts():
    with StorageTracker() as outer:
        first = kib(1)
        with StorageTracker() as inner:
            second = kib(2)
        assert (outer.current_bytes, inner.current_bytes) == (3 * KIB, 2 * KIB)
        del first, second
        assert (outer.current_bytes, inner.current_bytes) == (0, 0)


def test_another_device_is_left_out():
    with StorageTracker("cpu") as tracker:
        torch.zeros(256, device="meta")
        sparse = torch.eye(2).to_sparse()
    del sparse
    assert tracker.peak_bytes < KIB


def test_function_transforms():
    x = torch.ones(8, 8)
    transformed = torch.func.vmap(torch.func.grad(lambda row: (row * row).sum()))
    transformed(x)  # torch imports what it needs for them, with tensors of its own
    with StorageTracker() as tracker:
        gradients = transformed(x)
    assert tracker.current_bytes == gradients.nbytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["python", "operator", "backward"])
def test_nothing_stays_behind_after_an_exception(where):
    def fail(gradient):
        raise KeyError("backward")

    def call():
        if where == "python":
            raise KeyError("python")
        x = kib().requires_grad_()
        if where == "operator":
            x @ torch.zeros(3)
        x.register_hook(fail)
        x.exp().sum().backward()

    tracker = StorageTracker()
    with pytest.raises((KeyError, RuntimeError)), tracker:
        call()
    assert torch._C._len_torch_dispatch_stack() == 0
    peak_bytes = tracker.peak_bytes
    kib(64)
    assert tracker.peak_bytes == peak_bytes
