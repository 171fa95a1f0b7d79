"""Plans of models that nobody tuned recoup to: bit-equal, and nothing is left on them (F1, F2)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import recoup
from tests.alive import allocated_bytes
from tests.foreign.models import FOREIGN
from tests.neighbours.planned import assert_same, result_of
from tests.oracle import tensors
from tests.planned_zoo import Case

pytestmark = [pytest.mark.foreign, pytest.mark.slow]
NUM_BUDGETS = 5


@pytest.fixture(params=list(FOREIGN))
def foreign(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = FOREIGN[request.param]()
    made.model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others warn about
        yield made


def num_hooks(model: nn.Module) -> list[dict[str, int]]:
    return [
        {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks") and value}
        for module in model.modules()
    ]


def step(foreign: Case, given: dict[str, Any]) -> list[Tensor]:
    """Run a step; return the outputs."""
    numpy.random.seed(1)  # the spans that wav2vec2 masks
    output = foreign.model(**given)
    (output.loss if foreign.loss is None else foreign.loss(output)).backward()
    return [each.detach() for each in tensors(output)]


def results(foreign: Case, given: dict[str, Any]) -> dict[str, Any]:
    return result_of(foreign.model, lambda: step(foreign, given))


def peak_of(foreign: Case, given: dict[str, Any]) -> int:
    """The bytes of a step with empty gradients, by the allocator."""
    peak, _ = allocated_bytes(lambda: step(foreign, given))
    foreign.model.zero_grad()
    return peak


def test_f1_f2_a_planned_step_is_the_plain_one(foreign: Case):
    model, options = foreign.model, {"loss": foreign.loss, **foreign.kwargs}
    hooks, given = num_hooks(model), [t.clone() for t in tensors(foreign.kwargs)]
    whole = recoup.plan(model, budget="1 GiB", **options)
    assert num_hooks(model) == hooks
    plain = results(foreign, foreign.kwargs)
    hooks = num_hooks(model)
    span = whole.most_bytes - whole.least_bytes
    for k in range(NUM_BUDGETS):
        budget = whole.least_bytes + span * (k + 1) // (NUM_BUDGETS + 1)
        plan = recoup.plan(model, budget=budget, **options)
        assert num_hooks(model) == hooks
        with plan.applied():
            assert_same(results(foreign, foreign.kwargs), plain)
            assert peak_of(foreign, foreign.kwargs) <= budget
    assert num_hooks(model) == hooks
    assert all(map(torch.equal, tensors(foreign.kwargs), given))


@pytest.mark.parametrize("foreign", ["Llama", "T5", "ALBERT", "ConvNeXt"], indirect=True)
def test_batches_of_other_sizes_are_planned_again(foreign: Case):
    """In a budget for the largest; a smaller one is planned first."""
    model, sizes = foreign.model, (1, 2, 3)
    batches = [
        tree_map_only(Tensor, lambda t, n=n: torch.cat([t, t])[:n], foreign.kwargs) for n in sizes
    ]
    points = recoup.plan(model, loss=foreign.loss, **batches[-1]).points
    least, most = points[0].peak_bytes * 1.05, points[-1].peak_bytes
    budget = int(least + (most - least) * 0.3)
    plain = [results(foreign, given) for given in batches]
    options = {"loss": foreign.loss, "replan": True, **batches[0]}
    with recoup.plan(model, budget=budget, **options).applied() as plan:
        for given, wanted in zip(batches, plain, strict=True):
            assert_same(results(foreign, given), wanted)
            assert peak_of(foreign, given) <= budget
        assert len(plan.family) > 1
    assert not model._forward_pre_hooks
