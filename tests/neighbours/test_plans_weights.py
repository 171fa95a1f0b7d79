"""Plans with weights of ours and of others: the plain step, within the budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import recoup
from tests.neighbours.planned import Block, Net, assert_same, loss_of, plan_for, result_of
from tests.weight_zoo import OURS


class Tied(nn.Module):
    """The head is the embedding, and two blocks share a weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODELS = {
    "net": (Net, lambda: torch.randn(64, 32)),
    "tied": (Tied, lambda: torch.randint(40, (64,))),
}
WEIGHTS = OURS | {"torch's norm": parametrizations.weight_norm}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["least", "middle"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_planned_step_is_the_plain_one(name, model, share, is_before):
    def apply(model):
        for block in model.blocks[3:]:
            WEIGHTS[name](block.up)

    def run(model, x):
        torch.manual_seed(3)
        return result_of(model, lambda: loss_of(model(x)).backward())

    results = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        build, given = MODELS[model]
        made, x = build(), given()
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
