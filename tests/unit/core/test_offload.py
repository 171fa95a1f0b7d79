"""Tensors that wait elsewhere: what is copied, when it is read, and what is in flight."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import recoup
from recoup._core.offload import Traffic
from recoup._core.saved_tensors import unpack
from recoup.errors import ChangedError, OffloadError
from recoup.schedules import Advance, Drop, Keep, Load, Offload, Reverse, Schedule, Tape

NEVER_ARRIVED = 0xFF  # bytes of a NaN


class LateTier:
    """A tier whose copies are made when it is made to wait for them, or at a random moment.

    It reads a tensor no earlier than that, and gives wrong numbers to whoever does not wait.
    """

    def __init__(self, seed=0, most_bytes=None, fails_after=None):
        self.draw = random.Random(seed)
        self.copies, self.arrivals = weakref.WeakSet(), weakref.WeakSet()
        self.peak_bytes, self.num_sent, self.num_read = 0, 0, 0
        self.fails_after = fails_after

    def takes(self, tensor):
        return True

    def send(self, tensor):
        self.num_sent += 1
        copy = LateCopy(self, tensor)
        self.copies.add(copy)
        self.pass_time()
        return copy

    def pass_time(self):
        """Count what is in flight, then let some copies be made, in any order."""
        leaving = sum(copy.source.numel() for copy in self.copies if copy.source is not None)
        arriving = sum(arrival.tensor.numel() for arrival in self.arrivals if not arrival.is_taken)
        self.peak_bytes = max(self.peak_bytes, leaving + arriving)
        for each in sorted((*self.copies, *self.arrivals), key=lambda _: self.draw.random()):
            if self.draw.random() < 0.3:
                each.finish()


class LateCopy:
    def __init__(self, tier, tensor):
        self.tier, self.source, self.held = tier, tensor, None
        self.fails = tier.fails_after is not None and tier.num_sent > tier.fails_after

    def finish(self):
        if self.source is not None and not self.fails:
            self.held, self.source = self.source.clone(), None

    def has_landed(self):
        self.tier.pass_time()
        return self.source is None or self.fails

    def land(self):
        if self.fails:
            raise OSError(28, "No space left on device")
        self.finish()

    def fetch(self):
        assert self.held is not None, "it is fetched before it has landed"
        self.tier.num_read += 1
        arrival = LateArrival(self.held)
        self.tier.arrivals.add(arrival)
        self.tier.pass_time()
        return arrival


class LateArrival:
    def __init__(self, held):
        self.held, self.is_taken = held, False
        self.tensor = torch.full_like(held, NEVER_ARRIVED)

    def finish(self):
        self.tensor.copy_(self.held)

    def wait(self):
        self.finish()
        self.is_taken = True
        return self.tensor


def away(traffic):
    """Hooks that send all they can."""
    return saved_tensors_hooks(
        lambda tensor: traffic.send(tensor, "a tensor") or recoup._core.saved_tensors.Kept(
            tensor, "a tensor", None
        ),
        unpack,
    )  # fmt: skip


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 12), nn.Dropout(0.5),
        nn.Softmax(-1), nn.Linear(12, 9), nn.Tanh(), nn.Unflatten(1, (3, 3)), nn.MaxPool1d(2),
    )  # fmt: skip


def step(model, x, around=None):
    torch.manual_seed(1)
    if around is None:
        loss = model(x).square().sum()
    else:
        with around:
            loss = model(x).square().sum()
    leaves = [x, *model.parameters()]
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def assert_equal(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("seed", range(20))
def test_copies_that_are_late_in_any_order(seed):
    model, x = net(), torch.randn(5, 8).requires_grad_()
    tier = LateTier(seed)
    traffic = Traffic(tier, in_flight_bytes=1000)
    assert_equal(step(model, x, away(traffic)), step(model, x))
    assert tier.num_sent > 5
    assert tier.num_read > 2
    assert 0 < tier.peak_bytes <= 1000 + 240  # and the one that backward asks for
    gc.collect()
    assert not tier.copies
    assert not tier.arrivals


@pytest.mark.parametrize("bound", [1, 100, 300, 100_000, None])
def test_the_bound_on_bytes_in_flight(bound):
    model, x = net(), torch.randn(5, 8).requires_grad_()
    tier = LateTier(3)
    assert_equal(step(model, x, away(Traffic(tier, bound))), step(model, x))
    largest = 5 * 12 * 4  # a storage that is larger than the bound moves alone
    bound = 2 * largest if bound is None else max(largest, bound)
    assert tier.peak_bytes <= bound + largest  # and the one that backward asks for


def test_a_storage_moves_once():
    tier = LateTier()
    x = torch.randn(6, 4, requires_grad=True)
    with away(Traffic(tier)):
        y = x.exp()
        a, b = y.chunk(2)
        loss = (a.sin() * b.cos() * y.t()[0, 0]).sum() + y.square().sum()
    wanted = torch.autograd.grad(loss, x, retain_graph=True)
    num_sent = tier.num_sent
    assert_equal(torch.autograd.grad(loss, x), wanted)
    y = x.exp()
    a, b = y.chunk(2)
    loss = (a.sin() * b.cos() * y.t()[0, 0]).sum() + y.square().sum()
    assert_equal(wanted, torch.autograd.grad(loss, x))
    assert num_sent == 4  # y, the sine, the cosine, and their product


def test_backward_finds_the_next_ones_on_their_way(monkeypatch):
    class Recording(LateTier):
        """It notes what has been read when a tensor is waited for."""

        def pass_time(self):
            for copy in self.copies:
                copy.finish()

    tier = Recording()
    asked = []
    waits = LateArrival.wait

    def wait(arrival):
        asked.append(tier.num_read)
        return waits(arrival)

    monkeypatch.setattr(LateArrival, "wait", wait)
    x = torch.randn(4, 4, requires_grad=True)
    traffic = Traffic(tier, in_flight_bytes=3 * 64)
    with away(traffic):
        y = x
        for _ in range(8):
            y = y.sin()
    torch.autograd.grad(y.sum(), x)
    # The input of the first is a leaf, and that of the last is still here. Two are under way beside
    # the one that is waited for.
    assert asked == [3, 4, 5, 6, 6, 6]


@pytest.mark.parametrize("when", ["leaving", "landed"])
def test_what_is_changed_in_place(when):
    tier = LateTier()
    tier.draw.random = lambda: 1.0  # nothing lands by itself
    x = torch.randn(4, requires_grad=True)
    traffic = Traffic(tier, in_flight_bytes=1)
    with away(traffic):
        y = x * 1
        z = y.sin()
        if when == "landed":
            w = (z * 1).cos()
            assert traffic.in_flight_bytes == 16
            del w
    y.mul_(2)
    if when == "landed":  # the copy has the value of forward
        wanted = torch.autograd.grad((x * 1).sin().sum(), x)
        assert_equal(torch.autograd.grad(z.sum(), x), wanted)
    else:
        with pytest.raises(ChangedError, match="a tensor was changed in place between forward"):
            z.sum().backward()


def test_a_copy_that_may_have_either_value_is_an_error():
    tier = LateTier()
    tier.draw.random = lambda: 1.0
    x = torch.randn(4, requires_grad=True)
    with away(Traffic(tier, in_flight_bytes=1)):
        y = x * 1
        z = y.sin()
        y.mul_(2)
        w = (z * 1).cos()  # waits for the copy of y
    with pytest.raises(ChangedError, match="before its copy had been made"):
        w.sum().backward()


def test_what_cannot_be_copied_stays():
    model, x = net(), torch.randn(5, 8).requires_grad_()
    tier = LateTier(5, fails_after=4)
    traffic = Traffic(tier)
    assert_equal(step(model, x, away(traffic)), step(model, x))
    with pytest.raises(OffloadError, match=r"written to the moon: .*No space left.*`min_bytes`"):
        traffic.raise_failure("the moon")


def test_an_exception_in_forward_leaves_nothing():
    tier = LateTier(2)
    x = torch.randn(5, 8).requires_grad_()

    def forward():
        with away(Traffic(tier)):
            net()(x).sum().backward(torch.ones(7))

    with pytest.raises(RuntimeError):
        forward()
    assert not tier.copies
    assert not tier.arrivals


def test_what_arrived_and_was_not_asked_for():
    tier = LateTier(2)
    x, y = torch.randn(5, 5).requires_grad_(), torch.randn(5, 5).requires_grad_()
    with away(Traffic(tier)):
        a = (x * 1).sin().exp().cos()
        b = (y * 1).sin().exp().cos()
    wanted = [torch.autograd.grad(fn, leaf)[0] for fn, leaf in (
        ((x * 1).sin().exp().cos().sum(), x), ((y * 1).sin().exp().cos().sum(), y))]  # fmt: skip
    found = torch.autograd.grad(b.sum(), y, retain_graph=True)  # fetches some of a's
    assert not tier.arrivals
    assert_equal([*torch.autograd.grad(a.sum(), x), *found], wanted)
    assert_equal(torch.autograd.grad(b.sum(), y), found)


def test_a_second_backward():
    model, x = net(), torch.randn(5, 8).requires_grad_()
    torch.manual_seed(1)
    with away(Traffic(LateTier(4))):
        loss = model(x).square().sum()
    leaves = [x, *model.parameters()]
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert_equal(torch.autograd.grad(loss, leaves), once)


def test_double_backward():
    def second(around):
        x = torch.linspace(-1, 1, 12).requires_grad_()
        with around:
            y = (x * 1).sin().exp()
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = first.square().sum()
        return torch.autograd.grad(loss, x)

    assert_equal(second(away(Traffic(LateTier(1)))), second(torch.enable_grad()))


# -- schedules -------------------------------------------------------------------------------------

ACTIONS = (
    Offload(0), Advance(0, 2), Offload(2), Advance(2, 3), Tape(3), Reverse(3),
    Load(2), Drop(2), Tape(2), Reverse(2),
    Load(0), Advance(0, 1), Offload(1), Load(1), Drop(1), Tape(1), Reverse(1),
    Load(0), Drop(0), Tape(0), Reverse(0),
)  # fmt: skip


def links():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)]


def twice(model):
    x = torch.ones(3, 4, requires_grad=True)
    torch.manual_seed(1)
    y = model(x * 1)
    loss, leaves = y.square().sum(), [x, *model.parameters()]
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    return [y, *once, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("to", ["host", "folder"])
def test_a_schedule_that_offloads(to, tmp_path):
    stages = links()
    to = to if to == "host" else str(tmp_path)
    actions = [Offload(a.index, to) if isinstance(a, Offload) else a for a in ACTIONS]
    chain = recoup.Sequential(*stages, memory=Schedule(4, tuple(actions)))
    assert_equal(twice(chain), twice(nn.Sequential(*stages)))
    assert not list(tmp_path.iterdir())


def test_states_go_through_the_hooks_beneath():
    seen = []

    def look(tensor):
        seen.append(tensor.shape)
        return tensor.clone()

    stages = links()
    chain = recoup.Sequential(*stages, memory=Schedule(4, ACTIONS))
    wanted = twice(nn.Sequential(*stages))
    with saved_tensors_hooks(look, lambda tensor: tensor):
        assert_equal(twice(chain), wanted)
    assert seen.count((3, 4)) >= 2


def test_a_folder_that_is_not_there():
    schedule = Schedule(1, (Offload(0, "/nowhere/at/all"), Advance(0, 1), Load(0), Tape(0), Drop(0),
                            Reverse(0)))  # fmt: skip
    chain = recoup.Sequential(nn.Linear(4, 4), memory=schedule)
    with pytest.raises(OffloadError, match="/nowhere/at/all"):
        chain(torch.ones(2, 4) * 1)


def test_the_text_of_an_offload():
    assert str(Offload(3)) == "offload x_3"
    assert str(Offload(3, "/scratch")) == "offload x_3 to /scratch"
    assert Keep(3) != Offload(3)
