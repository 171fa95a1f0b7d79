from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import recoup
from recoup.errors import ChangedError, ReplayError
from recoup.invertible import AdditiveCoupling, Chain
from tests.oracle import hooks_in_force, loss_of_all
from tests.zoo import chain_of, invertible_chain_of, leaf


@pytest.fixture(params=["sqrt", "log", 1, "constant"])
def model_and_x(request):
    if request.param == "constant":
        modules, x = invertible_chain_of("dropout")
        return Chain(*modules, memory="constant"), x
    modules, x = chain_of("dropout")
    return recoup.Sequential(*modules, memory=request.param), x


def test_a_step_before_backward(model_and_x):
    model, x = model_and_x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = loss_of_all(model(x))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    # A stage that was taped in the sweep is autograd's own to guard.
    with pytest.raises(RuntimeError, match=r"changed in place between|modified by an inplace"):
        loss.backward()
    assert hooks_in_force() is None


def test_a_bias_alone(model_and_x):
    """A bias is not among the residuals, and yet what is recomputed depends on it."""
    model, x = model_and_x
    loss = loss_of_all(model(x))
    name, bias = next((n, p) for n, p in model.named_parameters() if n.endswith("0.bias"))
    with torch.no_grad():
        bias.add_(1.0)
    inner = name.split(".", 1)[1]
    with pytest.raises(ChangedError, match=rf"`{inner}` of module `0` .* was changed in place"):
        loss.backward()


def test_a_parameter_replaced(model_and_x):
    model, x = model_and_x
    loss = loss_of_all(model(x))
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    linear.bias = nn.Parameter(linear.bias.detach().clone())
    with pytest.raises(ChangedError, match=r"bias` of module `0` .* was replaced"):
        loss.backward()


@pytest.mark.parametrize("whole", [True, False])
def test_the_mode_switched(model_and_x, whole):
    model, x = model_and_x
    loss = loss_of_all(model(x))
    dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    (model if whole else dropout).eval()
    with pytest.raises(ChangedError, match=r"was in training mode in forward"):
        loss.backward()
    model.train()


def test_a_second_forward_in_another_mode_is_no_change(model_and_x):
    model, x = model_and_x
    loss = loss_of_all(model(x))
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    loss.backward()
    assert x.grad is not None


