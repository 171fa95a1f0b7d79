"""Plans of models that nobody tuned recoup to: bit-equal, and nothing is left on them (F1, F2)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import recoup
from tests.alive import allocated_bytes
from tests.foreign.models import FOREIGN
from tests.neighbours.planned import result_of
from tests.oracle import tensors
from tests.plan_oracle import assert_as_plain, between, left_as_it_was
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


def step_of(foreign: Case, given: dict[str, Any]) -> Callable[[], list[Tensor]]:
    """A step that returns the outputs."""

    def step() -> list[Tensor]:
        numpy.random.seed(1)  # the spans that wav2vec2 masks
        output = foreign.model(**given)
        (output.loss if foreign.loss is None else foreign.loss(output)).backward()
        return [each.detach() for each in tensors(output)]

    return step


def allocated(model: nn.Module, step: Callable[[], Any]) -> int:
    with left_as_it_was(model):
        return allocated_bytes(step)[0]


def test_f1_f2_a_planned_step_is_the_plain_one(foreign: Case):
    model, step = foreign.model, step_of(foreign, foreign.kwargs)
    hooks, given = num_hooks(model), [t.clone() for t in tensors(foreign.kwargs)]
    frontier = recoup.plan(model, loss=foreign.loss, **foreign.kwargs)
    assert num_hooks(model) == hooks
    plain, hooks = result_of(model, step), num_hooks(model)
    for k in range(NUM_BUDGETS):
        plan = frontier.plan(between(frontier, (k + 1) / (NUM_BUDGETS + 1)))
        assert num_hooks(model) == hooks
        assert_as_plain(plan, step, plain, peak=allocated)
    assert num_hooks(model) == hooks
    assert all(map(torch.equal, tensors(foreign.kwargs), given))
