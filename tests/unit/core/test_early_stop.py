"""A second run ends with the last residual, and everything that it entered is left."""

from __future__ import annotations

import copy
import gc
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup._core import filling, region
from recoup._core.inner_gradients import Advancing, FirstRun
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ReplayError
from recoup.invertible import InvertibleModule
from tests.oracle import assert_same_step, hooks_in_force, run_step
from tests.zoo import conv_norm, dense, leaf, net, transformer


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(region, "_WORTH_A_STOP", 0)


class Counted(TorchDispatchMode):
    """A context that counts operators by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def of(self, name):
        return self.names.count(name)


class Checkpointed(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = recoup.checkpoint(block, x)
        return x


class Plain(Checkpointed):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_what_comes_after_the_last_save_is_not_run():
    layers, x = dense(), leaf(4, 6)
    layers.double()
    y = recoup.checkpoint(layers, x)
    with Counted() as counted:
        y.sum().backward()
    # Of the second layer nothing is needed but its input, of the tanh its output.
    assert counted.of("addmm") == 1
    assert counted.of("tanh") == 1


@pytest.mark.parametrize(("width", "num_runs"), [(8, 2), (64, 1)])
def test_it_takes_tensors_that_are_worth_it(width, num_runs, monkeypatch):
    monkeypatch.undo()
    y = recoup.checkpoint(dense(width=width).double(), leaf(64, width))
    with Counted() as counted:
        y.sum().backward()
    assert counted.of("addmm") == num_runs


def test_a_region_around_regions_stops_before_the_last_of_them():
    blocks = [dense().double() for _ in range(3)]
    num_runs = [0] * len(blocks)

    def block(index, x):
        num_runs[index] += 1
        return blocks[index](x)

    def all_of_them(x):
        for index in range(len(blocks)):
            x = recoup.checkpoint(partial(block, index), x)
        return x

    x = leaf(3, 6)
    for _ in range(2):
        num_runs[:] = [0] * len(blocks)
        # What comes before has a history in the first run, and is a leaf in the second one.
        recoup.checkpoint(all_of_them, x.sin()).sum().backward()
    # The region around them needs the inputs of all three, and not the output of the last.
    assert num_runs == [3, 3, 2]


def test_what_is_asked_for_alone_ends_the_run_earlier():
    a, b, x = leaf(4, 4), leaf(4, 4), leaf(4, 4)

    def fn(x):
        y = x.sin()
        return y, (y @ a).exp() @ b

    early, late = recoup.checkpoint(fn, x)
    del late
    with Counted() as counted:
        early.sum().backward()
    assert counted.of("mm") == 0
    assert torch.equal(x.grad, x.cos())


BLOCKS = {
    "dense": lambda: ([dense(0.5).double() for _ in range(3)], leaf(4, 6)),
    "norms": lambda: ([conv_norm().double() for _ in range(3)], leaf(3, 3, 4, 4)),
    "transformer": lambda: ([transformer().double() for _ in range(2)], leaf(2, 3, 8)),
    "nested": lambda: (
        [Checkpointed(dense(0.5), Checkpointed(dense(0.5), nn.Tanh()), dense(0.5)).double()] * 2,
        leaf(4, 6),
    ),
    "an inner one last": lambda: (
        [nn.Sequential(nn.Dropout(), Checkpointed(dense(0.5))).double() for _ in range(2)],
        leaf(4, 6),
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_step_is_that_of_the_plain_run(name):
    torch.manual_seed(3)
    blocks, x = BLOCKS[name]()
    got = run_step(Checkpointed(*blocks), x)
    want = run_step(Plain(*blocks), x)
    assert_same_step(got, want)
    assert hooks_in_force() is None


def test_the_generator_is_where_it_was():
    def fn(x):
        y = (x * torch.rand_like(x)).sin()
        return y + torch.rand(())  # not reached

    x = leaf(4)
    y = recoup.checkpoint(fn, x)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


class Flags(nn.Module):
    """Sets attributes and takes them back, without a thought of exceptions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.depth = 0
        self.hidden = None

    def forward(self, x):
        self.depth += 1
        self.hidden = x
        self.last = x
        y = self.linear(x.sin())
        self.depth -= 1
        self.hidden = None
        del self.last
        return y


