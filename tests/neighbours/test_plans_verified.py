"""A plan whose step is not the measured one cannot be returned."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup._core.kept_products import _KeptTensor as KeptTensor
from recoup._core.surroundings import Surroundings
from recoup.errors import BudgetError, ReplayError
from recoup.planning import priced_blocks
from recoup.planning.verification import Verification, outcome_of
from tests.neighbours.planned import Block, Net, assert_same, loss_of, plan_for, result_of


@pytest.mark.parametrize("of_arguments", [False, True])
def test_products_that_are_kept_wrong_are_not_planned(of_arguments: bool, monkeypatch: Any):
    """As if a write to what is kept had gone unseen; with gradients of arguments alone, too."""
    torch.manual_seed(0)
    model = Net().requires_grad_(not of_arguments)
    x = torch.randn(64, 32, requires_grad=of_arguments)
    plain = result_of(model, lambda: loss_of(model(x)).backward())
    x.grad = None
    plan = plan_for(model, x)
    assert "keep products" in {row.way for row in plan.blocks}
    get = KeptTensor.get
    monkeypatch.setattr(KeptTensor, "get", lambda self: get(self).mul_(1.01))
    monkeypatch.setattr(Surroundings, "decides_anew", lambda self: False)
    with pytest.warns(UserWarning, match="keeps no results of products"):
        plan = recoup.plan(model, x, budget=plan.budget_bytes, loss=loss_of)
    assert x.grad is None
    assert "keep products" not in {row.way for row in plan.blocks}
    with plan.applied():
        assert_same(result_of(model, lambda: loss_of(model(x)).backward()), plain)


calls = itertools.count()


class Counts(Block):
    """Reads Python state that changes from run to run, where nobody looks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + 0.1 * (next(calls) % 97))


@pytest.mark.parametrize("has_room", [True, False])
def test_a_model_whose_steps_differ_is_refused(has_room: bool, monkeypatch: Any):
    """Without room for a plain step it is the measured one that a step is compared with."""
    words = r"gradient of parameter `.*` by about .* leave that"
    if not has_room:
        monkeypatch.setattr(priced_blocks, "has_room", lambda device, num_bytes: False)
        words = "differs from the measured one"
        plan_for(Net(), torch.randn(64, 32))
    with pytest.raises(ReplayError, match=words):
        plan_for(Net(block=Counts), torch.randn(64, 32))


class WritesToItsInput(Block):
    """Changes what it is given where no version counter sees it, also when it runs again."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.tanh_()
        return super().forward(x)


@pytest.mark.slow
def test_blocks_that_are_wrong_whenever_they_run_again_are_kept_or_refused():
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


# -- sketches --------------------------------------------------------------------------------------


def outcome_with(weight: float) -> Any:
    """The outcome of a step whose only gradient has one other entry."""
    module = nn.Linear(1, 600_001)
    module.weight.grad = torch.ones(600_001, 1)
    module.weight.grad[17] = weight
    return outcome_of(module, ())


def test_the_plain_step_takes_the_place_of_the_measured_one():
    measured, plain = outcome_with(1.0), outcome_with(2.0)
    verification = Verification()
    verification.expect(measured, is_plain=False)
    assert verification.difference(plain) is not None
    verification.expect(plain, is_plain=True)
    verification.expect(measured, is_plain=False)
    assert verification.difference(plain) is None
    assert verification.difference(measured) is not None


def test_gradients_that_are_missing_sparse_or_complex():
    module = nn.Embedding(20, 4, sparse=True)
    module.other = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    module.register_buffer("count", torch.zeros((), dtype=torch.long))
    verification = Verification()
    verification.expect(outcome_of(module, ()), is_plain=True)
    state = torch.get_rng_state()

    def of_a_sparse_one() -> None:
        module(torch.tensor([1, 2])).sum().backward()

    def of_a_complex_one() -> None:
        module.other.grad = torch.ones(3, dtype=torch.complex64)

    for change, words in (
        (of_a_sparse_one, "gradient of parameter `weight`"),
        (of_a_complex_one, "gradient of parameter `other`"),
        (lambda: module.count.add_(1), "buffer `count`"),
        (lambda: torch.rand(()), "the random stream"),
    ):
        change()
        assert words in (verification.difference(outcome_of(module, ())) or "")
        module.zero_grad()
        module.count.zero_()
        torch.set_rng_state(state)
        assert verification.difference(outcome_of(module, ())) is None
