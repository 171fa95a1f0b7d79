"""The drift guard: stiff chains whose inverses lose their way, against the plain run."""

from __future__ import annotations

import copy
import re
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import DriftError
from recoup.invertible import ActNorm, AdditiveCoupling, Chain, DriftGuard, Flip, InvertibleModule
from tests.invertible_zoo import stiff

pytestmark = pytest.mark.drifts


def couplings(depth, scale=3.0, kind=AdditiveCoupling, memory="constant", **options):
    return Chain(*stiff(depth, scale, kind), memory=memory, **options)


def data():
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


def gradients(chain, x):
    x = x.detach().requires_grad_()
    y, log_det = chain(x)
    loss = y.square().mean() + log_det.mean()
    found = torch.autograd.grad(loss, [x, *chain.parameters()])
    return torch.cat([gradient.flatten() for gradient in found])


def error(chain, x):
    plain = copy.deepcopy(chain)
    plain.memory = "linear"
    expected = gradients(plain, x)
    return float((gradients(chain, x) - expected).norm() / expected.norm())


def test_an_ordinary_net_is_let_alone_and_sixteen_bits_round_by_more():
    chain = couplings(30, scale=1.0)
    assert "nothing was inverted" in str(chain.drift)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert error(chain, data()) < 1e-5
    assert 0 < chain.drift.largest_error < 2e-5
    assert not chain.drift.kept
    chain, x = couplings(6).bfloat16(), data().bfloat16()
    with pytest.warns(UserWarning, match="Inverses in 16 bits round by more"):
        gradients(chain, x)
    gradients(chain, x)


Sharded = type("Sharded", (AdditiveCoupling,), {"unshard": None})  # as FSDP2 names its method


@pytest.mark.parametrize(
    ("options", "words"),
    [({"memory": recoup.schedules.constant(60)}, "keeps no"), ({"kind": Sharded}, "is sharded")],
)
def test_what_cannot_fall_back_is_an_error(options, words):
    with pytest.raises(DriftError, match=words):
        gradients(couplings(60, **options), data())


def test_a_stiff_net_is_right_and_what_is_printed_says_what_was_kept():
    assert error(couplings(60, drift="ignore"), data()) > 0.01  # what the guard is for
    guard, runs = DriftGuard(), [0]
    chain = couplings(60, drift=guard)
    chain[0].register_forward_hook(lambda *_: runs.append(runs.pop() + 1))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert error(chain, data()) < 1e-3
        runs.append(0)
    assert runs[1] < runs[0], "what was learned spares a recomputation"
    assert "states kept" in str(guard)
    guard.reset()
    assert not guard.kept


class OffBy(InvertibleModule):
    """A module whose inverse is off by what a function makes of the input."""

    def __init__(self, error):
        super().__init__()
        self.error, self.two = error, nn.Parameter(torch.full((), 2.0))

    def forward(self, x):
        return self.two * x, x.new_zeros(len(x))

    def inverse(self, y):
        return y / 2 + self.error(y / 2), y.new_zeros(len(y))


def test_the_error_that_is_reported_is_the_one_that_is_there():
    off = OffBy(lambda x: 0.1 * x.roll(1, 0))  # shared: its own gradient needs its input
    chain = Chain(off, Flip(), off, memory="constant", drift=DriftGuard("warn", 0.5))
    with pytest.warns(UserWarning, match="Inverses drifted"):  # once
        gradients(chain, torch.randn(8, 40))
    gradients(chain, torch.randn(8, 16, 32, 32))
    assert 0.02 < chain.drift.errors[2] < 0.5  # an estimate from eight numbers


def inverting(inverse):
    return type("Off", (AdditiveCoupling,), {"inverse": inverse})


def test_a_wrong_inverse_is_said():
    """R12: it hid behind the guard, at five times the bytes."""
    kind = inverting(lambda self, y: (AdditiveCoupling.inverse(self, y)[0] + 0.05, 0.0 * y[:, 0]))
    chain, x = couplings(24, scale=1.0, kind=kind), data()
    with pytest.warns(UserWarning, match="Most states of this chain must be kept") as caught:
        assert error(chain, x) < 1e-6
    assert len(caught) == 1
    text = str(caught[0].message)
    assert re.search(r"13 or more of 24.*the input of module `\d+` \(Off\), by [2-9].\de-02", text)
    guard = chain.drift
    for _ in range(2):  # once a chain, and what was seen stays to be read
        assert error(chain, x) < 1e-6
        assert 0.02 < guard.largest_error < 0.2
        assert set(guard.refused) == set(range(1, 24))
        assert re.search(r"refused and computed again: 23, off by up to [2-9].\de-02", str(guard))


@pytest.mark.parametrize("shape", [(2, 8), (4, 8), (3, 16), (210, 8), (64, 64)])
def test_an_inverse_that_is_off_by_one_number_is_seen(shape):
    """R12: signs that runs of values shared summed to zero, for some numbers of runs."""
    x = torch.randn(shape, requires_grad=True)
    chain = Chain(ActNorm(shape[1]).eval(), OffBy(lambda x: 0.05), memory="constant", drift="raise")
    y, _ = chain(x)
    with pytest.raises(DriftError) as caught:
        y.square().sum().backward()
    seen = float(re.search(r"add up to (\S+),", str(caught.value))[1])
    assert 0.015 < seen < 0.15, "to a factor of three"


def test_an_inverse_that_fails_is_computed_again_and_said_once():
    chain, x = couplings(6), data()
    fails = mock.Mock(side_effect=ArithmeticError("off by a rounding"))
    chain[3].__class__ = inverting(lambda self, y: fails())
    with pytest.warns(UserWarning, match="Inverting module `3`.*off by a rounding"):
        assert error(chain, x) < 1e-6
    assert error(chain, x) < 1e-6
    assert chain.drift.kept == {3}
    chain.drift = "raise"
    with pytest.raises(ArithmeticError, match="off by a rounding"):
        gradients(chain, x)
