"""Regions: what a second run does, what it leaves, and the errors if it is not the first one."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup._core import slots
from recoup._core.call import Call, LoneRegion, run_again
from recoup._core.callable_chain import executor_for, run_through
from recoup._core.drift_guard import DriftGuard
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError, RecoupError, ReplayError
from recoup.invertible import ActNorm, AdditiveCoupling, Chain, Flip, InvertibleConv1x1
from recoup.planning.keeping import KeepingCall
from recoup.schedules import Advance, Drop, Keep, Load, Reverse, Schedule, Tape, revolve
from tests.oracle import Operators, assert_same_step, hooks_in_force, loss_of_all, run_step
from tests.zoo import chain_of, conv_norm, dense, invertible_chain_of, leaf, transformer


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


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = recoup.checkpoint(block, x)
        return x


# -- what is compared ------------------------------------------------------------------------------

W = torch.eye(4, dtype=torch.float64)
COMPARED = {  # the places of residuals, and of the inputs that they are
    "a chain": (lambda x: x.sin().exp().tanh(), {2: None}),
    "two branches": (lambda x: (x.sin().exp(), x.cos().tanh()), {1: None, 3: None}),
    "branches that meet": (lambda x: (x.exp() + x.tanh()).exp(), {2: None}),
    "a branch that ends": (lambda x: (x.exp().sin().square(), x.tanh())[1], {2: None, 3: None}),
    "an input": (lambda x: x.sin(), {0: 0}),
    "a view of an input": (lambda x: x.view(-1).sin(), {0: 0}),
}


def compared(fn, kind=Call, **more):
    call = kind("the call", fn, (leaf(3, 4),), {}, **more)
    found = LoneRegion(call, stops=True)
    kept = found.run(call)
    assert kept is not None
    pairs = ((at, each.sketch) for at, each in found.outcome.items())
    return {at: each if isinstance(each, int) else None for at, each in pairs}


@pytest.mark.parametrize("name", COMPARED)
def test_the_last_of_each_branch_is_compared_and_inputs_are_not_read(name):
    fn, wanted = COMPARED[name]
    assert compared(fn) == wanted


def test_a_product_that_is_kept_covers_nothing():
    def fn(x):
        return (x.exp() @ W).tanh()

    more, scale, x = {"module": None, "chosen": lambda func, number: True}, [1.0], leaf(3, 4)
    assert set(compared(fn)) < set(compared(fn, KeepingCall, **more))
    y = run_again(KeepingCall("the call", lambda x: fn(x * scale[0]), (x,), {}, **more))
    scale[0] = 2.0
    with pytest.raises(ReplayError):
        y.sum().backward()


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


def test_what_stops_another_region_passes():
    another = LoneRegion(Call("another", plainly, (), {}), stops=True)
    other = slots.Residuals(another.surroundings, 0, "recompute")

    def fn(x):
        if is_second_run():
            raise slots.Filled(other)
        return x.sin()

    with pytest.raises(slots.Filled, match=r"another"):
        recoup.checkpoint(fn, leaf(4)).sum().backward()


# -- the plain run's numbers -----------------------------------------------------------------------


class Running(nn.Module):
    """A running mean of its own making."""

    def __init__(self, is_replaced=False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.is_replaced, self.is_on = is_replaced, True

    def forward(self, x):
        if self.is_replaced:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        elif self.is_on:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return (x - self.mean).sin()


def nested():
    return Checkpointed(dense(0.5), Checkpointed(dense(0.5), nn.Tanh()), dense(0.5))


BLOCKS = {
    "dense": lambda: [dense(0.5) for _ in range(3)],
    "norms": lambda: [conv_norm() for _ in range(3)],
    "transformer": lambda: [transformer() for _ in range(2)],
    "transformer in evaluation": lambda: [transformer().eval() for _ in range(2)],
    "nested": lambda: [nested(), *[nn.Sequential(nn.Dropout(), Checkpointed(dense(0.5)))] * 2],
    "spectral norm": lambda: [spectral_norm(nn.Linear(6, 6)) for _ in range(4)],
    "average norm": lambda: [nn.Tanh(), *[nn.BatchNorm1d(6, momentum=None)] * 2],
    "running": lambda: [Running(), nn.Tanh(), Running().eval(), nn.Tanh(), Running()],
    "replaced": lambda: [Running(is_replaced=True), nn.Tanh(), nn.Tanh()],
    "in place": lambda: [
        *(nn.Linear(6, 6), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(6, 6)),
        *(nn.Flatten(), nn.ELU(inplace=True), nn.Dropout(0.5), nn.Linear(6, 6)),
    ],
}
SIZES = {"norms": (3, 3, 4, 4)} | dict.fromkeys([*BLOCKS][2:4], (2, 3, 8))


def step(model, x):
    """The gradients of two forwards that wait for each other, with all that they leave."""
    torch.manual_seed(3)
    loss = loss_of_all(model(x)) + loss_of_all(model(2 * x))
    grads = torch.autograd.grad(loss, [x, *model.parameters()])
    return [*grads, *(each.clone() for each in model.buffers()), torch.rand(2)]


@pytest.mark.parametrize("way", ["checkpoint", "sqrt", "log", "inputs", 1, 2])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_step_is_that_of_the_plain_run(name, way):
    modules, x = nn.Sequential(*BLOCKS[name]()).double(), leaf(*SIZES.get(name, (4, 6)))
    again = copy.deepcopy(modules)
    model = Checkpointed(*again) if way == "checkpoint" else recoup.Sequential(*again, memory=way)
    for _ in range(2):
        assert all(map(torch.equal, step(model, x), step(modules, x)))
    assert hooks_in_force() is None


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


def test_a_graph_that_is_retained_and_one_of_gradients():
    layers, x = dense().double(), leaf(4, 6)
    leaves = [x, layers[0].weight]
    want = torch.autograd.grad(layers(x).sin().sum(), leaves)
    loss = recoup.checkpoint(layers, x).sin().sum()
    with Operators() as operators:
        for each, wanted in zip(leaves, want, strict=True):
            assert torch.equal(*torch.autograd.grad(loss, each, retain_graph=True), wanted)
    assert operators.names.count("addmm") == 2
    assert torch.autograd.gradgradcheck(lambda x: recoup.checkpoint(layers, x), (x,))


class AsksTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        assert torch.equal(*ctx.saved_tensors, *ctx.saved_tensors)
        return grad * ctx.saved_tensors[0]


def test_residuals_that_are_unpacked_twice():
    x = leaf(4, 4)
    recoup.checkpoint(lambda x: AsksTwice.apply(x.sin()), x).sum().backward()
    assert torch.allclose(x.grad, x.sin().exp() * x.cos(), rtol=1e-14)


def test_threads_that_run_backward_at_once():
    block, x, wrong = dense(width=64).double(), [leaf(64, 64) for _ in range(4)], []
    losses = [recoup.checkpoint(block, each).square().sum() for each in x]
    want = [torch.autograd.grad(block(each).square().sum(), each)[0] for each in x]

    def run(place):
        for _ in range(5):
            wrong.append(place)
            (got,) = torch.autograd.grad(losses[place], x[place], retain_graph=True)
            wrong.remove(place) if torch.equal(got, want[place]) else None

    threads = [threading.Thread(target=run, args=(place % 4,)) for place in range(8)]
    for act in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            act(thread)
    assert not wrong


def test_shapes_that_depend_on_data_and_draws():
    layer, x = nn.Linear(4, 4).double(), leaf(3, 4)

    def routed(x):
        rows = torch.rand(3).gt(0.3).nonzero().squeeze(-1)
        return x.index_add(0, rows, F.dropout(layer(x[rows]).sin(), 0.5))

    found = []
    for call in (recoup.checkpoint, plainly):
        torch.manual_seed(3)
        y = call(routed, x)
        torch.rand(10)
        found.append([*torch.autograd.grad(y.sin().sum(), x), torch.rand(2)])
    assert all(map(torch.equal, *found))


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

CULPRITS = {
    "parameter": (lambda net: net[0].weight.detach().mul_(2), r"`0.weight` of \w+ .*in place"),
    "mode": (lambda net: net.eval(), "in training mode in forward, and no longer is"),
    "hook": (lambda net: net[1].register_forward_hook(lambda *a: a[2] * 2), "hooks of its modules"),
    "forward": (lambda net: setattr(net[1], "forward", torch.sin), "hooks of its .* `forward`"),
    "module": (lambda net: net.insert(1, nn.Tanh()), "a module in it was replaced, added"),
    "parameters": (
        lambda net: setattr(net[0], "weight", nn.Parameter(2 * net[0].weight)),
        "a parameter in it was replaced",
    ),
}


@pytest.mark.parametrize("way", ["checkpoint", "sqrt"])
@pytest.mark.parametrize("name", CULPRITS)
def test_errors_name_the_culprit(name, way):
    change, said = CULPRITS[name]
    net, others = dense(0.5).double(), [dense().double() for _ in range(8)]
    if way == "sqrt":
        y = recoup.Sequential(*others[:4], net, *others[4:], memory="sqrt")(leaf(3, 6))
    else:
        y = recoup.checkpoint(net, leaf(3, 6))
    change(net)
    for _ in range(2):
        with pytest.raises(ChangedError, match=said):
            y.sum().backward(retain_graph=True)
    assert hooks_in_force() is None


OTHERWISE = {
    "a save more": (lambda x, n: (x.sin() if n else x).exp().cos(), "did not repeat"),
    "a save less": (
        lambda x, n: x.sin() if n else x.sin().cos(),
        "saved 1 values where .* saved 2",
    ),
    "two for one": (lambda x, n: (x * x if n else x.exp()).cos(), "did not repeat"),
    "another shape": (lambda x, n: x[:, n:].sin().exp(), r"64 of shape \(4, 3\) where the first"),
    "another type": (lambda x, n: x.to([x.dtype, torch.float][n]).sin().exp(), "float32 of shape"),
    "numbers": (lambda x, n: (x * (n + 1)).sin().exp(), r"with other values .* off by \d"),
    "a branch": (lambda x, n: x.sin().exp() + (x + n).cos().exp(), "with other values"),
    "a row": (lambda x, n: (x + n * torch.eye(4)[1:2].mT).sin().exp(), "with other values"),
}


@pytest.mark.parametrize("way", ["checkpoint", "sqrt", "inputs"])
@pytest.mark.parametrize("name", OTHERWISE)
def test_a_second_run_that_differs(name, way):
    class Stage(nn.Module):
        def forward(self, x):
            return OTHERWISE[name][0](x, int(is_second_run()))

    call = partial(recoup.checkpoint, Stage())
    if way != "checkpoint":
        call = recoup.Sequential(Stage(), *(nn.Identity() for _ in range(5)), memory=way)
    y = call(leaf(4, 4))
    with pytest.raises(ReplayError, match=f"Stage.*{OTHERWISE[name][1]}"):
        y.sum().backward()


FROM_ELSEWHERE = {
    "mask": lambda h: h * torch.tensor([random.random() > 0.5 for _ in range(6)]),
    "index": lambda h: h[:, torch.tensor(random.sample(range(6), 6))],
    "condition": lambda h: torch.where(torch.tensor(random.sample([0, 0, 1], 3) * 2) > 0, h, 2 * h),
}


@pytest.mark.parametrize("name", FROM_ELSEWHERE)
def test_numbers_from_elsewhere_at_a_projection_that_begins_at_zero(name):
    """Its output is zero whatever they are, and its gradient is not: right, or an error."""
    x, w = leaf(4, 6), nn.Parameter(torch.zeros(6, 6).double())

    def fn(x):
        return (x.sin() + FROM_ELSEWHERE[name](x @ w)).exp().tanh()

    random.seed(3)
    want = torch.autograd.grad(fn(x).sum(), (x, w))
    random.seed(3)
    loss = recoup.checkpoint(fn, x).sum()
    with suppress(ReplayError):
        assert all(map(torch.equal, torch.autograd.grad(loss, (x, w)), want))


PAIRS = [
    [nn.Tanh(), nn.LeakyReLU(0.3, inplace=True)],
    [nn.Softmax(-1), nn.Dropout(0.3, inplace=True)],
    [nn.Sequential(nn.Tanh(), nn.SiLU(inplace=True))],
]


@pytest.mark.parametrize("memory", ["sqrt", "inputs"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_residual_that_a_later_operator_overwrites_is_an_error(pair, memory):
    """As in the plain run: autograd itself does not look at what goes through hooks."""
    modules = [nn.Linear(4, 4), *pair, *(nn.Linear(4, 4) for _ in range(4))]
    if memory == "inputs":  # in one stage: what a stage of its own overwrites is a copy
        modules = [nn.Sequential(*modules), nn.Linear(4, 4)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nn.Sequential(*modules)(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ChangedError, match="changed in place by a later operator"):
        recoup.Sequential(*modules, memory=memory)(torch.randn(2, 4)).sum().backward()


def test_a_buffer_that_forward_changes_only_later_is_an_error_once():
    """Code is looked at once, and again when an error has shown that it does otherwise."""
    stage, x = Running(), leaf(4, 6)
    model = recoup.Sequential(stage.double(), nn.Tanh(), nn.Tanh(), nn.Tanh(), memory=1)
    plain = nn.Sequential(*copy.deepcopy(list(model)))
    stage.is_on = plain[0].is_on = False
    assert all(map(torch.equal, step(model, x), step(plain, x)))
    stage.is_on = plain[0].is_on = True
    with pytest.raises(ReplayError, match=r"did not repeat its first run"):
        step(model, x)
    plain[0].mean.copy_(stage.mean)
    assert all(map(torch.equal, step(model, x), step(plain, x)))


def test_transforms_of_torch_say_so():
    with pytest.raises(RecoupError, match=r"torch\.func"):
        torch.func.grad(lambda x: recoup.checkpoint(torch.sin, x).sum())(torch.ones(3))


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


def test_a_kept_input_that_a_hook_of_backward_changes():
    x, blocks = torch.randn(3, 5), [nn.Linear(5, 5) for _ in range(3)]
    loss = recoup.Sequential(*blocks, memory=revolve(3, 1))(x).sum()
    blocks[1].weight.register_hook(lambda gradient: (x.add_(1), None)[1])
    with pytest.raises(ChangedError, match="The input of module `0`"):
        loss.backward()


@pytest.mark.parametrize("way", ["checkpoint", "recompute", "inputs"])
def test_a_weight_that_changes_and_shows_in_no_residual(way):
    """The input of a linear layer stays the same, and its gradient is that of another weight."""
    layer, x = nn.Linear(5, 5), torch.randn(3, 5, requires_grad=True)
    chain = recoup.Sequential(layer, nn.Identity(), memory="inputs")
    ways = {"checkpoint": lambda x: recoup.checkpoint(layer, x), "inputs": chain}
    loss = (ways.get(way) or recoup.recompute(layer))(x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(ChangedError, match=r"A parameter that .* was changed in place"):
        loss.backward()


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
    for run in (recoup.checkpoint, partial(torch_checkpoint, use_reentrant=False)):
        found = torch.autograd.grad(run(code, x).square().sum(), x)
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
