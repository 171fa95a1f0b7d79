"""RETURNN: the cases of its own scope, and our blocks in its parametrizations of weights."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from recoup._core.storage_tracking import StorageTracker
from recoup.regions.recomputing import recomputing
from tests.alive import no_collector
from tests.oracle import hooks_in_force

SHAPE = (101, 103)
UNIT = SHAPE[0] * SHAPE[1] * 4
STATE = torch.get_rng_state().numel()
SMALL = 64  # losses and seeds


class Product(nn.Module):
    """The product of two parameters, one of them noisy, or both."""

    def __init__(self, context, *, is_input_noisy=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SHAPE))
        self.given = nn.Parameter(torch.randn(SHAPE))
        self.context = context
        self.is_input_noisy = is_input_noisy

    def noisy(self, parameter):
        with self.context():
            return parameter + torch.randn(SHAPE)

    def forward(self):
        given = self.noisy(self.given) if self.is_input_noisy else self.given
        return self.noisy(self.weight) * given


def run_steps(model, num_steps):
    """Take steps of SGD; return the bytes between forward and backward, and at most in backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.manual_seed(4)
    torch.rand(1)
    with no_collector(), StorageTracker() as tracker:
        for _ in range(num_steps):
            loss = model().sum()
            held = tracker.current_bytes
            tracker.peak_bytes = held
            loss.backward()
            del loss
            peak = tracker.peak_bytes
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert tracker.current_bytes == 0
    assert hooks_in_force() is None
    return held, peak


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_input_noisy", [False, True])
def test_steps_with_noisy_parameters(is_input_noisy):
    """The cases of RETURNN's tests of its scope, with one block in use and with two."""
    plain = Product(nullcontext, is_input_noisy=is_input_noisy)
    ours = copy.deepcopy(plain)
    ours.context = recomputing
    num_noisy = 2 if is_input_noisy else 1
    plain_held, plain_peak = run_steps(plain, 2)
    held, peak = run_steps(ours, 2)
    for got, want in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got, want)
    assert plain_held >= num_noisy * UNIT
    assert held <= num_noisy * STATE + SMALL
    # What is made again is there while backward works on it, as it would be anyway.
    assert peak <= plain_peak + 3 * num_noisy * STATE


def test_the_noisy_tensor_is_gone_before_backward():
    model = Product(recomputing)
    with no_collector():
        noisy = model.noisy(model.weight)
        loss = (noisy * model.given).sum()
        with torch._C.DisableTorchFunctionSubclass():
            storage = weakref.ref(noisy.untyped_storage())
        want = noisy.detach().clone()
        del noisy
        assert storage() is None
        torch.randn(5)
        loss.backward()
    assert torch.equal(model.given.grad, want)


def test_a_block_in_use_when_hooks_of_others_come_and_go():
    model = Product(recomputing)
    noisy = model.noisy(model.weight)
    with torch.autograd.graph.save_on_cpu():
        loss = (noisy * model.given).sum()
        del noisy
    with torch.autograd.graph.save_on_cpu():
        loss = loss + model().sum()
    loss.backward()
    assert hooks_in_force() is None


# -- with RETURNN itself --------------------------------------------------------------------------


# It asks torch for things by names of old, and leaves files open when it is imported first.
warns = [
    pytest.mark.filterwarnings(f"ignore::{name}")
    for name in ("DeprecationWarning", "ResourceWarning", "pytest.PytestUnraisableExceptionWarning")
]


def with_returnn(test):
    for mark in warns:
        test = mark(test)
    return test


@pytest.fixture
def rf():
    module = pytest.importorskip("returnn.frontend", reason="RETURNN is not installed")
    module.select_backend_torch()
    module.init_train_step_run_ctx(train_flag=True, step=0, epoch=1)
    return module


class WeightNoise:
    """As `rf.WeightNoise`, with our block in the place of RETURNN's scope."""

    def __init__(self, rf, context=recomputing):
        self.rf = rf
        self.context = context

    def __call__(self, weight):
        rf = self.rf
        if not rf.get_run_ctx().is_train_flag_enabled(func=None):
            return weight
        with self.context():
            return weight + rf.random_normal(weight.dims, stddev=0.1, like=weight)


