from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from recoup.errors import ReplayError
from recoup.invertible import AffineCoupling, Chain, InvertibleConv1x1, InvertibleModule
from tests.oracle import assert_same_step, hooks_in_force, loss_of_all, run_step
from tests.zoo import leaf, net


class Shift(InvertibleModule):
    """A coupling whose parts can be replaced."""

    def __init__(self):
        super().__init__()
        self.network = net(3, 3)
        self.other = net(3, 3)

    def there(self, a):
        return self.evaluate(self.network, a)

    def back(self, a):
        return self.evaluate(self.network, a)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        return torch.cat([a, b + self.there(a)], dim=1), x.new_zeros(len(x))

    def inverse(self, y):
        a, b = y.chunk(2, dim=1)
        return torch.cat([a, b - self.back(a)], dim=1), y.new_zeros(len(y))


class Pairs(nn.Module):
    """A network that returns two tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        return y.tanh(), y.sin()


class ReturnsTwo(Shift):
    def __init__(self):
        super().__init__()
        self.network = Pairs()

    def there(self, a):
        one, two = self.evaluate(self.network, a)
        return one * two

    back = there


class NotInInverse(Shift):
    def back(self, a):
        return self.network(a)


class NotInForward(Shift):
    def there(self, a):
        return self.network(a)


class MoreInInverse(Shift):
    """The inverse looks at the network once more than forward does, with other inputs."""

    def inverse(self, y):
        self.evaluate(self.network, y[:, 3:])
        return super().inverse(y)


class InPlaceOnOutput(Shift):
    def there(self, a):
        return self.evaluate(self.network, a).mul_(2.0)

    back = there


class SameInputTwice(Shift):
    def there(self, a):
        return self.evaluate(self.network, a) + self.evaluate(self.other, a)

    def back(self, a):
        return self.evaluate(self.other, a) + self.evaluate(self.network, a)


class WithoutGrad(Shift):
    def there(self, a):
        with torch.no_grad():
            fixed = self.evaluate(self.other, a)
        return self.evaluate(self.network, a) * fixed

    back = there


def right_or_error(kind, error=ReplayError):
    torch.manual_seed(0)
    model, x = Chain(*(kind() for _ in range(3))).double(), leaf(4, 6)
    want = run_step(model, x, memory="linear")
    try:
        got = run_step(model, x, memory="constant")
    except error as raised:
        assert hooks_in_force() is None
        return str(raised)
    assert_same_step(got, want, rtol=1e-10)
    return "right"


@pytest.mark.parametrize("kind", [Shift, SameInputTwice, WithoutGrad, ReturnsTwo])
def test_right(kind):
    assert right_or_error(kind, error=()) == "right"


@pytest.mark.parametrize("kind", [NotInInverse, NotInForward, MoreInInverse, InPlaceOnOutput])
def test_right_or_an_error_that_names_the_module(kind):
    said = right_or_error(kind)
    assert said == "right" or kind.__name__ in said


class WrongShape(Shift):
    def inverse(self, y):
        x, log_det = super().inverse(y)
        return x[:, :5], log_det


class Changes(Shift):
    def inverse(self, y):
        y[:, 3:] -= self.evaluate(self.network, y[:, :3])
        return y, y.new_zeros(len(y))


@pytest.mark.parametrize(
    ("kind", "said"),
    [(WrongShape, "must undo forward"), (Changes, "of module `1` .* changed its input in place")],
)
def test_an_inverse_that_is_none(kind, said):
    model = Chain(Shift(), kind(), memory="constant").double()
    with pytest.raises(ReplayError, match=said):
        loss_of_all(model(leaf(4, 6))).backward()


class Turned(InvertibleModule):
    """The same values, in another memory layout, which the inverse does not undo."""

    def forward(self, x):
        return x.transpose(0, 1).contiguous().transpose(0, 1), x.new_zeros(len(x))

    def inverse(self, y):
        return y.contiguous(memory_format=torch.channels_last), y.new_zeros(len(y))


class Draws(InvertibleModule):
    """It draws on its own, not in a network that is evaluated."""

    def forward(self, x):
        return x + functional.dropout(torch.ones_like(x), 0.4), x.new_zeros(len(x))

    def inverse(self, y):
        return y - functional.dropout(torch.ones_like(y), 0.4), y.new_zeros(len(y))


def dropping_coupling():
    return AffineCoupling(nn.Sequential(nn.Dropout(0.4), nn.Conv2d(2, 4, 3, padding=1)))


@pytest.mark.parametrize("part", [Draws, dropping_coupling])
def test_masks_do_not_depend_on_the_memory_layout_that_an_inverse_leaves(part):
    torch.manual_seed(0)
    parts = [InvertibleConv1x1(4), part(), Turned(), part(), InvertibleConv1x1(4)]
    chain = Chain(*parts, drift="raise").double()
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    plain = run_step(chain, x, memory="linear")
    assert_same_step(run_step(chain, x, memory="constant"), plain, rtol=1e-10)


class Scales(Shift):
    """It scales by numbers that `then` computes, with dropout in the network."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3))

    def scale_and_log_det(self, values):
        log_scale = values.tanh()
        return log_scale.exp(), log_scale.sum(1)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        scale, log_det = self.evaluate(self.network, a, then=self.scale_and_log_det)
        return torch.cat([a, b * scale], dim=1), log_det

    def inverse(self, y):
        a, b = y.chunk(2, dim=1)
        scale, log_det = self.evaluate(self.network, a, then=self.scale_and_log_det)
        return torch.cat([a, b / scale], dim=1), -log_det


def test_what_is_computed_from_an_output_is_a_part_of_the_evaluation():
    chain = Chain(Scales(), Shift(), Scales(), drift="raise").double()
    x = leaf(4, 6)
    plain = run_step(chain, x, memory="linear")
    assert_same_step(run_step(chain, x, memory="constant"), plain, rtol=1e-10)


@pytest.mark.parametrize("expanded", [(3, 1, 6, 6), (1, 4, 6, 6), (1, 1, 6, 1)])
def test_masks_of_an_expanded_input(expanded):
    torch.manual_seed(0)
    chain = Chain(*[dropping_coupling() for _ in range(3)], drift="raise").double()
    x = torch.randn(expanded, dtype=torch.float64).expand(3, 4, 6, 6)
    found = []
    for memory in ("linear", "constant"):
        chain.memory = memory
        torch.manual_seed(1)
        found.append(torch.autograd.grad(loss_of_all(chain(x)), [*chain.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
