from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup.errors import ChangedError, ReplayError
from recoup.invertible import Chain, InvertibleModule
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


def test_an_inverse_that_does_not_undo_forward_in_shape():
    class Wrong(Shift):
        def inverse(self, y):
            x, log_det = super().inverse(y)
            return x[:, :5], log_det

    model = Chain(Shift(), Wrong(), memory="constant").double()
    with pytest.raises(ReplayError, match=r"An inverse must undo forward"):
        loss_of_all(model(leaf(4, 6))).backward()


def test_an_inverse_that_changes_what_it_is_given():
    class Changes(Shift):
        def inverse(self, y):
            y[:, 3:] -= self.evaluate(self.network, y[:, :3])
            return y, y.new_zeros(len(y))

    model = Chain(Shift(), Changes(), memory="constant").double()
    with pytest.raises(ReplayError, match=r"`inverse` of module `1` .* changed its input in place"):
        loss_of_all(model(leaf(4, 6))).backward()


class ScalesBuffer(Shift):
    """Its inverse changes a buffer that forward reads, but that autograd does not save."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def there(self, a):
        return self.evaluate(self.network, a).sin() + self.scale

    back = there

    def inverse(self, y):
        self.scale.add_(1.0)
        return super().inverse(y)


def test_an_inverse_that_changes_a_buffer_is_an_error():
    chain = Chain(Shift(), ScalesBuffer(), Shift(), memory="constant").double()
    loss = loss_of_all(chain(leaf(2, 6)))
    with pytest.raises(ChangedError, match="`scale` of module `1`"):
        loss.backward()
    assert hooks_in_force() is None
