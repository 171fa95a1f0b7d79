"""`recoup.estimate`: peaks of steps that are not run, beside those of the steps that are."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError, RecoupError
from tests.planned_zoo import MODELS

# What kernels allocate for a moment is not seen, which is much where tensors are as small as these.
NEAR = {"resnet": 0.15, "unet": 0.35, "sequential": 0.1}
QUICK = ("sequential", "shared", "vit")
SLOW = ("resnet", "unet", "gpt2", "bert", "t5", "whisper")


def blocks(num=6, width=64):
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num)))


def small():
    return blocks(), torch.randn(256, 64)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_it_is_near_the_step_that_is_run(name):
    case = MODELS[name]()
    frontier = recoup.plan(case.model, *case.args, loss=case.loss, **case.kwargs)

    def build():
        same = MODELS[name]()
        return (same.model, *same.args, same.kwargs)

    found = recoup.estimate(build, loss=case.loss)
    near = NEAR.get(name, 0.03)
    assert found.plain_peak_bytes == pytest.approx(frontier.points[-1].peak_bytes, rel=near)
    assert found.least_bytes == pytest.approx(frontier.least_bytes, rel=near)


@pytest.mark.parametrize("share", [0.65, 0.8])
def test_a_plan_for_its_budget_takes_the_bytes_that_it_says(share):
    budget = int(share * recoup.estimate(small).plain_peak_bytes)
    found = recoup.estimate(small, budget)
    model, x = small()
    plan = recoup.plan(model, x, budget=budget)
    assert found.budget_bytes == budget >= found.peak_bytes
    assert found.peak_bytes == pytest.approx(plan.rehearsed_peak_bytes, rel=0.03)
    assert 1.0 < found.relative_time < 2.0
    assert "Within" in str(found)


def test_it_takes_a_twentieth_of_the_plain_peak():
    def large():
        return blocks(4, 512), torch.empty(8192, 512)

    recoup.estimate(large)  # what is cached
    measured = recoup.measure(lambda: recoup.estimate(large), repeats=0)
    assert measured.peak_bytes < 0.05 * recoup.estimate(large).plain_peak_bytes


def test_no_memory_is_asked_for_what_does_not_fit_anywhere():
    def huge():
        return blocks(4, 8192), torch.empty(2**24, 8192)

    found = recoup.estimate(huge)
    assert found.least_bytes > 2**40
    with pytest.raises(BudgetError) as error:
        recoup.estimate(huge, "80 GiB")
    assert error.value.least_bytes == found.least_bytes


def test_the_largest_batch_is_that_which_trains():
    def batch(size):
        return torch.randn(size, 64)

    found = recoup.estimate(small, "1 MiB", build_batch=batch)
    real = recoup.largest(batch, blocks(), budget="1 MiB")
    assert found.largest_size == pytest.approx(real.size, rel=0.05)
    assert str(found).endswith(f"The largest size is {found.largest_size}.")
    with pytest.raises(ValueError, match="no `budget`"):
        recoup.estimate(small, build_batch=batch)


def test_bytes_that_stand_count_with_total():
    of_step = recoup.estimate(small)
    of_all = recoup.estimate(small, budget_of="total", optimizer=torch.optim.AdamW)
    weights = sum(p.nbytes for p in blocks().parameters())
    standing = of_all.plain_peak_bytes - of_step.plain_peak_bytes
    assert 3 * weights <= standing < 3.1 * weights  # with two moments, and the numbers of steps


def test_noise_on_weights_costs_nothing_there_either():
    def noisy():
        return recoup.weight_dropout(blocks(), r".*weight"), torch.randn(256, 64)

    plain, found = recoup.estimate(small), recoup.estimate(noisy)
    assert found.plain_peak_bytes < plain.plain_peak_bytes + 3 * 64 * 64 * 4


def test_noise_on_large_weights_is_drawn_without_values_in_any_number_of_threads():
    def noisy():
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
        return recoup.weight_dropout(model, r".*weight", p=0.3), torch.randn(512, 1024)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = recoup.estimate(noisy)
    finally:
        torch.set_num_threads(num_threads)
    model, x = noisy()
    real = recoup.plan(model, x)
    assert found.least_bytes == pytest.approx(real.least_bytes, rel=0.05)
    assert found.plain_peak_bytes == pytest.approx(real.points[-1].peak_bytes, rel=0.05)


@pytest.mark.parametrize("shape", [(64, 64), (256, 256)])
def test_noisy_weights_run_in_a_mode_of_the_user(shape):
    from torch._subclasses.fake_tensor import FakeTensorMode

    recoup.weight_dropout(nn.Linear(*shape), "weight", p=0.3)(torch.ones(2, shape[0]))  # caches
    with FakeTensorMode():
        model = recoup.weight_dropout(nn.Linear(*shape), "weight", p=0.3)
        model(torch.ones(2, shape[0])).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_that_was_there_before_and_random_streams_stay_as_they_were():
    model, x = small()
    model.register_buffer("big", torch.randn(100, 64))
    before = [*model.parameters(), *model.buffers()]
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
    after = [*model.parameters(), *model.buffers()]
    assert [*map(id, after)] == [*map(id, before)]
    assert [tensor.sum().item() for tensor in after] == sums
    assert torch.equal(torch.get_rng_state(), of_torch)
    assert random.getstate() == of_python
    model(x).sum().backward()


def test_deep_copies_of_layers_are_those_of_the_step():
    def build():
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(8, 32, 128)

    found, (model, x) = recoup.estimate(build), build()
    assert found.least_bytes == pytest.approx(recoup.plan(model, x).least_bytes, rel=0.02)


class ReadsItsRates(nn.Module):
    """Its rates come from a `linspace`, its weights from a truncated normal distribution."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 4)]
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(96, 96), nn.Dropout(rate)) for rate in rates)
        )
        self.last = nn.Linear(96, 96)
        self.last.weight = self.blocks[0][0].weight
        for part in self.blocks:
            nn.init.trunc_normal_(part[0].weight, std=0.02)

    def forward(self, x):
        return self.last(self.blocks(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_code_that_builds_may_read_numbers_and_convert_the_model(dtype):
    def build():
        return ReadsItsRates().to(dtype), torch.randn(4096, 96, dtype=dtype)

    found, (model, x) = recoup.estimate(build), build()
    real = recoup.plan(model, x)
    assert found.plain_peak_bytes == pytest.approx(real.points[-1].peak_bytes, rel=0.05)


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = blocks(3)

    def forward(self, x):
        return self.blocks(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    ("build", "kind", "message"),
    [
        (lambda: (Decides(), torch.randn(64, 64)), RecoupError, "reads values of tensors"),
        (lambda: (nn.LSTM(8, 8), torch.randn(3, 2, 8)), RecoupError, "workspace"),
        (lambda: 3, ValueError, "`build` returned a int"),
        (3, ValueError, "`build` is 3"),
    ],
)
def test_what_it_cannot_tell_is_an_error(build, kind, message):
    with pytest.raises(kind, match=message):
        recoup.estimate(build)


def test_an_error_of_the_model_says_where_it_ran():
    with pytest.raises(RuntimeError, match="8") as error:
        recoup.estimate(lambda: (nn.Linear(4, 4), torch.randn(2, 8)))
    assert "FakeTensorMode" in error.value.__notes__[0]


def test_a_measurement_without_values_is_that_of_the_storages():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.zeros(1024, requires_grad=True)
        measured = recoup.measure(lambda: x.exp().sin())
    assert (measured.peak_bytes, measured.held_bytes, measured.seconds) == (8192, 8192, None)


class CountsUnseen(nn.Module):
    """It changes a buffer, of which its version does not tell."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("num_calls", torch.zeros(3))

    def forward(self, x):
        self.num_calls.data.add_(1)
        return (self.linear(x) * self.num_calls.sum()).tanh()


def test_what_an_estimate_saw_of_a_model_is_not_taken_for_what_it_does_with_values():
    model, x = CountsUnseen(), torch.randn(4, 8)
    recoup.estimate(lambda: (recoup.Sequential(model, model, memory=1), x))
    recoup.checkpoint(model, x).sum().backward()
    assert model.num_calls.tolist() == [1, 1, 1]