class WeightDropoutAndNoise(WeightNoise):
    """Both in one callable, since RETURNN refuses a second one on the same parameter."""

    def __call__(self, weight):
        rf = self.rf
        with self.context():
            weight = rf.dropout(weight, 0.3, on_forward=True)
            return weight + rf.random_normal(weight.dims, stddev=0.1, like=weight)


class Returnn:
    """A layer of RETURNN with its input, and steps of it."""

    def __init__(self, rf, kind):
        self.rf = rf
        time = rf.Dim(5, name="time")
        self.inner = rf.Dim(64, name="in")
        outer = rf.Dim(64, name="out")
        dims = [rf.Dim(8, name="batch"), time, self.inner]
        self.x = rf.Tensor("x", dims=dims, dtype="float32", feature_dim=self.inner)
        self.names = ("weight",)
        torch.manual_seed(1)
        if kind == "Linear":
            self.layer = rf.Linear(self.inner, outer)
            self.call = self.layer
        elif kind == "Conv1d":
            self.layer = rf.Conv1d(self.inner, outer, 3, padding="same")
            self.names = ("filter",)
            self.call = lambda x: self.layer(x, in_spatial_dim=time)[0]
        else:
            self.layer = rf.LSTM(self.inner, outer)
            self.names = ("ff_weight", "rec_weight")
            state = self.layer.default_initial_state(batch_dims=dims[:1])
            self.call = lambda x: self.layer(x, state=state, spatial_dim=time)[0]

    def parameters(self):
        return {name: value.raw_tensor for name, value in self.layer.named_parameters()}

    def run(self):
        """Return the gradients, and the bytes that forward left."""
        for parameter in self.parameters().values():
            parameter.grad = None
        torch.manual_seed(2)
        self.x.raw_tensor = torch.randn(8, 5, 64).requires_grad_()
        with StorageTracker() as tracker:
            loss = self.call(self.x).raw_tensor.square().sum()
        held = tracker.current_bytes
        torch.rand(3)
        loss.backward()
        return {name: value.grad for name, value in self.parameters().items()}, held


KINDS = ["Linear", "Conv1d", "LSTM"]


@with_returnn
@pytest.mark.parametrize("noise", [WeightNoise, WeightDropoutAndNoise])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_in_a_parametrization(rf, kind, noise):
    layer = Returnn(rf, kind)
    _, plain_held = layer.run()
    names = list(layer.parameters())
    found = []
    for context in (recomputing, nullcontext):
        for name in layer.names:
            rf.register_parametrization(layer.layer, name, noise(rf, context))
        assert list(layer.parameters()) == names
        found.append(layer.run())
        for name in layer.names:
            rf.remove_parametrization(layer.layer, name)
    (ours, held), (kept, kept_held) = found
    for name, want in kept.items():
        assert torch.equal(ours[name], want), name
    assert kept_held >= plain_held + 64 * 64 * 4
    assert held <= plain_held + len(layer.names) * STATE + SMALL


@with_returnn
@pytest.mark.parametrize("kind", KINDS)
def test_the_parametrizations_of_returnn_over_our_blocks(rf, kind, monkeypatch):
    """One line in a setup: its own weight noise and dropout then hold nothing."""
    from returnn.torch.frontend import TorchBackend

    layer = Returnn(rf, kind)
    _, plain_held = layer.run()
    for name in layer.names:
        rf.weight_noise(layer.layer, name, std=0.1)
    theirs, theirs_held = layer.run()
    monkeypatch.setattr(TorchBackend, "gradient_checkpoint_scope", staticmethod(recomputing))
    ours, held = layer.run()
    for name, want in theirs.items():
        assert torch.equal(ours[name], want), name
    assert held <= plain_held + len(layer.names) * STATE + SMALL
    assert held <= theirs_held


@with_returnn
def test_without_training_the_parameter_itself_is_used(rf):
    layer = Returnn(rf, "Linear")
    raw = layer.layer.weight
    rf.register_parametrization(layer.layer, "weight", WeightNoise(rf))
    assert layer.layer.weight is not raw
    rf.init_forward_step_run_ctx(epoch=1, step=0)
    assert layer.layer.weight is raw
