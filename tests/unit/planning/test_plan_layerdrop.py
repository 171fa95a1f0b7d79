"""Blocks that some forwards leave out: LayerDrop, and blocks that come later than planned (F3)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import recoup
from tests.plan_oracle import Residual, assert_as_plain, names_of, peak_of, square, step_of


class LayerDrop(nn.Module):
    """Calls `among` its layers those that a draw, or `only`, says."""

    def __init__(self, num_layers: int, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual(64) for _ in range(num_layers))
        self.rate = rate
        self.only: Iterable[int] = range(num_layers)

    def forward(self, x):
        x = x + 0 * self.layers[0].up.weight.sum()
        for index in self.only:
            if self.rate == 0 or torch.rand(()) > self.rate:
                x = self.layers[index](x)
        return x


def test_layers_that_are_left_out_keep_to_the_budget():
    """Also where the steps call all of the layers, though few forwards do."""
    model, x = LayerDrop(5, 0.3), torch.randn(256, 64)
    plans = recoup.plan(model, x, loss=square)
    plan, step = plans.plan(plans.least_bytes), step_of(model, x)
    assert (plan.num_seen, plan.num_blocks) == (5, 5)
    assert names_of(plan) == [f"layers.{i}" for i in range(5)]
    for seed in range(6):
        model.rate = 0.3 if seed % 3 else 0.0

        def seeded(seed=seed):
            torch.manual_seed(seed)
            step()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_as_plain(plan, seeded)


def seed_that_calls(num_called, num_layers, rate):
    """Seed torch so that a forward calls so many layers."""
    for seed in range(1000):
        torch.manual_seed(seed)
        if sum(float(torch.rand(())) > rate for _ in range(num_layers)) == num_called:
            torch.manual_seed(seed)
            return
    raise AssertionError("no such seed")


def test_a_frontier_that_is_planned_where_layers_would_be_left_out():
    """Its steps draw what the measured one drew, so its least is that of all layers."""
    model, x = LayerDrop(5, 0.4), torch.randn(256, 64)
    seed_that_calls(0, 5, 0.4)
    assert recoup.plan(model, x, budget="1 GiB", loss=square).num_seen == 5
    seed_that_calls(5, 5, 0.4)
    frontier = recoup.plan(model, x, loss=square)
    seed_that_calls(1, 5, 0.4)
    plan = frontier.plan(frontier.least_bytes)
    model.rate = 0.0
    with plan.applied():
        assert peak_of(model, step_of(model, x)) <= plan.budget_bytes


def test_blocks_that_no_forward_called_are_recomputed_and_said():
    model, x = LayerDrop(6, 0.0), torch.randn(256, 64)
    model.only = range(3)
    plan = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert "seen 3 of 6 blocks" in str(plan)
    model.only, step = range(6), step_of(model, x)
    with plan.applied(), pytest.warns(UserWarning, match="not at all then"):
        found = peak_of(model, step)
    assert peak_of(model, step) - found > 64 * 4 * 256 * 4, "what was not seen kept its residuals"


def test_blocks_in_another_order_keep_what_was_planned_once():
    """A block that is called again is recomputed, though the plan keeps it."""
    model, x = LayerDrop(4, 0.0), torch.randn(256, 64)
    step = step_of(model, x)
    with recoup.plan(model, x, budget="1 GiB", loss=square).applied():
        plan_bytes = peak_of(model, step)
        for only, num_more in (((3, 1, 0, 2), 0), ((0, 1, 2, 3, 3, 3, 3), 3)):
            model.only = only
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = peak_of(model, step)
            assert found - plan_bytes <= x.nbytes * (num_more + 5)
