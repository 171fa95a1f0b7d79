"""`recoup.offloading`: the plain gradients, and residuals that are not in memory."""

from __future__ import annotations

import errno
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import recoup
from recoup._core import tiers
from recoup._core.saved_tensors import pair_in_force
from recoup.errors import OffloadError, RecoupError

SIZE = 64 * 64 * 4
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def net(num_layers=4):
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.BatchNorm1d(64, momentum=1.0))


def made(make=net):
    torch.manual_seed(0)
    return make(), torch.randn(64, 64).requires_grad_()


def step(model, x, around):
    torch.manual_seed(1)
    with around:
        loss = model(x).square().sum()
    with ThreadPoolExecutor() as another:
        grads = another.submit(torch.autograd.grad, loss, [x, *model.parameters()]).result()
    statistics = [each.clone() for each in model.buffers() if each.is_floating_point()]
    return [loss.detach(), *grads, *statistics, torch.get_rng_state()]


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    assert not list(tmp_path.iterdir()), "a file has a name"
    gc.collect()
    threads = [each for each in threading.enumerate() if each.name.startswith("recoup-offload")]
    for each in threads:
        each.join(5)
    assert not any(each.is_alive() for each in threads)


@pytest.fixture
def sent(monkeypatch):
    """The bytes of each storage that is written to a folder."""
    found, send = [], tiers.FolderTier.send
    note = lambda tier, tensor: found.append(tensor.numel()) or send(tier, tensor)  # noqa: E731
    monkeypatch.setattr(tiers.FolderTier, "send", note)
    return found


def test_what_is_held_and_the_peak(folder):
    model, x = made(lambda: net(20))

    def forward(around):
        with around:
            return model(x)

    def held(*args, **options):
        run = lambda: forward(recoup.offloading(*args, **options))  # noqa: E731
        return recoup.measure(run, repeats=0).held_bytes

    plain = recoup.measure(lambda: model(x), repeats=0).held_bytes
    assert plain >= 40 * SIZE
    # The output, those in flight, and what one operator makes.
    assert held(SIZE, folder) <= 5 * SIZE
    assert held(SIZE, folder, in_flight_bytes=8 * SIZE) <= 11 * SIZE
    assert held(SIZE + 1, folder) == held() == plain  # "host" is where it is already
    run = lambda: step(model, x, recoup.offloading(SIZE, folder))  # noqa: E731
    gradients = sum(p.numel() * 4 for p in model.parameters())
    assert recoup.measure(run, repeats=0).peak_bytes - gradients <= 12 * SIZE
    found = recoup.residuals(lambda: forward(recoup.offloading(SIZE, folder)))
    assert found.total_bytes("offload") >= 40 * SIZE
    assert found.total_bytes("keep") < 2 * SIZE  # the batch


def test_what_stays_is_seen_by_hooks_beneath(folder, sent):
    seen = []
    x = torch.randn(3, 64).requires_grad_()
    with saved_tensors_hooks(lambda tensor: seen.append(tensor.shape) or tensor, lambda x: x):
        with recoup.offloading(1, folder):
            y = nn.Linear(64, 64)(x * 1)
            z = torch.unsafe_chunk(x * 1, 2, 1)[0].sigmoid_()
        assert sent == [3 * 64 * 4]
        assert seen == [(64, 64), (3, 32)]  # parameters stay, and parts of a storage
        with recoup.offloading(3 * 64 * 4 + 1, folder):
            y = nn.Linear(64, 64)(x * y * z.mean())
    assert len(seen) > 6


class Assign(torch.autograd.Function):
    """A write to a part of a buffer past its version, as solvers of ODEs write their stages."""

    @staticmethod
    def forward(ctx, buffer, value, place):
        ctx.place = place
        buffer.data[place] = value
        return buffer

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[ctx.place], None


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_buffer_that_is_filled_past_its_version(folder, sent, is_whole):
    x = torch.randn(64, 64).requires_grad_()

    def loss():
        buffer, y = torch.zeros(4, 64, 64), x
        for place in range(4):
            buffer = Assign.apply(buffer, y.sin(), place)
            part = buffer if is_whole else buffer[: place + 1]
            y = (part * part.tanh()).sum(0)
        return y.square().sum()

    (wanted,) = torch.autograd.grad(loss(), x)
    with recoup.offloading(1, folder):
        found = loss()
    assert_equal(torch.autograd.grad(found, x)[0], wanted)
    assert sent.count(4 * SIZE) == (5 if is_whole else 2)  # the buffer, and what tanh returns


def test_a_full_disk(folder, monkeypatch):
    num_written, write = [], os.pwritev

    def full(file, parts, place):
        num_written.append(1)
        if len(num_written) > 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, [parts[0][:5000]], place)  # and it writes a part at a time

    monkeypatch.setattr(os, "pwritev", full)
    model, x = made()
    model.eval()
    message = f"written to {folder}: .*No space left on device.*`min_bytes`"
    with pytest.raises(OffloadError, match=message), recoup.offloading(1, folder):
        loss = model(x).sum()
    assert_equal(torch.autograd.grad(loss, x), torch.autograd.grad(model(x).sum(), x))


def test_nothing_is_left(folder):
    def loss(x):
        with recoup.offloading(1, folder):
            return (x.sin() @ torch.ones(3)).sum()

    with pytest.raises(RuntimeError, match="size"):
        loss(torch.ones(4, 4, requires_grad=True))
    assert pair_in_force() is None
    with torch.no_grad(), recoup.offloading(1, folder):
        assert pair_in_force() is None
    with pytest.raises(RecoupError, match=r"torch\.func"):
        torch.func.grad(loss)(torch.ones(3))
