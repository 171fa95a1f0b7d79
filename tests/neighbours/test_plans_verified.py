"""A plan whose step is not the measured one cannot be returned (F1)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.errors import BudgetError, ReplayError
from recoup.planning.operators import KeptTensor
from recoup.planning.verification import Verification, outcome_of
from tests.neighbours.planned import Block, Net, assert_same, loss_of, plan_for, result_of


def budget_in_the_middle(model: nn.Module, x: Tensor) -> int:
    whole = recoup.plan(model, x, budget="1 GiB", loss=loss_of)
    return (whole.least_bytes + whole.most_bytes) // 2


def test_f1_products_that_are_kept_wrong_are_not_planned(monkeypatch: pytest.MonkeyPatch):
    """As if a write to what is kept had gone unseen."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(64, 32)
    plain = result_of(model, lambda: loss_of(model(x)).backward())
    budget = budget_in_the_middle(model, x)
    ways = {row.way for row in recoup.plan(model, x, budget=budget, loss=loss_of).blocks}
    assert "keep products" in ways
    get = KeptTensor.get
    monkeypatch.setattr(KeptTensor, "get", lambda self: get(self).mul_(1.01))
    with pytest.warns(UserWarning, match="keeps no results of products"):
        plan = recoup.plan(model, x, budget=budget, loss=loss_of)
    assert "keep products" not in {row.way for row in plan.blocks}
    with plan.applied():
        assert_same(result_of(model, lambda: loss_of(model(x)).backward()), plain)


calls: list[int] = []


class Counts(Block):
    """Reads Python state that changes from run to run, where nobody looks."""

    def forward(self, x: Tensor) -> Tensor:
        calls.append(1)
        return super().forward(x) * (1.0 + 0.1 * (len(calls) % 97))


def test_f1_a_model_whose_steps_differ_is_refused():
    torch.manual_seed(0)
    model, x = Net(block=Counts), torch.randn(64, 32)
    with pytest.raises(ReplayError, match=r"gradient of parameter `.*` by about .* leave that"):
        plan_for(model, x)


def test_f1_gradients_of_arguments_are_compared(monkeypatch: pytest.MonkeyPatch):
    """Parameters want no gradients here."""
    torch.manual_seed(0)
    model = Net().requires_grad_(False)
    x = torch.randn(64, 32, requires_grad=True)
    budget = budget_in_the_middle(model, x)
    get = KeptTensor.get
    monkeypatch.setattr(KeptTensor, "get", lambda self: get(self).mul_(1.01))
    with pytest.warns(UserWarning, match="keeps no results of products"):
        recoup.plan(model, x, budget=budget, loss=loss_of)
    assert x.grad is None


class WritesToItsInput(Block):
    """Changes what it is given where no version counter sees it, also when it runs again."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.tanh_()
        return super().forward(x)


@pytest.mark.slow
def test_f1_blocks_that_are_wrong_whenever_they_run_again_are_kept_or_refused():
    """The measured step shows it, in which they run again."""
    why = r"block `blocks\.\d` again .* did not repeat"
    torch.manual_seed(0)
    model, x = Net(block=WritesToItsInput), torch.randn(64, 32)
    plain = result_of(model, lambda: loss_of(model(x)).backward())
    with pytest.warns(UserWarning, match=why):
        plan = recoup.plan(model, x, budget="1 GiB", loss=loss_of)
    with plan.applied():
        assert_same(result_of(model, lambda: loss_of(model(x)).backward()), plain)
    with pytest.raises(BudgetError, match=why):
        recoup.plan(model, x, budget="64 KiB", loss=loss_of)
    assert_same(result_of(model, lambda: loss_of(model(x)).backward()), plain)


@pytest.mark.slow
def test_f1_without_room_the_measured_step_is_compared(monkeypatch: pytest.MonkeyPatch):
    blocks = importlib.import_module("recoup.planning.priced_blocks")
    monkeypatch.setattr(blocks, "has_room", lambda device, num_bytes: False)
    torch.manual_seed(0)
    model, x = Net(block=Counts), torch.randn(64, 32)
    with pytest.raises(ReplayError, match="differs from the measured one"):
        plan_for(model, x)
    plan_for(Net(), x)


# -- sketches ------------------------------------------------------------------------------

N = 600_001


def _with_gradient(change: Callable[[Tensor], Any]) -> nn.Module:
    torch.manual_seed(3)
    module = nn.Linear(1, N)
    gradient = torch.randn(N, 1)
    with torch.no_grad():
        change(gradient)
    module.weight.grad = gradient
    return module


def _swap_far(g: Tensor) -> None:
    g[[5, N - 5]] = g[[N - 5, 5]]


def _swap_rows(g: Tensor) -> None:
    g[: 2**12], g[2**12 : 2**13] = g[2**12 : 2**13].clone(), g[: 2**12].clone()


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "one entry": lambda g: g[17].add_(1.0),
    "two entries swapped": _swap_far,
    "rows swapped": _swap_rows,
    "a sum that stays": lambda g: g[:2].add_(torch.tensor([[1.0], [-1.0]])),
    "the sign": lambda g: g.neg_(),
    "a part in a thousand": lambda g: g.mul_(1.001),
    "not a number": lambda g: g[-1].fill_(float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_f1_a_sketch_tells(change: str):
    verification = Verification()
    verification.expect(outcome_of(_with_gradient(lambda g: None), ()), is_plain=True)
    rounded = outcome_of(_with_gradient(lambda g: g.mul_(1 + 1e-7)), ())
    assert verification.difference(rounded) is None
    found = verification.difference(outcome_of(_with_gradient(CHANGES[change]), ()))
    assert found is not None
    assert "gradient of parameter `weight`" in found


def test_f1_what_a_step_differs_from_itself_by_is_allowed():
    verification = Verification()
    verification.expect(outcome_of(_with_gradient(lambda g: None), ()), is_plain=True)
    verification.expect_again(outcome_of(_with_gradient(lambda g: g[17].add_(1.0)), ()))
    like_it = outcome_of(_with_gradient(lambda g: g[17].add_(2.0)), ())
    assert verification.difference(like_it) is None
    unlike_it = outcome_of(_with_gradient(lambda g: g[17].add_(100.0)), ())
    assert verification.difference(unlike_it) is not None


def test_f1_the_plain_step_takes_the_place_of_the_measured_one():
    measured, plain = (
        outcome_of(_with_gradient(change), ())
        for change in (lambda g: None, lambda g: g[17].add_(1.0))
    )
    verification = Verification()
    verification.expect(measured, is_plain=False)
    assert verification.difference(plain) is not None
    verification.expect(plain, is_plain=True)
    verification.expect(measured, is_plain=False)
    assert verification.difference(plain) is None
    assert verification.difference(measured) is not None


def test_f1_gradients_that_are_missing_sparse_or_complex():
    module = nn.Embedding(20, 4, sparse=True)
    module.other = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    module.register_buffer("count", torch.zeros((), dtype=torch.long))
    verification = Verification()
    verification.expect(outcome_of(module, ()), is_plain=True)

    def difference() -> str:
        return verification.difference(outcome_of(module, ())) or ""

    module(torch.tensor([1, 2])).sum().backward()
    assert "gradient of parameter `weight`" in difference()
    module.weight.grad = None
    module.other.grad = torch.ones(3, dtype=torch.complex64)
    assert "gradient of parameter `other`" in difference()
    module.other.grad = None
    module.count += 1
    assert "buffer `count`" in difference()
    module.count -= 1
    state = torch.get_rng_state()
    torch.rand(())
    assert "the random stream" in difference()
    torch.set_rng_state(state)
    assert difference() == ""
