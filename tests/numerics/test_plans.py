"""A planned step is the plain step, in the bytes that were promised: models x budgets."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from tests.neighbours.planned import result_of
from tests.plan_oracle import Made, allocated, assert_as_plain, in_a_row, square, stack, ways_of
from tests.planned_zoo import MODELS, Case


def attention():
    """Explicit attention, whose weights numpy scales: no mode or version counter sees that."""

    def forward(block, x):
        weights = torch.matmul(block.q(x), block.k(x).transpose(1, 2))
        np.multiply(values := weights.detach().numpy(), 0.3, out=values)
        return x + block.out(weights.softmax(-1) @ x)

    return Made(forward, **{name: nn.Linear(32, 32) for name in ("q", "k", "out")})


def with_frozen_stem():
    stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    return Made(
        lambda model, x: in_a_row(model.encoder, model.stem(x).flatten(2).transpose(1, 2)),
        stem=stem.requires_grad_(False),
        encoder=[nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(4)],
    )


def of(build, *size, num=3):
    def case():
        model = stack(num, build) if num else build()
        x = torch.randn(size, requires_grad=num == 3)
        return Case(model, (x,), {}, square, num)

    return case


SMALL = {
    "numpy": of(attention, 4, 32, 32),
    "dropouts": of(lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)), 8, 16, num=20),
    "frozen stem": of(with_frozen_stem, 2, 3, 64, 64, num=0),
}
CASES = MODELS | SMALL
QUICK = ["sequential", "shared", *SMALL]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK]
WIDELY = {"sequential", "gpt2", "resnet"}  # at all budgets, the others at some
PREDICTED = {"dropouts": 0.2} | dict.fromkeys(
    # A block is measured when it is run again, beside its input. Where it is kept, that input need
    # not wait beside the temporaries of a convolution.
    ("resnet", "frozen stem", "numpy"), 0.09,
)  # fmt: skip


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_every_budget_is_kept_with_the_same_result(name):
    """Bit by bit; the peak is what was rehearsed, and near what was predicted."""
    model, args, kwargs, loss, num_blocks = CASES[name]()
    inputs = [each for each in args if each.requires_grad]

    def step():
        output = model(*args, **kwargs)
        losses = output.loss if loss is None else loss(output)
        torch.autograd.backward(losses)
        found = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        return found

    frontier = recoup.plan(model, *args, loss=loss, **kwargs)
    whole, wanted = frontier.plan("1 GiB"), result_of(model, step)
    # What runs before blocks and between them may be more of them, where it holds much.
    num_found = len({row.name for row in whole.blocks}) - (name == "resnet")
    assert num_blocks in (num_found, num_found + 1, 0)
    assert ways_of(whole) == {"keep"}
    near = PREDICTED.get(name, 0.05)
    assert whole.most_bytes == pytest.approx(allocated(model, step), rel=near)
    least, num_budgets = whole.least_bytes, 8 if name in WIDELY else 3
    assert least < 0.97 * whole.most_bytes or name not in MODELS
    if name == "frozen stem":
        assert frontier.points[0].peak_bytes == pytest.approx(least, rel=0.02)
    with pytest.raises(BudgetError) as caught:
        frontier.plan(least // 2)
    # A budget that is refused was tried without products, too, which may take less.
    least = caught.value.least_bytes
    assert least <= whole.least_bytes
    assert f"({least} bytes" in str(caught.value)
    times = []
    for k in range(num_budgets + 1):
        plan = frontier.plan(least + (whole.most_bytes - least) * k // num_budgets)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            peak = assert_as_plain(plan, step, wanted, peak=allocated)
        assert plan.predicted_peak_bytes == pytest.approx(peak, rel=near)
        exactly = near if name == "numpy" else 0
        assert plan.rehearsed_peak_bytes == pytest.approx(peak, rel=exactly)
        times.append(plan.predicted_time_ratio)
    assert times == sorted(times, reverse=True)
    assert ways_of(frontier.plan(least)) != {"keep"} or name == "dropouts"
