"""Networks that forward and inverse of a module share: right, or an error that names the module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup._core.settings import replaced
from recoup._core.shared_evaluation import answers, evaluate, lending
from recoup._core.surroundings import Surroundings
from recoup.errors import RecoupError, ReplayError
from recoup.invertible import AdditiveCoupling, Chain, InvertibleModule
from tests.invertible_zoo import Direct, net
from tests.oracle import assert_same_step, loss_of_all, run_step
from tests.zoo import Fn, leaf


class Shift(InvertibleModule):
    """A coupling: forward adds `there(self, a)` to a half, and the inverse subtracts `back`."""

    def __init__(self, there, back=None, network=None):
        super().__init__()
        self.network, self.other = network or net(3, 3), net(3, 3)
        self.there, self.back = there, back or there

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        return torch.cat([a, b + self.there(self, a)], dim=1), x.new_zeros(len(x))

    def inverse(self, y):
        a, b = y.chunk(2, dim=1)
        return torch.cat([a, b - self.back(self, a)], dim=1), y.new_zeros(len(y))


def shared(m, a):
    return m.evaluate(m.network, a)


def direct(m, a):
    return m.network(a)


def times_one_without_gradient(m, a):
    with torch.no_grad():
        fixed = m.evaluate(m.other, a)
    return m.evaluate(m.network, a) * fixed


def force(m, a):
    with torch.enable_grad():
        z = a.detach().requires_grad_()
        return torch.autograd.grad(m.network(z).sum(), z, create_graph=True)[0]


def one_network_twice():
    network = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    return AdditiveCoupling(network, network)


RIGHT = {
    "shared": lambda: Shift(shared),
    "two in another order": lambda: Shift(
        lambda m, a: m.evaluate(m.network, a) + m.evaluate(m.other, a),
        lambda m, a: m.evaluate(m.other, a) + m.evaluate(m.network, a),
    ),
    "without a gradient": lambda: Shift(times_one_without_gradient),
    "two outputs": lambda: Shift(
        lambda m, a: torch.mul(*m.evaluate(m.network, a)),
        network=Fn(lambda x, linear: ((y := linear(x)).tanh(), y.sin()), nn.Linear(3, 3)),
    ),
    "a force": lambda: Shift(force),
}
PERHAPS = {  # with what an error must say
    "not in inverse": (lambda: Shift(shared, direct), "Shift"),
    "not in forward": (lambda: Shift(direct, shared), "Shift"),
    "more in inverse": (
        lambda: Shift(shared, lambda m, a: (m.evaluate(m.network, 2 * a), shared(m, a))[1]), "Shift"
    ),
    "output changed in place": (lambda: Shift(lambda m, a: shared(m, a).mul_(2.0)), "Shift"),
    "draws without evaluate": (lambda: Direct(0.5), "Direct"),
    "draws in another order": (lambda: Direct(0.5, both=True), "Direct"),
    "draws twice": (one_network_twice, "Use two networks"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*RIGHT, *PERHAPS])
def test_right_or_an_error_that_names_the_module(kind):
    torch.manual_seed(0)
    make, said = PERHAPS.get(kind) or (RIGHT[kind], "")
    model = Chain(*(make() for _ in range(3))).double()
    x = leaf(4, 6)
    want = run_step(model, x, memory="linear")
    try:
        got = run_step(model, x, memory="constant")
    except RecoupError as raised:
        error = str(raised)
    else:
        assert_same_step(got, want, rtol=1e-10)
        return
    assert kind in PERHAPS
    assert said in error


class WrongShape(Shift):
    words = "must undo forward"

    def inverse(self, y):
        x, log_det = super().inverse(y)
        return x[:, :5], log_det


class Changes(Shift):
    words = "of module `1` .* changed its input in place"

    def inverse(self, y):
        y[:, 3:] -= self.evaluate(self.network, y[:, :3])
        return y, y.new_zeros(len(y))


@pytest.mark.parametrize("kind", [WrongShape, Changes])
def test_an_inverse_that_is_none(kind):
    model = Chain(Shift(shared), kind(shared), memory="constant").double()
    with pytest.raises(ReplayError, match=kind.words):
        loss_of_all(model(leaf(4, 6))).backward()


def test_a_network_that_is_lent_is_no_culprit():
    network = nn.Linear(2, 2)
    before = Surroundings("a region", [network], network)
    with replaced(answers, "answer", evaluate), lending([network]):
        assert before.culprit() == ""
        network.register_forward_hook(print)
        assert "hooks of its modules" in before.culprit()
