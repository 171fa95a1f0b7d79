"""Regions: what a second run does, what it leaves, and the errors if it is not the first one."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup._core import slots
from recoup._core.callable_chain import executor_for, run_through
from recoup._core.drift_guard import DriftGuard
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ReplayError
from recoup.invertible import ActNorm, AdditiveCoupling, Chain, Flip, InvertibleConv1x1
from recoup.schedules import Advance, Drop, Keep, Load, Reverse, Schedule, Tape
from tests.oracle import Operators, assert_same_step, hooks_in_force, loss_of_all, run_step
from tests.zoo import chain_of, dense, invertible_chain_of, leaf


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(slots, "_WORTH_A_STOP", 0)


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def plainly(fn, *args):
    return fn(*args)


def is_second_run():
    return torch._C._current_graph_task_id() != -1


# -- what is compared ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "is_read"),
    [
        (lambda x: x.sin(), False),
        (lambda x: x.view(-1).sin(), False),
        (lambda x: x.sin().exp(), True),
        (lambda x: (x.exp().sin().square(), x.tanh())[1], True),
    ],
)
def test_inputs_are_not_read_for_the_comparison(fn, is_read):
    """Dispatch modes do not see the products that make sketches, and profilers do."""
    x = leaf(300, 4)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            recoup.checkpoint(fn, x)
        assert ("aten::mm" in {event.name for event in profiler.events()}) is is_read


# -- where a second run ends -----------------------------------------------------------------------


@pytest.mark.parametrize(("width", "num_runs"), [(8, 2), (64, 1)])
def test_what_comes_after_the_last_save_is_not_run(width, num_runs, monkeypatch):
    """Where a residual is worth it. Of the second layer nothing is needed but its input."""
    monkeypatch.undo()
    y = recoup.checkpoint(dense(width=width).double(), leaf(64, width))
    with Operators() as operators:
        y.sum().backward()
    assert operators.names.count("addmm") == num_runs
    assert operators.names.count("tanh") == 1


def test_a_region_around_regions_stops_before_the_last_of_them():
    blocks, runs = [dense().double() for _ in range(3)], []

    def all_of_them(x):
        for index, block in enumerate(blocks):
            x = recoup.checkpoint(lambda x, i=index, f=block: runs.append(i) or f(x), x)
        return x

    for _ in range(2):
        runs.clear()
        recoup.checkpoint(all_of_them, leaf(3, 6).sin()).sum().backward()
    assert [runs.count(index) for index in range(3)] == [3, 3, 2]


def test_what_is_not_reached_leaves_no_trace():
    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = (x * torch.rand_like(x)).sin().sin()
        return y + torch.rand(())

    y = recoup.checkpoint(fn, leaf(4))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert hooks_in_force() is None


@pytest.mark.parametrize("ends", [False, True])
def test_code_that_catches_every_error(ends):
    w, x = leaf(4, 4), leaf(4, 4)

    def fn(x):
        try:
            y = x.sin() @ w
        except Exception:  # noqa: BLE001 - a faster kernel that may be missing, say
            y = x.detach() if ends else x.sin() @ w
        return y * 2

    found = [torch.autograd.grad(f(fn, x).sum(), (x, w)) for f in (recoup.checkpoint, plainly)]
    assert all(map(torch.equal, *found))


# -- the plain run's numbers -----------------------------------------------------------------------


def test_stages_of_flows_that_run_as_one():
    modules = [each for _ in range(3) for each in (ActNorm(4), Flip(), InvertibleConv1x1(4))]
    chain, x = Chain(*modules).double(), leaf(8, 4)
    assert_same_step(run_step(chain, x, memory="sqrt"), run_step(chain, x, memory="linear"))
    norm = nn.BatchNorm1d(3).double()
    chain = Chain(*(AdditiveCoupling(nn.Sequential(norm)) for _ in range(3)), memory="constant")
    loss_of_all(chain(leaf(4, 6))).backward()
    assert int(norm.num_batches_tracked) == 3


@pytest.mark.parametrize("first", [nn.Identity(), nn.Flatten(), nn.Dropout(0.0)])
def test_an_input_that_is_kept_and_passed_on_is_not_overwritten(first):
    """The first stage of a segment returns its input, and the second changes it in place."""
    tape = (Tape(0), Tape(1), Tape(2))
    actions = (Keep(0), Advance(0, 3), Load(0), Drop(0), *tape, *(Reverse(i) for i in (2, 1, 0)))
    modules, x = [first, nn.ReLU(inplace=True), nn.Linear(6, 6)], leaf(5, 6)
    chain = recoup.Sequential(*modules, memory=Schedule(3, actions)).double()
    want = torch.autograd.grad(nn.Sequential(first, nn.ReLU(), modules[2])(x).sin().sum(), x)
    assert torch.equal(*torch.autograd.grad(chain(x).sin().sum(), x), *want)


@pytest.mark.parametrize("cast", [torch.bfloat16, None])
def test_a_weight_that_regions_share(cast):
    """The first run finds casts that were made; the second makes nodes that it did not."""
    linear, x, fired = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True), []
    linear.weight.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    found = []
    for call in (recoup.checkpoint, plainly):
        linear.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype=cast, enabled=cast is not None):
            y = call(linear, call(lambda x: linear(linear(x).tanh()).tanh(), linear(x)))
        y.float().sin().sum().backward()
        found.append([x.grad, linear.weight.grad, linear.bias.grad])
    assert all(map(torch.equal, *found))
    assert len(fired) == 2


# -- what is held ----------------------------------------------------------------------------------


def raises_again(x):
    x = LINEAR(x).exp() * torch.ones(64)  # what lies below a constant is compared for itself
    if is_second_run():
        raise KeyError
    return x.sin().exp()


def differs(x):
    return (x.sin() * (2 if is_second_run() else 1)).exp().cos()


def takes_a_gradient(x):
    z = x.detach().requires_grad_()
    return x.sin() * torch.autograd.grad(z.exp().sin().sum(), z, create_graph=True)[0]


LINEAR = nn.Linear(64, 64).double()
CODE = {
    "stops": lambda x: LINEAR(F.gelu(LINEAR(x))),
    "draws": lambda x: F.dropout(LINEAR(x).sin(), 0.5).exp(),
    "decides": lambda x: LINEAR(x).sort(-1).values.exp() * (x > 0),
    "nested": lambda x: recoup.checkpoint(lambda x: LINEAR(x).sin().exp(), x.sin()).cos(),
    "a value": lambda x: recoup.recompute(lambda x: LINEAR(x).sin())(x).exp(),
    "in place": lambda x: LINEAR(x).relu_().exp(),
    "norm": nn.BatchNorm1d(64).double(),
    "gradient": takes_a_gradient,
    "raises": lambda x: {}[x.sin().exp()],
    "raises again": raises_again,
    "differs": differs,
}


@pytest.mark.parametrize("ends", ["backward", "never", "twice", "a gradient's"])
@pytest.mark.parametrize("name", CODE)
def test_reference_counting_alone_frees_a_region(name, ends, no_collector):
    x = leaf(8, 64)
    for _ in range(2):  # looked at, and later
        with StorageTracker() as tracker:
            try:
                loss = recoup.checkpoint(CODE[name], x).square().sum()
                if ends == "twice":
                    torch.autograd.grad(loss, x, retain_graph=True)
                if ends == "a gradient's":
                    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
                    torch.autograd.grad(grad.sum(), x)
                elif ends != "never":
                    torch.autograd.grad(loss, x)
            except (KeyError, ReplayError) as error:
                del error
            loss = grad = None
        assert tracker.current_bytes == 0
        assert hooks_in_force() is None


@pytest.mark.parametrize("memory", ["sqrt", "log", 1, "inputs", "constant"])
def test_reference_counting_alone_frees_a_chain(memory, no_collector):
    build = invertible_chain_of if memory == "constant" else chain_of
    modules, x = build("dropout")
    chain = (Chain if memory == "constant" else recoup.Sequential)(*modules, memory=memory)
    for does_end in (True, False, True):
        with StorageTracker() as tracker:
            loss = loss_of_all(chain(x))
            if does_end:
                torch.autograd.grad(loss, x)
            del loss
        assert tracker.current_bytes == 0


@pytest.mark.parametrize("code", [raises_again, differs])
def test_a_second_run_that_fails_leaves_nothing_and_can_be_repeated(code):
    depth, x = [], leaf(4, 64)

    @contextmanager
    def entered():
        depth.append(1)
        try:
            yield
        finally:
            depth.pop()

    def fn(x):
        with entered(), torch.autocast("cpu", torch.bfloat16):
            return F.dropout(code(x), 0.5)

    with StorageTracker() as tracker:
        y, state = recoup.checkpoint(fn, x).sum(), torch.get_rng_state()
        held = tracker.current_bytes
        for _ in range(2):
            with pytest.raises((KeyError, ReplayError)):
                y.backward()
        gc.collect()
        assert tracker.current_bytes == held
    assert x.grad is None
    assert hooks_in_force() is None
    assert not depth
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU])
def test_a_region_that_begins_in_place_is_freed(kind, no_collector):
    block, alive = nn.Sequential(kind(inplace=True), nn.Linear(8, 8)), []
    for _ in range(3):
        h = torch.randn(4, 8, requires_grad=True) * 1.0
        handle = block[1].register_forward_pre_hook(
            lambda module, args: alive.append(weakref.ref(args[0].untyped_storage()))
        )
        recoup.checkpoint(block, h).sum().backward()
        handle.remove()
        del h
    assert len(alive) == 6
    assert all(ref() is None for ref in alive)


def in_place():
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))


@pytest.mark.parametrize("way", ["checkpoint", "recompute", "inputs", "sqrt", "log", 1])
def test_the_tensor_of_the_caller_is_changed_in_place_as_by_plain_code(way):
    torch.manual_seed(0)
    model = nn.Sequential(in_place(), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
    ways = {
        "checkpoint": lambda h: recoup.checkpoint(model, h),
        "recompute": recoup.recompute(model),
    }
    ours = ways.get(way) or recoup.Sequential(*model, memory=way)
    steps = []
    for fn in (model, ours):
        x = torch.linspace(-2, 2, 24).view(4, 6).requires_grad_()
        h = x * 1.0
        y = fn(h) + h  # which the activation has changed
        y.square().sum().backward()
        steps.append((y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())))
        model.zero_grad()
    for a, b in zip(*steps, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Counts(nn.Module):
    """Multiplies by a buffer that each forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.ones(()))

    def forward(self, x):
        self.n.add_(1)
        return x * self.n


