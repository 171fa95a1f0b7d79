"""Letters N2, N3 and N4: Ctrl-C at any instruction leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import sys
import tempfile
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import recoup
from recoup._core import replaced_values, replay, save_observer
from recoup._core import rng as seeds
from recoup._core import saved_tensors as hooks
from recoup._core import shared_evaluation as evaluation
from recoup.invertible import ActNorm, AdditiveCoupling, Chain, Flip
from recoup.weights import forwards
from tests.interrupting import Interrupt

NUM_PLACES = 6  # of each mode, in a quick run
NUM_PLACES_WHERE_SLOW = 150


class Task:
    """A model, its optimizer and its batch."""

    def __init__(self, model, x, step=None):
        self.model = model
        self.x = x
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._step = step

    def step(self):
        self.optimizer.zero_grad()
        if self._step is not None:
            return self._step(self)
        loss = first(self.model(self.x)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def first(output):
    return output[0] if isinstance(output, tuple) else output


class Normed(nn.Module):
    """A batch norm, a dropout and a counter, which a second run must not count."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return x + self.dropout(self.norm(self.linear(x)).tanh())


def linear_with_weights():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    recoup.weight_norm(model, "0.weight")
    recoup.weight_dropout(model, ".*weight", 0.3)
    recoup.weight_noise(model, "2.bias", 0.1)
    return Task(model, torch.randn(4, 6))


def lstm_with_weights():
    model = nn.LSTM(6, 5)
    recoup.weight_dropout(model, "weight_hh.*", 0.3)
    recoup.weight_noise(model, "weight_ih.*", 0.1)
    return Task(model, torch.randn(3, 4, 6))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(7, 6), nn.GRUCell(6, 6)

    def forward(self, ids):
        x = self.embedding(ids)
        with recoup.weights.same_draw():
            return self.cell(x, self.cell(x))


def embedding_with_weights():
    model = Language()
    recoup.weight_dropout(model, "embedding.weight", 0.3, axes=(1,))
    recoup.weight_dropout(model, "cell.weight_hh", 0.3)
    return Task(model, torch.tensor([1, 3, 3]))


class Called(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.block, self.head = Normed(), nn.Linear(6, 3)
        self._call = call

    def forward(self, x):
        return self.head(self._call(self.block, self.head(self.block(x)).repeat(1, 2)))


def checkpoint():
    return Task(Called(recoup.checkpoint), torch.randn(4, 6))


def checkpoint_under_autocast():
    def call(block, x):
        with torch.autocast("cpu", torch.bfloat16):
            return recoup.checkpoint(block, x).float()

    return Task(Called(call), torch.randn(4, 6))


def recompute():
    return Task(Called(lambda block, x: recoup.recompute(block)(x)), torch.randn(4, 6))


def recomputing():
    def call(block, x):
        with recoup.recomputing():
            x = x * torch.rand_like(x)
            with recoup.recomputing():
                x = x.sin() * block.linear.weight.exp().mean()
        return block(x)

    return Task(Called(call), torch.randn(4, 6))


def offloading():
    def call(block, x):
        with recoup.offloading(1, tempfile.gettempdir(), in_flight_bytes=200):
            return block(block(x))

    return Task(Called(call), torch.randn(4, 6))


def sequential(memory):
    def make():
        return Task(
            recoup.Sequential(*(Normed() for _ in range(4)), memory=memory), torch.randn(4, 6)
        )

    return make


def chain(memory, drift="recompute"):
    def net():
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 3))

    def make():
        stages = [ActNorm(6), AdditiveCoupling(net()), Flip(), AdditiveCoupling(net())]
        return Task(Chain(*stages, memory=memory, drift=drift), torch.randn(4, 6))

    return make


def flow_of_residuals():
    flow = recoup.flows.IResNet((2,), levels=None, num_steps=1, width=4, memory="sqrt")

    def step(task):
        loss = -flow.log_prob(task.x).mean()
        loss.backward()
        task.optimizer.step()
        return loss.detach()

    return Task(flow, torch.randn(3, 2), step)


@functools.cache
def planned():
    model, x = nn.Sequential(*(Normed() for _ in range(3)), nn.Linear(6, 2)), torch.randn(4, 6)
    task = Task(model, x)
    frontier = recoup.plan(model, x, budget="1 GiB")
    recoup.plan(model, x, budget=frontier.least_bytes).apply()
    return task


def planning():
    model, x = nn.Sequential(*(Normed() for _ in range(2)), nn.Linear(6, 2)), torch.randn(4, 6)

    def step(task):
        recoup.plan(model, x, budget="1 MiB")
        loss = model(x).square().mean()
        loss.backward()
        task.optimizer.step()
        return loss.detach()

    return Task(model, x, step)


def stores(mode, *, elsewhere=False):
    def make():
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

        def step(task):
            store = recoup.GradStore(model.parameters())
            if elsewhere:  # as if it summed on another device
                store._entries.elsewhere = list
            for part in task.x.split(2):
                store.backward(model(part).square().mean(), mode=mode)
            with store.collecting():
                model(task.x).square().mean().backward()
            with store.as_grad(task.optimizer, consume=False):
                norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            store.step(task.optimizer)
            return norm

        return Task(model, torch.randn(4, 6), step)

    return make