def test_attributes_are_put_back():
    flags = Flags()
    recoup.checkpoint(flags, leaf(3, 4)).sum().backward()
    assert flags.depth == 0
    assert flags.hidden is None
    assert not hasattr(flags, "last")


class Counts(Flags):
    def forward(self, x):
        self.depth += 2
        return super().forward(x)


def test_a_number_that_counts_is_counted_once():
    counts, x = Counts(), leaf(3, 4)
    for num_steps in range(1, 4):
        recoup.checkpoint(counts, x).sum().backward()
        assert counts.depth == 2 * num_steps


def test_settings_are_those_of_before():
    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            pass
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x.sin().sin()

    y = recoup.checkpoint(fn, leaf(4))
    with torch.no_grad():
        pass
    torch.autograd.backward(y.sum())
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert hooks_in_force() is None


def test_code_that_catches_every_error():
    failures = []

    def fn(x, w):
        try:
            y = x.sin() @ w
        except Exception as error:  # noqa: BLE001 - a faster kernel that may be missing, say
            failures.append(error)
            y = x.sin() @ w
        return y * 2

    w, x = leaf(4, 4), leaf(4, 4)
    want = torch.autograd.grad(fn(x, w).sum(), (x, w))
    got = torch.autograd.grad(recoup.checkpoint(fn, x, w).sum(), (x, w))
    assert len(failures) == 1
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_code_that_catches_every_error_and_ends():
    class Tries(nn.Module):
        has_failed = False

        def forward(self, x):
            try:
                return x.sin().sin()
            except Exception:  # noqa: BLE001
                self.has_failed = True
                return x.detach()

    module, x = Tries(), leaf(4)
    recoup.checkpoint(module, x).sum().backward()
    assert torch.equal(x.grad, x.cos() * x.sin().cos())
    assert not module.has_failed


def test_hooks_that_are_always_called_are_called():
    called = []
    linear = nn.Linear(4, 4).double()
    linear.register_forward_hook(lambda *_: called.append(1), always_call=True)
    recoup.checkpoint(lambda x: linear(x.sin()), leaf(3, 4)).sum().backward()
    assert len(called) == 2


def test_an_error_in_a_second_run_is_not_taken_for_a_stop():
    runs = []

    def fn(x):
        runs.append(1)
        y = x.sin()
        if len(runs) > 1:
            raise KeyError("mine")
        return y.sin()

    with pytest.raises(KeyError, match=r"mine"):
        recoup.checkpoint(fn, leaf(4)).sum().backward()


MORE_IN_THE_SECOND_RUN = {
    "another operator": lambda x: x.sin(),
    "one that saves two for one that saves one": lambda x: x * x,
}


@pytest.mark.parametrize("name", MORE_IN_THE_SECOND_RUN)
def test_a_save_more_before_the_stop_is_noticed(name):
    runs = []

    def fn(x):
        runs.append(1)
        if len(runs) > 1:
            x = MORE_IN_THE_SECOND_RUN[name](x)
        elif name != "another operator":
            x = x.sin()
        y = x.exp()
        return y * y.detach().cos()

    with pytest.raises(ReplayError, match=r"saved \d values where the first run saved \d"):
        recoup.checkpoint(fn, leaf(4)).sum().backward()


def test_casts_that_the_first_run_found_made():
    """Then the second run makes nodes that the first did not, and goes on to its end."""
    linear = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)

    def step(call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(lambda x: linear(linear(x).tanh()).tanh(), linear(x))
        return torch.autograd.grad(y.float().sin().sum(), (x, *linear.parameters()))

    for a, b in zip(step(recoup.checkpoint), step(lambda fn, x: fn(x)), strict=True):
        assert torch.equal(a, b)


def test_twice_over_one_graph():
    layers, x = dense().double(), leaf(4, 6)
    loss = recoup.checkpoint(layers, x).sin().sum()
    with Counted() as counted:
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        second = torch.autograd.grad(loss, x)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad(layers(x).sin().sum(), x)[0])
    assert counted.of("addmm") == 2


