"""Plans with weights of ours and of others: the plain step, within the budget."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parametrizations

import recoup
from tests.neighbours.planned import Net, assert_same, loss_of, plan_for, result_of
from tests.weight_zoo import OURS

WEIGHTS = OURS | {"torch's norm": parametrizations.weight_norm}


# A norm of torch that is applied after planning keeps copies, of which the first step warns.
@pytest.mark.filterwarnings("ignore:The first step of a Net under its plan took")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["least", "middle"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_planned_step_is_the_plain_one(name, share, is_before):
    def apply(model):
        for block in model.blocks[3:]:
            WEIGHTS[name](block.up)

    def run(model, x):
        torch.manual_seed(3)
        return result_of(model, lambda: loss_of(model(x)).backward())

    results = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        made, x = Net(), torch.randn(64, 32)
        if is_before:
            apply(made)
        plan = plan_for(made, x, share=share).apply() if is_planned else None
        if not is_before:
            apply(made)
        run(made, x)
        results.append(run(made, x))
    assert_same(results[1], results[0])
    if is_before:
        step = lambda: loss_of(made(x)).backward()  # noqa: E731
        assert recoup.measure(step, device="cpu", repeats=0).peak_bytes <= plan.budget_bytes
    plan.remove()
