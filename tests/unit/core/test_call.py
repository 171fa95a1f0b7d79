"""`recoup.checkpoint` where torch's is silent: right, or an error that names the culprit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recoup
from recoup.errors import ChangedError, RecoupError, ReplayError


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4)).double()


def leaf() -> Tensor:
    return torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


# -- facts 1.3 ------------------------------------------------------------------------------


def test_a_weight_changed_in_place():
    net, x = block(), leaf()
    y = recoup.checkpoint(net, x)
    with torch.no_grad():
        net[0].weight.mul_(2)
    with pytest.raises(ChangedError, match=r"`0\.weight`.*changed in place"):
        y.sum().backward()


def taken(x: Tensor, **others: Any) -> Tensor:
    for other in others.values():
        each = other[0] if isinstance(other, (list, tuple)) else other
        each = each["k"] if isinstance(each, dict) else each
        x = (x * each).sin()
    return x


@pytest.mark.parametrize("form", [lambda t: t, lambda t: [t], lambda t: (t,), lambda t: {"k": t}])
def test_a_keyword_argument_changed_in_place(form: Callable[[Tensor], Any]):
    x, other = leaf(), torch.randn(4, dtype=torch.float64)
    y = recoup.checkpoint(taken, x, other=form(other))
    other.add_(1)
    with pytest.raises(ChangedError, match=r"checkpointed call of taken.*changed in place"):
        y.sum().backward()


def test_a_tensor_of_a_closure_changed_in_place():
    x, other = leaf(), torch.randn(4, dtype=torch.float64)
    y = recoup.checkpoint(lambda x: (x * other).sin(), x)
    other.add_(1)
    with pytest.raises(ChangedError, match=r"`other`.*changed in place"):
        y.sum().backward()


def test_a_number_of_a_closure_changed():
    x, scale = leaf(), 2.0
    y = recoup.checkpoint(lambda x: (x * scale).sin(), x)
    scale = 3.0
    with pytest.raises(ChangedError, match=r"`scale`.*another value"):
        y.sum().backward()


def test_the_mode_changed():
    net, x = block(), leaf()
    y = recoup.checkpoint(net, x)
    net.eval()
    with pytest.raises(ChangedError, match="training mode"):
        y.sum().backward()


def test_a_buffer_changed():
    x = leaf()
    norm = nn.BatchNorm1d(4).double().eval()
    y = recoup.checkpoint(norm, x)
    norm.running_mean.add_(1)
    with pytest.raises(ChangedError, match="`running_mean`"):
        y.sum().backward()


def test_a_norm_counts_once():
    norm, same = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    x = leaf()
    same(x).sin().sum().backward()
    recoup.checkpoint(norm, x).sin().sum().backward()
    assert int(norm.num_batches_tracked) == 1
    assert torch.equal(norm.running_var, same.running_var)


def by_generator() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda x: x.sin() * torch.rand(4, generator=generator, dtype=torch.float64)


def by_numpy() -> Callable[[Tensor], Tensor]:
    return lambda x: x.sin() * float(np.random.rand())


def by_python() -> Callable[[Tensor], Tensor]:
    return lambda x: x.sin() * random.random()


def by_a_numpy_generator() -> Callable[[Tensor], Tensor]:
    generator = np.random.default_rng(0)
    return lambda x: x.sin() * generator.random()


def by_a_python_generator() -> Callable[[Tensor], Tensor]:
    generator = random.Random(0)
    return lambda x: x.sin() * generator.random()


def through_a_wrapper() -> Callable[[Tensor], Tensor]:
    def wrapped(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: fn(x)

    recoup.checkpoint(wrapped(torch.sin), leaf())  # this code is looked at, and draws nothing
    return wrapped(lambda x: x.sin() * random.random())


SOURCES: list[Any] = [
    by_generator,
    by_numpy,
    by_python,
    by_a_numpy_generator,
    by_a_python_generator,
    through_a_wrapper,
]


@pytest.mark.parametrize("make", SOURCES)
def test_numbers_from_elsewhere(make: Callable[[], Any]):
    with pytest.raises(ReplayError, match="draws from"):
        recoup.checkpoint(make(), leaf()).sum().backward()


@pytest.mark.parametrize("start", [None, 0])
@pytest.mark.parametrize("draws", [True, False])
def test_the_first_use_of_numpys_generators(monkeypatch, start, draws):
    """Numpy imports them when they are first used: there is no state before it to compare with."""
    np.random.set_state(np.random.RandomState(start).get_state())  # as after the import
    monkeypatch.delitem(sys.modules, "numpy.random")

    def fn(x: Tensor) -> Tensor:
        sys.modules["numpy.random"] = np.random
        return x.sin() * (np.random.normal() if draws else 2.0)

    with pytest.raises(ReplayError, match="draws from numpy") if draws else nullcontext():
        recoup.checkpoint(fn, leaf()).sum().backward()


def test_the_default_generator_is_replayed():
    x = leaf()
    torch.manual_seed(5)
    F.dropout(x.sin(), 0.5).exp().sum().backward()
    wanted, x.grad, stream = x.grad, None, torch.get_rng_state()
    torch.manual_seed(5)
    y = recoup.checkpoint(lambda x: F.dropout(x.sin(), 0.5).exp(), x)
    torch.rand(3)
    y.sum().backward()
    assert torch.equal(x.grad, wanted)
    torch.manual_seed(5)
    recoup.checkpoint(lambda x: F.dropout(x.sin(), 0.5).exp(), x).sum().backward()
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_layer_replaced():
    net, x = block(), leaf()
    y = recoup.checkpoint(net, x)
    net[0] = nn.Linear(4, 8).double()
    with pytest.raises(ChangedError, match="replaced"):
        y.sum().backward()


def test_the_memory_of_a_weight_replaced():
    net, x = block(), leaf()
    y = recoup.checkpoint(net, x)
    net[0].weight.data = 2 * net[0].weight.data
    with pytest.raises(ChangedError, match=r"`0\.weight`"):
        y.sum().backward()


# -- facts 1.3 and 1.4: what must work -------------------------------------------------------


def test_gradients_of_gradients():
    net, x = block().eval(), leaf()
    assert torch.autograd.gradgradcheck(lambda x: recoup.checkpoint(net, x), (x,))


def test_two_partial_gradients():
    net, x = block().eval(), leaf()
    wanted = torch.autograd.grad(net(x).sum(), [x, net[0].weight])
    y = recoup.checkpoint(net, x).sum()
    (first,) = torch.autograd.grad(y, [x], retain_graph=True)
    (second,) = torch.autograd.grad(y, [net[0].weight])
    assert torch.equal(first, wanted[0])
    assert torch.equal(second, wanted[1])


def test_transforms_say_so():
    net, x = block().eval(), leaf().detach()
    with pytest.raises(RecoupError, match=r"torch\.func"):
        torch.func.grad(lambda x: recoup.checkpoint(net, x).sum())(x)


def test_autocast_with_a_weight_shared_across_regions():
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)

    def step(call: Callable[..., Tensor]) -> list[Tensor]:
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(net, call(net, call(net, x).tanh()).tanh())
        y.float().sum().backward()
        found, x.grad = [net.weight.grad, net.bias.grad, x.grad], None
        return found

    wanted = step(lambda net, x: net(x))
    assert all(map(torch.equal, step(recoup.checkpoint), wanted))


def test_an_optimizer_in_backward_with_a_shared_weight():
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    fired: list[int] = []
    net.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    y = x
    for _ in range(3):
        y = recoup.checkpoint(net, y)
    y.sum().backward()
    assert fired == [1]


def test_shapes_that_depend_on_data():
    """As the rows of an expert do; a router that draws must choose as it did."""
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4).double(), leaf()

    def routed(x: Tensor) -> Tensor:
        rows = torch.rand(3).gt(0.3).nonzero().squeeze(-1)
        return x.index_add(0, rows, net(x[rows]).sin())

    torch.manual_seed(3)
    routed(x).sum().backward()
    wanted, x.grad = x.grad, None
    torch.manual_seed(3)
    y = recoup.checkpoint(routed, x)
    torch.rand(10)
    y.sum().backward()
    assert torch.equal(x.grad, wanted)


def test_an_exception_leaves_nothing_in_force():
    def fails(x: Tensor) -> Tensor:
        x.sin()
        raise ZeroDivisionError

    x = leaf()
    with pytest.raises(ZeroDivisionError):
        recoup.checkpoint(fails, x)
    autograd: Any = torch._C._autograd
    assert autograd._top_saved_tensors_default_hooks(False) is None
    x.sin().sum().backward()
    assert torch.equal(x.grad, x.cos())