@pytest.mark.parametrize("way", ["checkpoint", "recompute", "inputs"])
def test_a_buffer_that_is_a_residual_and_changes_before_backward(way):
    module, x = Counts(), torch.ones(3, requires_grad=True)
    chain = recoup.Sequential(module, nn.Identity(), memory="inputs")
    ways = {"checkpoint": lambda x: recoup.checkpoint(module, x), "inputs": chain}
    fn = ways.get(way) or recoup.recompute(module)
    first, _ = fn(x), fn(x)
    first.sum().backward()
    assert x.grad.tolist() == [2.0] * 3  # what it multiplied by
    assert int(module.n) == 3


def test_in_place_code_in_a_chain_within_a_checkpoint():
    """The pair of hooks around has the kept input, of which no copy can be made later."""
    torch.manual_seed(0)
    chain = recoup.Sequential(in_place(), in_place(), memory="inputs")

    def code(x):
        h = x * 1.0
        return chain(h) + h

    x = torch.linspace(-2, 2, 24).view(4, 6).requires_grad_()
    chain.memory = "linear"
    wanted = torch.autograd.grad(code(x).square().sum(), x)
    chain.memory = "inputs"
    for run in (recoup.checkpoint, torch_checkpoint):
        options = {} if run is recoup.checkpoint else {"use_reentrant": False}
        found = torch.autograd.grad(run(code, x, **options).square().sum(), x)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_segment_is_looked_at_if_any_of_its_functions_is_new():
    num_modes = []

    def first(x):
        return x.sin()

    def second(x):
        return x.cos()

    def new(x):
        num_modes.append(torch._C._len_torch_dispatch_stack())
        return x.exp()

    x = torch.randn(3, requires_grad=True)
    for functions in ((first, second, second), (first, new, second)):
        named = {str(place): fn for place, fn in enumerate(functions)}
        executor = executor_for("sqrt", named, None, DriftGuard())
        assert len(executor.groups) < 3
        run_through(executor, named, x).sum().backward()
    assert num_modes[0] == 1
