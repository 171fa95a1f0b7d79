from __future__ import annotations

import pytest
import torch

from recoup.invertible import AdditiveCoupling, Chain, Flatten, check_invertible


def test_order_is_that_of_memory():
    x = torch.arange(24.0).view(2, 3, 2, 2)
    y, log_det = Flatten((3, 2, 2))(x)
    assert torch.equal(y, torch.arange(24.0).view(2, 12))
    assert log_det.tolist() == [0.0, 0.0]
    back, log_det = Flatten((3, 2, 2)).inverse(y)
    assert torch.equal(back, x)
    assert log_det.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(3,), (1, 1, 1), (2, 3), (1, 2, 1, 3)])
def test_any_shape(shape):
    x = torch.randn(3, *shape)
    assert check_invertible(Flatten(shape), x)
    empty, log_det = Flatten(shape)(x[:0])
    assert log_det.shape == (0,)
    assert Flatten(shape).inverse(empty)[0].shape == x[:0].shape


def test_input_that_is_not_contiguous():
    x = torch.randn(2, 4, 3).transpose(1, 2)
    layer = Flatten((3, 4))
    y, _ = layer(x)
    assert torch.equal(layer.inverse(y)[0], x)


@pytest.mark.parametrize("memory", ["linear", "sqrt", "constant"])
def test_a_chain_goes_through_it(memory):
    torch.manual_seed(0)
    chain = Chain(
        Flatten((2, 2, 2)), AdditiveCoupling(torch.nn.Linear(4, 4)), memory=memory
    ).double()
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    y, _ = chain(x)
    y.pow(3).sum().backward()
    gradient = chain[1].network.weight.grad
    chain.memory = "linear"
    chain.zero_grad()
    before, x.grad = x.grad, None
    chain(x)[0].pow(3).sum().backward()
    torch.testing.assert_close(chain[1].network.weight.grad, gradient)
    torch.testing.assert_close(x.grad, before)


def test_unsuitable_arguments_are_refused():
    with pytest.raises(ValueError, match=r"`shape` is \(\)"):
        Flatten(())
    with pytest.raises(ValueError, match=r"`shape` is \(2, 0\)"):
        Flatten((2, 0))
    with pytest.raises(ValueError, match=r"`x` has shape \(1, 4\), .* needs \(N, 2, 2\)"):
        Flatten((2, 2))(torch.zeros(1, 4))
    with pytest.raises(ValueError, match=r"`y` has shape \(1, 5\), .* needs \(N, 4\)"):
        Flatten((2, 2)).inverse(torch.zeros(1, 5))


def test_repr_shows_the_shape():
    assert repr(Flatten((1, 8, 8))) == "Flatten((1, 8, 8))"
