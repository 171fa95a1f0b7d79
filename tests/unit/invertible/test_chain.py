from __future__ import annotations

import pytest
import torch
from torch import nn

from recoup.errors import NotInvertibleError
from recoup.invertible import (
    AdditiveCoupling,
    Chain,
    Flip,
    InvertibleResidual,
    LipschitzLinear,
    Split,
)
from recoup.schedules import constant, sqrt
from tests.oracle import loss_of_all
from tests.zoo import INVERTIBLE, invertible_chain_of, leaf, net


@pytest.mark.parametrize("memory", ["linear", "constant", "sqrt"])
@pytest.mark.parametrize("name", sorted(INVERTIBLE))
def test_the_inverse_undoes_forward(name, memory):
    modules, x = invertible_chain_of(name)
    model = Chain(*modules, memory=memory)
    model(x)  # ActNorm starts
    model.eval()
    y, log_det = model(x)
    back, undone = model.inverse(y)
    torch.testing.assert_close(back, x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(log_det + undone, torch.zeros_like(log_det), rtol=0, atol=1e-9)
    assert log_det.shape == (len(x),)


@pytest.mark.parametrize("name", ["couplings", "glow", "multi-scale", "split first and last"])
def test_log_det_is_that_of_the_jacobian(name):
    modules, x = invertible_chain_of(name)
    model = Chain(*modules)
    model(x)
    model.eval()
    one = x[:1].detach()

    def flat(v):
        y, _ = model(v.view_as(one))
        parts = y if isinstance(y, tuple) else (y,)
        return torch.cat([part.flatten() for part in parts])

    jacobian = torch.autograd.functional.jacobian(flat, one.flatten())
    assert jacobian.shape == (one.numel(), one.numel())
    torch.testing.assert_close(model(one)[1][0], torch.linalg.slogdet(jacobian)[1])


def test_latents_come_in_the_order_they_were_split_off():
    chain = Chain(Split(), Split(), Flip())
    (first, second, last), _ = chain(torch.arange(8.0).view(1, 8))
    assert first.tolist() == [[4.0, 5.0, 6.0, 7.0]]
    assert second.tolist() == [[2.0, 3.0]]
    assert last.tolist() == [[1.0, 0.0]]


def test_what_is_not_invertible_is_refused():
    with pytest.raises(ValueError, match=r"`modules\[1\]` is a Tanh"):
        Chain(Flip(), nn.Tanh())


@pytest.mark.parametrize("memory", ["square", 0, 1.5, None, True])
def test_an_unknown_mode(memory):
    with pytest.raises(ValueError, match=r"`memory`|`slots`"):
        Chain(Flip(), Flip(), memory=memory)


def test_a_schedule_for_another_length():
    with pytest.raises(ValueError, match=r"for 3 stages, but the chain has 2"):
        Chain(Flip(), Flip(), memory=sqrt(3))
    with pytest.raises(ValueError, match=r"for 3 stages, but the chain has 2"):
        Chain(Flip(), Flip()).memory = constant(3)


def test_an_empty_chain_is_the_identity():
    x = leaf(4, 6)
    y, log_det = Chain(memory="constant")(x)
    assert torch.equal(x, y)
    assert log_det.dtype is x.dtype
    assert log_det.tolist() == [0.0] * 4


def test_a_loss_that_needs_no_chain():
    """A chain without parameters whose input asks for no gradient has nothing to do."""
    y, log_det = Chain(Flip(), Flip(), memory="constant")(torch.ones(2, 4))
    assert not y.requires_grad
    assert not log_det.requires_grad


def test_modes_by_assignment():
    torch.manual_seed(0)
    model, x = Chain(*(AdditiveCoupling(net(3, 3)).double() for _ in range(4))), leaf(4, 6)
    found = []
    for memory in ("linear", "constant", 2, "sqrt", constant(4), "linear"):
        model.memory = memory
        found.append(torch.autograd.grad(loss_of_all(model(x)), x)[0])
    for value in found[1:]:
        torch.testing.assert_close(value, found[0], rtol=1e-10, atol=1e-12)
    assert torch.equal(found[0], found[-1])


def test_an_error_of_invertibility_is_a_value_error():
    assert issubclass(NotInvertibleError, ValueError)


def test_constant_memory_says_what_it_recomputes():
    block = InvertibleResidual(nn.Sequential(LipschitzLinear(4, 4), nn.ELU()))
    chain = Chain(Flip(), block, Flip(), block)
    with pytest.warns(UserWarning, match=r"2 of 4 modules \(`1`, `3`\) are recomputed"):
        chain.memory = "constant"
    x = torch.randn(3, 4, requires_grad=True)
    y, log_det = chain(x)
    (y.square().sum() + log_det.sum()).backward()
    given, x.grad = x.grad, None
    chain.memory = "linear"
    y, log_det = chain(x)
    (y.square().sum() + log_det.sum()).backward()
    torch.testing.assert_close(given, x.grad)
