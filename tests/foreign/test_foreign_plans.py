"""Plans of models that nobody tuned recoup to: bit-equal, and nothing is left on them (F1, F2)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import recoup
from tests.alive import allocated_bytes
from tests.foreign.models import FOREIGN, Foreign
from tests.oracle import tensors

pytestmark = [pytest.mark.foreign, pytest.mark.slow]
NUM_BUDGETS = 5


@pytest.fixture(params=list(FOREIGN))
def foreign(request: pytest.FixtureRequest) -> Foreign:
    torch.manual_seed(0)
    made = FOREIGN[request.param]()
    made.model.train()
    return made


def num_hooks(model: nn.Module) -> list[dict[str, int]]:
    return [
        {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks") and value}
        for module in model.modules()
    ]


def result_of(foreign: Foreign, buffers: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Outputs, gradients, buffers and the random stream of a step."""
    model = foreign.model
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    model.zero_grad()
    torch.manual_seed(1)
    numpy.random.seed(1)  # the spans that wav2vec2 masks
    output = model(**foreign.kwargs)
    (output.loss if foreign.loss is None else foreign.loss(output)).backward()
    found: dict[str, Any] = {f"output {i}": t.detach() for i, t in enumerate(tensors(output))}
    found |= {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    return found | {"stream": torch.get_rng_state()}


def step_bytes(foreign: Foreign) -> int:
    """The peak of a step with empty gradients, by the allocator."""

    def step() -> None:
        output = foreign.model(**foreign.kwargs)
        (output.loss if foreign.loss is None else foreign.loss(output)).backward()

    torch.manual_seed(1)
    numpy.random.seed(1)
    peak, _ = allocated_bytes(step)
    foreign.model.zero_grad()
    return peak


def test_f1_f2_a_planned_step_is_the_plain_one(foreign: Foreign):
    model = foreign.model
    hooks = num_hooks(model)
    given = [t.clone() for t in tensors(foreign.kwargs)]
    options: dict[str, Any] = {"loss": foreign.loss, **foreign.kwargs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what others warn about
        whole = recoup.plan(model, budget="1 GiB", **options)
        assert num_hooks(model) == hooks
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        plain = result_of(foreign, buffers)
        hooks = num_hooks(model)
        span = whole.most_bytes - whole.least_bytes
        for k in range(NUM_BUDGETS):
            budget = whole.least_bytes + span * (k + 1) // (NUM_BUDGETS + 1)
            plan = recoup.plan(model, budget=budget, **options)
            assert num_hooks(model) == hooks
            with plan.applied():
                found = result_of(foreign, buffers)
                peak = step_bytes(foreign)
            assert peak <= budget
            assert found.keys() == plain.keys()
            for name, value in plain.items():
                assert torch.equal(found[name], value), f"{name} at {budget} bytes"
    assert num_hooks(model) == hooks
    assert all(map(torch.equal, tensors(foreign.kwargs), given))
