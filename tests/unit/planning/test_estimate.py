"""`recoup.estimate`: peaks and work of steps that are not run, beside those of steps that are."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError, RecoupError
from tests.plan_oracle import Made, dense
from tests.planned_zoo import MODELS, Case

# What kernels allocate for a moment is not seen, which is much where tensors are as small as these.
NEAR = {"resnet": 0.15, "unet": 0.35, "sequential": 0.1, "noisy": 0.05, "rates": 0.05}


def small():
    return dense(), torch.randn(256, 64)


def noisy():
    return recoup.weight_dropout(dense(3, 512), r".*weight", p=0.3), (torch.randn(256, 512),)


def that_reads_its_rates():
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 4)]
    blocks = [nn.Sequential(nn.Linear(96, 96), nn.Dropout(rate)) for rate in rates]
    last = nn.Linear(96, 96)
    last.weight = blocks[0][0].weight
    for part in blocks:
        nn.init.trunc_normal_(part[0].weight, std=0.02)
    model = Made(lambda m, x: m.last(m.blocks(x)), blocks=nn.Sequential(*blocks), last=last)
    return model.bfloat16(), (torch.randn(4096, 96, dtype=torch.bfloat16),)


BUILDS = {"noisy": noisy, "rates": that_reads_its_rates}


def case_of(name):
    return Case(*BUILDS[name](), {}, None) if name in BUILDS else MODELS[name]()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("resnet", "unet", "gpt2", "t5")]


@pytest.mark.parametrize("name", ["sequential", *BUILDS, *SLOW])
def test_it_is_near_the_step_that_is_run(name, monkeypatch):
    def build():
        case = case_of(name)
        return (case.model, *case.args, case.kwargs)

    loss, near = case_of(name).loss, NEAR.get(name, 0.03)
    model, *args, kwargs = build()
    frontier = recoup.plan(model, *args, loss=loss, **kwargs)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = recoup.estimate(build, loss=loss)
    assert found.plain_peak_bytes == pytest.approx(frontier.points[-1].peak_bytes, rel=near)
    assert found.least_bytes == pytest.approx(frontier.least_bytes, rel=near)


def test_a_plan_for_its_budget_is_that_which_trains():
    budget = int(0.8 * recoup.estimate(small).plain_peak_bytes)
    found = recoup.estimate(small, budget)
    model, x = small()
    plan = recoup.plan(model, x, budget=budget)
    assert found.budget_bytes == budget >= found.peak_bytes
    assert found.peak_bytes == pytest.approx(plan.rehearsed_peak_bytes, rel=0.03)
    assert 1.0 < found.relative_time < 2.0
    assert "Within" in str(found)


def test_no_memory_is_asked_for_what_does_not_fit_anywhere():
    with pytest.raises(BudgetError) as error:
        recoup.estimate(lambda: (dense(4, 8192), torch.empty(2**24, 8192)), "80 GiB")
    assert error.value.least_bytes > 2**40


def test_bytes_that_stand_count_with_total():
    of_step = recoup.estimate(small)
    of_all = recoup.estimate(small, budget_of="total", optimizer=torch.optim.AdamW)
    weights = sum(p.nbytes for p in dense().parameters())
    standing = of_all.plain_peak_bytes - of_step.plain_peak_bytes
    assert 3 * weights <= standing < 3.1 * weights  # with two moments, and the numbers of steps
    with pytest.raises(ValueError, match="`optimizer` returned None"):
        recoup.estimate(small, budget_of="total", optimizer=lambda parameters: None)


def test_a_model_that_was_there_before_and_random_streams_stay_as_they_were():
    model, x = small()
    before = [*model.parameters()]
    sums = [tensor.sum().item() for tensor in before]
    of_torch, of_python = torch.get_rng_state(), random.getstate()

    def build():
        torch.manual_seed(0)
        random.seed(0)
        small()
        return model, x

    recoup.estimate(build)
    with pytest.raises(BudgetError):
        recoup.estimate(build, 0)
    assert [*map(id, model.parameters())] == [*map(id, before)]
    assert [tensor.sum().item() for tensor in before] == sums
    assert torch.equal(torch.get_rng_state(), of_torch)
    assert random.getstate() == of_python
    model(x).sum().backward()


def that_decides():
    model = Made(lambda m, x: m.blocks(x if x.sum() > 0 else -x), blocks=dense(3))
    return model, torch.randn(64, 64)


@pytest.mark.parametrize(
    ("build", "kind", "message", "note"),
    [
        (that_decides, RecoupError, "reads values of tensors", None),
        (lambda: (nn.LSTM(8, 8), torch.randn(3, 2, 8)), RecoupError, "workspace", None),
        (lambda: 3, ValueError, "`build` returned a int", None),
        (lambda: (nn.Linear(4, 4), torch.randn(2, 8)), RuntimeError, "8", "FakeTensorMode"),
    ],
)
def test_what_it_cannot_tell_is_an_error(build, kind, message, note):
    with pytest.raises(kind, match=message) as error:
        recoup.estimate(build)
    assert note is None or note in error.value.__notes__[0]


def test_what_an_estimate_saw_of_a_model_is_not_taken_for_what_it_does_with_values():
    """The model changes a buffer, of which its version does not tell."""

    def forward(model, x):
        model.num_calls.data.add_(1)
        return (model.linear(x) * model.num_calls.sum()).tanh()

    model, x = Made(forward, linear=nn.Linear(8, 8)), torch.randn(4, 8)
    model.register_buffer("num_calls", torch.zeros(3))
    recoup.estimate(lambda: (recoup.Sequential(model, model, memory=1), x))
    recoup.checkpoint(model, x).sum().backward()
    assert model.num_calls.tolist() == [1, 1, 1]
