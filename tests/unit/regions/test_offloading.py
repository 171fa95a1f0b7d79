"""`recoup.offloading`: what waits elsewhere, when it is copied and read, and what is in flight."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import recoup
from recoup._core import offload
from recoup._core.offload import Traffic
from recoup._core.saved_tensors import Kept, unpack
from recoup.errors import ChangedError, OffloadError, RecoupError
from recoup.schedules import Advance, Drop, Load, Offload, Reverse, Schedule, Tape

SIZE = 64 * 64 * 4
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


class LateTier:
    """A tier whose copies are made when it is made to wait for them, or at a random moment."""

    def __init__(self, seed=0, odds=0.3):
        self.draw, self.odds, self.alive = random.Random(seed), odds, weakref.WeakSet()
        self.peak_bytes = self.num_sent = self.num_read = self.largest = 0

    def takes(self, tensor):
        return True

    def send(self, tensor):
        self.num_sent += 1
        self.largest = max(self.largest, tensor.numel())
        return Late(self, tensor)

    def pass_time(self):
        """Count what is in flight, then let some copies be made, in any order."""
        in_flight = sum(each.source.numel() for each in self.alive if each.source is not None)
        self.peak_bytes = max(self.peak_bytes, in_flight)
        for each in sorted(self.alive, key=lambda _: self.draw.random()):
            if self.draw.random() < self.odds:
                each.land()


class Late:
    """A copy, or an arrival, which has wrong numbers until it is waited for."""

    def __init__(self, tier, source, is_arrival=False):
        self.tier, self.source, self.is_arrival = tier, source, is_arrival
        self.held = torch.full_like(source, 0xFF)  # bytes of a NaN
        tier.alive.add(self)
        tier.pass_time()

    def has_landed(self):
        self.tier.pass_time()
        return self.source is None

    def land(self):
        if self.source is not None:
            self.held.copy_(self.source)
            self.source = self.source if self.is_arrival else None

    def fetch(self):
        assert self.source is None, "it is fetched before it has landed"
        self.tier.num_read += 1
        return Late(self.tier, self.held, is_arrival=True)

    def __call__(self):
        self.land()
        self.source = None
        return self.held


def away(traffic):
    def pack(tensor):
        return traffic.send(tensor, "it", at_save=True) or Kept(tensor, "it", None)

    return saved_tensors_hooks(pack, unpack)


def net_of_all_kinds():
    return nn.Sequential(
        nn.Linear(8, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 12), nn.Dropout(0.5),
        nn.RReLU(), nn.Softmax(-1), nn.Linear(12, 9), nn.Tanh(), nn.Unflatten(1, (3, 3)),
        nn.MaxPool1d(2), nn.RReLU(),
    )  # fmt: skip


def steps(model, around):
    torch.manual_seed(1)
    x = torch.randn(5, 8).requires_grad_()
    leaves = [x, *model.parameters()]
    with around:
        loss = model(x).square().sum()
        once = torch.autograd.grad(loss, leaves, retain_graph=True)
        twice = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in twice), leaves)
    return [*once, *(each.detach() for each in twice), *second]


@pytest.mark.parametrize("bound", [1, 300, 100_000, None])
def test_copies_that_are_late_in_any_order(bound):
    model = net_of_all_kinds()
    wanted = steps(model, torch.enable_grad())
    for seed, odds in enumerate((0.3, 1.0)):
        tier = LateTier(seed, odds)
        assert_equal(steps(model, away(Traffic(tier, bound))), wanted)
        assert min(tier.num_sent, tier.num_read) > 5
        # A storage that is larger than the bound moves alone; and the one that is asked for.
        most = 2 * tier.largest if bound is None else max(tier.largest, bound)
        assert 0 < tier.peak_bytes <= most + tier.largest
        assert not tier.alive


def test_a_storage_moves_once():
    def loss_of(x):
        y = x.exp()
        a, b = y.chunk(2)
        return (a.sin() * b.cos() * y.t()[0, 0]).sum() + y.square().sum() + 0 * a.sum().exp()

    tier, x = LateTier(), torch.randn(6, 4, requires_grad=True)
    with away(traffic := Traffic(tier)):
        loss = loss_of(x)
    traffic.raise_failure("")
    assert_equal(torch.autograd.grad(loss, x), torch.autograd.grad(loss_of(x), x))
    assert tier.num_sent == 5  # y, the sine, the cosine, their product, and the last exponential


def test_backward_finds_the_next_ones_on_their_way(monkeypatch):
    tier, asked, wait = LateTier(odds=1.0), [], Late.__call__
    monkeypatch.setattr(Late, "__call__", lambda late: asked.append(tier.num_read) or wait(late))
    y = x = torch.randn(4, 4, requires_grad=True)
    with away(Traffic(tier, in_flight_bytes=3 * 64)):
        for _ in range(8):
            y = y.sin()
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    # The input of the first is a leaf, and the last two are still here. Two are under way beside
    # the one that is waited for.
    assert asked == [3, 4, 5, 5, 5]


def test_what_is_changed_in_place_before_it_has_left():
    x = torch.randn(4, requires_grad=True)
    for num_before in range(3):
        with away(Traffic(LateTier(odds=0), in_flight_bytes=1)):
            y = x * 1
            z = y.sin()
            for _ in range(num_before):
                z = z.exp()
            y.mul_(2)
            z = z.exp().exp()
        with pytest.raises(ChangedError, match=r"it was changed in place .* copy had been made"):
            z.sum().backward()


@pytest.mark.parametrize("to", ["host", "folder"])
def test_a_schedule_that_offloads(to, tmp_path):
    to = to if to == "host" else str(tmp_path)
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)]
    chain = recoup.Sequential(*stages, memory=Schedule(4, (
        Offload(0, to), Advance(0, 2), Offload(2, to), Advance(2, 3), Tape(3), Reverse(3),
        Load(2), Drop(2), Tape(2), Reverse(2),
        Load(0), Advance(0, 1), Offload(1, to), Load(1), Drop(1), Tape(1), Reverse(1),
        Load(0), Drop(0), Tape(0), Reverse(0),
    )))  # fmt: skip
    wanted, seen = steps(nn.Sequential(*stages), torch.enable_grad()), []
    assert_equal(steps(chain, torch.enable_grad()), wanted)
    assert not list(tmp_path.iterdir())
    look = saved_tensors_hooks(lambda x: seen.append(x.shape) or x.clone(), lambda x: x)
    assert_equal(steps(chain, look), wanted)
    assert seen.count((5, 8)) >= (2 if to == "host" else 1)  # what stays goes to the pair beneath


def made(num_layers=4):
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout(0.1)), torch.randn(64, 64).requires_grad_()


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    assert not list(tmp_path.iterdir()), "a file has a name"
    gc.collect()
    threads = [each for each in threading.enumerate() if each.name.startswith("recoup-offload")]
    for each in threads:
        each.join(5)
    assert not any(each.is_alive() for each in threads)


def test_what_is_held_and_the_peak(folder):
    model, x = made(20)

    def forward(*args, **options):
        with recoup.offloading(*args, **options):
            return model(x)

    def held(*args, **options):
        return recoup.measure(lambda: forward(*args, **options), repeats=0).held_bytes

    plain = recoup.measure(lambda: model(x), repeats=0).held_bytes
    assert plain >= 40 * SIZE
    # The output, those in flight, and what one operator makes.
    assert held(SIZE, folder) <= 5 * SIZE
    assert held(SIZE, folder, in_flight_bytes=8 * SIZE) <= 11 * SIZE
    assert held(SIZE + 1, folder) == held() == plain  # "host" is where it is already

    def step():
        loss = forward(SIZE, folder).square().sum()
        with ThreadPoolExecutor() as another:
            another.submit(loss.backward).result()

    gradients = sum(p.numel() * 4 for p in model.parameters())
    assert recoup.measure(step, repeats=0).peak_bytes - gradients <= 12 * SIZE
    found = recoup.residuals(lambda: forward(SIZE, folder))
    assert found.total_bytes("offload") >= 40 * SIZE
    assert found.total_bytes("keep") < 2 * SIZE  # the batch


def test_what_stays_is_seen_by_hooks_beneath(folder, monkeypatch):
    sent, send = [], offload.FolderTier.send
    note = lambda tier, tensor: sent.append(tensor.numel()) or send(tier, tensor)  # noqa: E731
    monkeypatch.setattr(offload.FolderTier, "send", note)
    seen, x = [], torch.randn(3, 64).requires_grad_()
    with saved_tensors_hooks(lambda tensor: seen.append(tensor.shape) or tensor, lambda x: x):
        with recoup.offloading(1, folder):
            y = nn.Linear(64, 64)(x * 1)
            z = torch.unsafe_chunk(x * 1, 2, 1)[0].sigmoid_()
        assert sent == [3 * 64 * 4]
        assert seen == [(64, 64), (3, 32)]  # parameters stay, and parts of a storage
        with recoup.offloading(3 * 64 * 4 + 1, folder):
            (y * z.mean()).sin()
    assert len(seen) > 2
    assert len(sent) == 1


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


def test_transforms_of_torch_func_are_refused(folder):
    def loss(x):
        with recoup.offloading(1, folder):
            return x.sin().sum()

    with pytest.raises(RecoupError, match=r"torch\.func"):
        torch.func.grad(loss)(torch.ones(3))
