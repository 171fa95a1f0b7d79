"""Recorded operators: which of them run again, and what cannot."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup._core.operators import traits_of
from recoup.errors import ReplayError

aten = torch.ops.aten


class Seen(TorchDispatchMode):
    """The names of the operators that run within."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def a():
    return torch.randn(6, 6).requires_grad_()


def seeded_between(a):
    torch.rand(6, 6)
    torch.manual_seed(1)
    return a * torch.rand(6, 6)


def with_changes(a):
    other = a.cos()
    other.mul_(2)
    return a.sin(), other


def two_values(a):
    w = a.tanh()
    return w, w.exp()


AGAIN = {  # what makes the values, how many of them are used, and how often what runs again
    "what is asked for": (lambda a: (a.sin(), a.detach().cosh()), 1, {"sin": 1, "cosh": 0}),
    "draws before it": (lambda a: a * (torch.rand(6, 6), torch.rand(6, 6))[1], 1, {"rand": 2}),
    "no other draw": (seeded_between, 1, {"rand": 1}),
    "no reads": (lambda a: a * a.abs().max().item(), 1, {"_local_scalar_dense": 0, "max": 0}),
    "no changes": (with_changes, 1, {"mul_": 0}),
    "once for all": (two_values, 2, {"tanh": 1, "exp": 1}),
    "not the last product": (lambda a: a.exp() @ a.detach(), 0, {"exp": 1, "mm": 1}),
    "nothing": (lambda a: a.repeat(2, 1), 0, {"repeat": 0}),
}


@pytest.mark.parametrize("name", AGAIN)
def test_what_runs_again(a, name):
    make, num_used, want = AGAIN[name]
    with recoup.recomputing():
        made = make(a)
    made = made if isinstance(made, tuple) else (made,)
    loss = sum(w.sum() for w in made) + sum((w * w).sum() for w in made[:num_used])
    with Seen() as seen:
        loss.backward()
    assert {op: seen.names.count(op) for op in want} == want


def test_what_is_known_of_operators():
    assert traits_of(aten.native_batch_norm.default).writes >= {3, 4}  # no schema says so
    assert traits_of(aten.add.out).writes == {"out"}
    assert traits_of(aten.t.default).is_view
    assert not traits_of(aten.add_.Tensor).is_view
    assert not traits_of(aten.add_.Tensor).overwrites
    assert traits_of(aten.native_dropout.default).may_draw
    assert not traits_of(aten.mm.default).may_draw


def cond(h):
    return torch.ops.higher_order.cond(torch.tensor(True), lambda t: (t * 2,), lambda t: (t,), (h,))


def told_to_all(h):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(h)
    finally:
        dist.destroy_process_group()  # in backward there is nobody to talk to
    return (h,)


@pytest.mark.parametrize("call", [cond, told_to_all])
def test_results_that_no_operator_can_make_again(a, call):
    with recoup.recomputing():
        with torch.no_grad():
            noise = torch.rand(6, 6)
            (h,) = call(noise)
        w = (a * h + noise).exp()
    assert type(h) is torch.Tensor
    w.sum().backward()
    assert torch.allclose(a.grad, (a * h + noise).exp() * h)


def test_memory_that_was_freed_since(a):
    given = a.detach().clone()
    with recoup.recomputing():
        h = (given * 2).sin()
    loss = (a * h).sum()
    given.untyped_storage().resize_(0)
    with pytest.raises(ReplayError, match="was freed before backward"):
        loss.backward()


def test_an_operator_that_does_not_do_the_same(a):
    sizes = iter((6, 5))
    library = torch.library.Library("recoup_test", "FRAGMENT")
    library.define("fickle(Tensor x) -> Tensor")
    library.impl("fickle", lambda x: x.new_zeros(next(sizes), 6), "CompositeExplicitAutograd")
    with recoup.recomputing():
        h = torch.ops.recoup_test.fickle(a.detach())
    with pytest.raises(ReplayError, match="returned another tensor than in the first run"):
        (a * h).sum().backward()