def segments():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

    def step(task):
        store = recoup.GradStore(model.parameters())
        loss = recoup.segments_backward(list(model), task.x, lambda y: y.square().mean(), store)
        store.step(task.optimizer)
        return loss.detach()

    return Task(model, torch.randn(4, 6), step)


MODES = {
    "weights of linear layers": linear_with_weights,
    "weights of an LSTM": lstm_with_weights,
    "weights of an embedding and a cell": embedding_with_weights,
    "checkpoint": checkpoint,
    "checkpoint under autocast": checkpoint_under_autocast,
    "recompute": recompute,
    "recomputing": recomputing,
    "offloading": offloading,
    "Sequential offloaded": sequential(recoup.schedules.offloaded(4, tempfile.gettempdir())),
    "Sequential linear": sequential("linear"),
    "Sequential sqrt": sequential("sqrt"),
    "Sequential log": sequential("log"),
    "Sequential two slots": sequential(2),
    "Chain sqrt": chain("sqrt"),
    "Chain constant": chain("constant"),
    "Chain constant, no guard": chain("constant", "ignore"),
    "a flow of residual blocks": flow_of_residuals,
    "a planned model": planned,
    "planning": planning,
    "store, auto": stores("auto"),
    "store, grad": stores("grad"),
    "store, summed elsewhere": stores("auto", elsewhere=True),
    "segments": segments,
}


def made(mode):
    torch.manual_seed(0)
    return MODES[mode]()


def copied(value):
    return {name: each.clone() for name, each in value.items()}


def steps(task, state, num_steps):
    """Return what some steps from `state` give."""
    task.model.load_state_dict(state)
    task.optimizer.zero_grad()
    torch.manual_seed(1)
    losses = [task.step() for _ in range(num_steps)]
    return losses, copied(task.model.state_dict()), torch.get_rng_state()


def attributes_of(model):
    """What a module has beside its tensors, a count of calls left out."""
    return [
        (
            type(m).__name__,
            sorted(vars(m)),
            getattr(m, "momentum", None),
            m.training,
            len(m._forward_hooks),
        )
        for m in model.modules()
    ]


def assert_nothing_is_left():
    assert hooks.pair_in_force() is None, "a pair of hooks is left"
    found = {
        "dispatch modes": torch._C._len_torch_dispatch_stack() or is_in_torch_dispatch_mode(),
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "no function mode": not torch._C._is_torch_function_enabled(),
        "no grad mode": not torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu") or not torch.is_autocast_cache_enabled(),
        "a level of autocast": replay.autocast_nesting(),
        "forwards": forwards.frames() or forwards._overriding,
        "regions": seeds.is_repeated(),
        "an answer": evaluation._local.answer,
        "an observer": save_observer.current.observer,
        "hooks of all modules": torch.nn.modules.module._global_forward_hooks,
        "no collector": not gc.isenabled(),
        "a lock": is_held(replaced_values.LOCK),
    }
    assert not any(found.values()), [what for what, value in found.items() if value]
    layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    layer(x).tanh().sum().backward()
    assert layer.weight.grad is not None


def is_held(lock):
    """Whether another thread would have to wait for `lock`."""
    free = []

    def try_lock():
        if lock.acquire(blocking=False):
            lock.release()
            free.append(True)

    thread = threading.Thread(target=try_lock)
    thread.start()
    thread.join()
    return not free


def check(mode, places, num_steps):
    """Interrupt a step at some of its places; `places` is given how many there are."""
    task = made(mode)
    state = copied(task.model.state_dict())
    expected = steps(task, state, num_steps)
    attributes = attributes_of(task.model)
    task = made(mode)
    counting = Interrupt()
    counting.run(task.step)
    num_interrupted = 0
    for at in places(counting.num_places):
        task = made(mode)
        interrupt = Interrupt(at)
        error = interrupt.run(task.step)  # with its traceback, which a notebook would keep
        num_interrupted += error is not None
        try:
            assert_nothing_is_left()
            losses, weights, stream = steps(task, state, num_steps)
            assert [*map(float, losses)] == [*map(float, expected[0])]
            for name, value in weights.items():
                assert torch.equal(value, expected[1][name]), name
            assert torch.equal(stream, expected[2])
            assert attributes_of(task.model) == attributes
        except BaseException as failure:
            raise AssertionError(f"after an interrupt at {at}, {interrupt.where}") from failure
    assert num_interrupted > 0


@pytest.fixture
def quiet(monkeypatch):
    """What goes wrong in a callback of a dead reference is told on stderr alone."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # of each rehearsal: most of its time


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", MODES)
def test_n2_n3_n4_an_interrupt_at_any_place_leaves_nothing(mode, quiet):
    def some(num_places):
        return range(0, num_places, max(num_places // NUM_PLACES, 1))

    check(mode, some, num_steps=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_n2_n3_n4_then_ten_steps_are_those_of_an_undisturbed_run(mode, quiet):
    def many(num_places):
        return range(7, num_places, max(num_places // NUM_PLACES_WHERE_SLOW, 1))

    check(mode, many, num_steps=10)