def test_double_backward():
    layers, x = dense().double(), leaf(4, 6)

    def twice(call):
        first = torch.autograd.grad(call(layers, x).sin().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), [x, *layers[0].parameters()])

    got, want = twice(recoup.checkpoint), twice(lambda fn, x: fn(x))
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


class Both(InvertibleModule):
    """Saves something of its own before it evaluates its last network, and nothing after."""

    def __init__(self):
        super().__init__()
        self.f, self.g = net(3, 3, 0.5), net(3, 3, 0.5)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        scale = self.evaluate(self.f, a).tanh()
        b = b * scale.exp()
        return torch.cat([a + self.evaluate(self.g, b), b], dim=1), scale.sum(1)

    def inverse(self, y):
        a, b = y.chunk(2, dim=1)
        a = a - self.evaluate(self.g, b)
        scale = self.evaluate(self.f, a).tanh()
        return torch.cat([a, b * (-scale).exp()], dim=1), -scale.sum(1)


def test_networks_of_an_inverted_stage_are_filled_when_asked_again():
    modules = [Both().double() for _ in range(3)]
    x = leaf(4, 6)

    def twice(chain):
        torch.manual_seed(1)
        loss = chain(x).sin().sum()
        last = [*chain[-1].parameters()]
        grads = torch.autograd.grad(loss, last, retain_graph=True)
        again = torch.autograd.grad(loss, last, retain_graph=True)
        return *grads, *again, *torch.autograd.grad(loss, [x, *chain.parameters()])

    linear = recoup.Sequential(*copy.deepcopy(modules), memory="linear")
    constant = recoup.Sequential(*copy.deepcopy(modules), memory="constant")
    for a, b in zip(twice(constant), twice(linear), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


class Owner:
    lock = threading.RLock()

    def fill_slots(self, index):
        raise AssertionError(f"nothing asks for region {index}")


def another_region():
    return region.Region("another", Owner(), 0, FirstRun((), is_training=True))


def test_runs_that_a_guard_refuses_before_they_begin_are_no_cycle():
    other = another_region()
    while gc.collect():  # a finalizer may make garbage
        pass
    gc.disable()
    try:
        filling.Filling(other, ())
        Advancing("another", other.first_run)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_what_stops_another_region_passes():
    other = another_region()
    runs = []

    def fn(x):
        runs.append(1)
        if len(runs) > 1:
            raise filling.Filled(other)
        return x.sin()

    with pytest.raises(filling.Filled, match=r"another"):
        recoup.checkpoint(fn, leaf(4)).sum().backward()


def test_a_value_that_is_asked_for_beside_the_residuals():
    w, x = leaf(4, 4), leaf(4, 4)

    def step(call):
        return torch.autograd.grad((call(lambda x: (x @ w).tanh())(x) @ w).sin().sum(), (x, w))

    for a, b in zip(step(recoup.recompute), step(lambda fn: fn), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("memory", ["sqrt", "log", 2])
def test_stages_whose_output_is_taken_run_to_their_end(memory):
    modules = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(9)]
    chain, x = recoup.Sequential(*modules).double(), leaf(4, 6)
    assert_same_step(run_step(chain, x, memory=memory), run_step(chain, x, memory="linear"))


class Entered:
    def __init__(self):
        self.depth = 0

    @contextmanager
    def __call__(self):
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


def test_contexts_are_left_and_nothing_stays_without_the_collector():
    entered, linear = Entered(), nn.Linear(64, 64).double()

    def fn(x):
        with entered():
            return linear(F.gelu(linear(x)))

    gc.collect()
    gc.disable()
    try:
        x = leaf(8, 64)
        with StorageTracker() as tracker:
            torch.autograd.grad(recoup.checkpoint(fn, x).sum(), x)
        assert entered.depth == 0
        assert tracker.current_bytes == 0
    finally:
        gc.enable()


def test_census_names_what_follows_a_stop():
    """A module whose forward was stopped is not the one that runs when it is over."""
    block, head = dense().double(), nn.Linear(6, 6).double()

    def fn():
        recoup.checkpoint(block, leaf(4, 6)).sum().backward()
        return head(leaf(4, 6))

    found = recoup.residuals(fn)
    assert {each.module for each in found if each.num_bytes} <= {"Linear", "head"}