class Running(nn.Module):
    """A running mean of its own making."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()).double())

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return (x - self.mean).sin()


class Replacing(Running):
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return (x - self.mean).sin()


def states_and_gradients(make, memory, steps=2):
    torch.manual_seed(0)
    model = recoup.Sequential(*make(), memory=memory)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        x = leaf(4, 6)
        (loss_of_all(model(x)) + loss_of_all(model(2 * x))).backward()  # two forwards wait
        found.append(x.grad)
    grads = [each.grad for each in model.parameters()]
    return [*found, *grads, *[each.clone() for each in model.buffers()]]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("memory", [1, "sqrt", "log"])
@pytest.mark.parametrize("stage", [Running, Replacing])
def test_a_buffer_that_forward_changes_is_counted_once(stage, memory, training):
    def make():
        return [each.train(training) for each in (stage(), nn.Tanh(), stage(), nn.Tanh(), stage())]

    plain = states_and_gradients(make, "linear")
    torch.testing.assert_close(states_and_gradients(make, memory), plain, rtol=0, atol=0)
    assert hooks_in_force() is None


class Late(Running):
    """Changes its buffer from the second step on."""

    is_late = False

    def forward(self, x):
        return super().forward(x) if self.is_late else (x - self.mean).sin()


def test_a_buffer_that_forward_changes_only_later_is_an_error_once():
    model = recoup.Sequential(Late(), nn.Tanh(), nn.Tanh(), nn.Tanh(), memory=1)
    model(leaf(4, 6)).sum().backward()
    Late.is_late = True
    try:
        with pytest.raises(ReplayError, match=r"module `0` .*changes its buffer `mean` in forward"):
            model(leaf(4, 6))
        assert hooks_in_force() is None
        model(leaf(4, 6)).sum().backward()
    finally:
        Late.is_late = False


@pytest.mark.parametrize("memory", [1, "sqrt"])
def test_spectral_norm(memory):
    def make():
        return [nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh()).double() for _ in range(4)]

    plain = states_and_gradients(make, "linear")
    torch.testing.assert_close(states_and_gradients(make, memory), plain, rtol=0, atol=0)


def test_a_buffer_changed_between():
    class Shifts(Running):
        def forward(self, x):
            return (x - self.mean).sin()

    stages = [Shifts() for _ in range(4)]
    y = recoup.Sequential(*stages, memory=1)(leaf(4, 6))
    stages[1].mean.add_(1.0)
    with pytest.raises(ChangedError, match=r"`mean` of module `1` .* was changed in place"):
        y.sum().backward()


def test_statistics_changed_between_in_evaluation_mode():
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()).double() for _ in range(4)]
    model = recoup.Sequential(*stages, memory=1).eval()
    y = model(leaf(4, 6))
    stages[1][0].running_mean.add_(1.0)
    with pytest.raises(ChangedError, match=r"was changed in place"):
        y.sum().backward()


class Reads(nn.Module):
    """Reads something that is neither parameter nor buffer; autograd does not save it."""

    def __init__(self):
        super().__init__()
        self.offset = torch.ones(6).double()

    def forward(self, x):
        return (x + self.offset).sin()


def test_a_tensor_attribute_changed_between():
    stages = [Reads() for _ in range(4)]
    x = leaf(4, 6)
    y = recoup.Sequential(*stages, memory=1)(x)
    stages[0].offset.mul_(3.0)
    with pytest.raises(ChangedError, match=r"changed in place"):
        y.sum().backward()


def test_a_shape_that_changes():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = itertools.count(1)

        def forward(self, x):
            return (x[:, : 7 - next(self.calls)].sin()).sum(1, keepdim=True) * x.sin()

    model = recoup.Sequential(Grows(), nn.Tanh(), nn.Tanh(), memory=1)
    y = model(leaf(4, 6))
    with pytest.raises(ReplayError, match=r"where the first run made a"):
        y.sum().backward()


def test_a_count_that_changes():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = itertools.count(1)

        def forward(self, x):
            for _ in range(3 - next(self.calls)):
                x = x.sin()
            return x

    y = recoup.Sequential(Sometimes(), nn.Tanh(), nn.Tanh(), memory=1)(leaf(4, 6))
    with pytest.raises(ReplayError, match=r"saved 1 values where the first run saved 2"):
        y.sum().backward()


def test_norms_are_counted_once_also_when_momentum_is_an_average():
    norm = nn.BatchNorm1d(6, momentum=None).double()
    model = recoup.Sequential(nn.Tanh(), norm, norm, nn.Tanh(), nn.Tanh(), memory=1)
    loss_of_all(model(leaf(4, 6))).backward()
    assert int(norm.num_batches_tracked) == 2
    assert norm.momentum is None


def test_norms_of_a_coupling_are_counted_once():
    norm = nn.BatchNorm1d(3).double()
    model = Chain(*(AdditiveCoupling(nn.Sequential(norm)) for _ in range(3)), memory="constant")
    loss_of_all(model(leaf(4, 6))).backward()
    assert int(norm.num_batches_tracked) == 3
    assert norm.momentum == 0.1


@pytest.mark.parametrize("memory", ["sqrt", 1])
def test_numbers_of_modules_are_what_they_were(memory):
    class WarmsUp(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6).double()
            self.num_steps = 0
            self.was_used = False

        def forward(self, x):
            if not self.was_used:
                self.was_used = True
                x = x * 1.0
            self.num_steps += 1
            return self.linear(x).sin() * min(1.0, self.num_steps / 10)

    torch.manual_seed(0)
    plain = nn.Sequential(*(WarmsUp() for _ in range(5)))
    model, x = recoup.Sequential(*copy.deepcopy(list(plain)), memory=memory), leaf(4, 6)
    for _ in range(3):
        want = torch.autograd.grad(plain(x).sum(), [x, *plain.parameters()])
        got = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert [stage.num_steps for stage in model] == [3] * 5
    assert all(stage.was_used for stage in model)


@pytest.mark.parametrize("memory", ["sqrt", 1])
def test_the_probability_of_a_dropout_changed_between(memory):
    stages = [nn.Sequential(nn.Linear(6, 6).double(), nn.Dropout(0.3)) for _ in range(5)]
    plain, x = nn.Sequential(*stages), leaf(4, 6)
    torch.manual_seed(1)
    (want,) = torch.autograd.grad(plain(x).pow(2).sum(), x)
    torch.manual_seed(1)
    loss = recoup.Sequential(*stages, memory=memory)(x).pow(2).sum()
    for stage in stages:
        stage[1].p = 0.9
    (got,) = torch.autograd.grad(loss, x)
    assert torch.equal(got, want)
    assert all(stage[1].p == 0.9 for stage in stages)


@pytest.mark.parametrize("memory", ["sqrt", 1, 2])
def test_a_tensor_that_forward_replaces_is_no_change(memory):
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6).double()
            self.table = torch.zeros(1)

        def forward(self, x):
            self.weights = self.linear(x).softmax(-1)
            self.table = torch.arange(6).double()
            return self.weights * self.table + x

    torch.manual_seed(0)
    stages, x = [Remembers() for _ in range(5)], leaf(4, 6)
    plain = nn.Sequential(*stages)
    want = torch.autograd.grad(plain(x).sin().sum(), [x, *plain.parameters()])
    model = recoup.Sequential(*stages, memory=memory)
    got = torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_by_a_hook():
    torch.manual_seed(0)
    stages = [nn.utils.weight_norm(nn.Linear(6, 6)) for _ in range(5)]
    plain, x = nn.Sequential(*stages), torch.randn(4, 6, requires_grad=True)
    want = torch.autograd.grad(plain(x).sin().sum(), [x, *plain.parameters()])
    model = recoup.Sequential(*stages, memory="sqrt")
    got = torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("memory", ["sqrt", "log", 1, 2])
@pytest.mark.parametrize("kind", ["encoder in evaluation", "asks for the mode"])
def test_a_second_run_knows_that_gradients_are_wanted(kind, memory):
    class Asks(nn.Linear):
        def forward(self, x):
            return super().forward(x).sin() * (2.0 if torch.is_grad_enabled() else 1.0)

    torch.manual_seed(0)
    if kind == "asks for the mode":
        stages, x = [Asks(6, 6) for _ in range(8)], torch.randn(4, 6, requires_grad=True)
    else:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        stages = [copy.deepcopy(layer).eval() for _ in range(8)]
        x = torch.randn(2, 3, 8, requires_grad=True)
    plain, model = nn.Sequential(*stages), recoup.Sequential(*stages, memory=memory)
    want = torch.autograd.grad(plain(x).sin().sum(), [x, *plain.parameters()])
    got = torch.autograd.grad(model(x).sin().sum(), [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_module_that_contains_itself():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh()))
    model[1].parent = model
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RecursionError):
        model.train()  # torch's own walks do not end either; ours does

    def call(x):
        return model[0](x).tanh()

    recoup.checkpoint(call, x).sum().backward()
    assert x.grad is not None
