"""Plans of models that are compiled, in part or whole: the same gradients, in the same budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import recoup
from recoup.planning.compiling import CompiledCode
from recoup.planning.forwards import followed
from tests.neighbours.planned import (
    Net,
    assert_same,
    give_steady_times,
    loss_of,
    plan_for,
    result_of,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def blocks_in_place(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def blocks_wrapped(model: nn.Module) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    return model


def model_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def model_wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


COMPILES = [blocks_in_place, blocks_wrapped, model_in_place, model_wrapped]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compiles", COMPILES)
def test_compiled_before_the_plan(compiles: Callable[..., nn.Module]):
    torch.manual_seed(0)
    model, x = compiles(Net(num_blocks=4).eval()), torch.randn(64, 32)
    wanted = result_of(model, lambda: loss_of(model(x)).backward())
    with plan_for(model, x, share=0.0).applied() as plan:
        assert_same(result_of(model, lambda: loss_of(model(x)).backward()), wanted)
        peak = recoup.measure(lambda: loss_of(model(x)).backward(), device="cpu", repeats=0)
    assert peak.peak_bytes <= plan.budget_bytes


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("compiles", COMPILES)
def test_a_plan_that_compiles_what_is_compiled(compiles: Callable[..., nn.Module], monkeypatch):
    give_steady_times(monkeypatch)
    torch.manual_seed(0)
    model, x = compiles(Net(num_blocks=4).eval()), torch.randn(64, 32)
    wanted = result_of(model, lambda: loss_of(model(x)).backward())
    plan = recoup.plan(model, x, budget="380 KiB", loss=loss_of, compile="aot_eager")
    assert {row.way for row in plan.blocks} > {"keep, compiled 1"}
    with plan.applied():
        assert_same(result_of(model, lambda: loss_of(model(x)).backward()), wanted)
        peak = recoup.measure(lambda: loss_of(model(x)).backward(), device="cpu", repeats=0)
    assert peak.peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_a_plan_over_blocks_that_inductor_compiles(monkeypatch):
    give_steady_times(monkeypatch)
    torch.manual_seed(0)
    model, x = Net(num_blocks=3), torch.randn(64, 32)
    code = CompiledCode(1.0)
    with followed(model.blocks, code):
        wanted = result_of(model, lambda: loss_of(model(x)).backward())
    for budget in ("1 GiB", "210 KiB"):
        plan = recoup.plan(model, x, budget=budget, loss=loss_of, compile=True)
        assert all("compiled" in row.way for row in plan.blocks)
        with plan.applied():
            found = result_of(model, lambda: loss_of(model(x)).backward())
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert plan.rehearsed_peak_bytes <= plan.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [blocks_in_place, model_in_place, model_wrapped])
def test_compiled_after_the_plan(compiles: Callable[..., nn.Module]):
    torch.manual_seed(0)
    model, x = Net(num_blocks=4).eval(), torch.randn(64, 32)
    wanted = result_of(model, lambda: loss_of(model(x)).backward())
    plan = plan_for(model, x, share=0.0).apply()
    call = compiles(model)
    assert_same(result_of(model, lambda: loss_of(call(x)).backward()), wanted)
    plan.remove()
    assert_same(result_of(model, lambda: loss_of(call(x)).backward()), wanted)
