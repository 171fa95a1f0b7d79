"""Plans of models that are compiled, exported, copied and written down: as the plain ones."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.planning.compiling import CompiledCode
from recoup.planning.forwards import followed
from tests.neighbours.planned import (
    Net,
    assert_same,
    fresh,
    give_steady_times,
    loss_of,
    peak_of,
    plan_for,
    result_of,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def compiled(model: nn.Module, way: str) -> nn.Module:
    of_model, wraps = way.startswith("model"), way.endswith("wrapped")
    if wraps and of_model:
        return torch.compile(model, backend="aot_eager")
    for index, part in enumerate([model] if of_model else model.blocks):
        if wraps:
            model.blocks[index] = torch.compile(part, backend="aot_eager")
        else:
            part.compile(backend="aot_eager")
    return model


WAYS = ["blocks in place", "model in place", "model wrapped", "blocks wrapped"]
WHEN = [*product(["before", "after", "again"], WAYS)]
WHEN.remove(("after", "blocks wrapped"))  # these are other blocks, which no plan is for


def stepping(model: nn.Module, x: Tensor) -> Any:
    return lambda: loss_of(model(x)).backward()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("when", "way"), WHEN)
def test_compiled_before_or_after_the_plan(when, way, monkeypatch):
    """By a plan that runs the blocks as they are, or compiles them again."""
    model, x = fresh(num_blocks=4)

    def result() -> list[Any]:  # a wrapper has other names
        return [*result_of(model, stepping(call, x)).values()]

    call = model.eval()
    wanted = result()
    call = call if when == "after" else compiled(model, way)
    if when == "again":
        give_steady_times(monkeypatch)
        plan = recoup.plan(call, x, budget="380 KiB", loss=loss_of, compile="aot_eager")
        assert {row.way for row in plan.blocks} > {"keep, compiled 1"}
    else:
        plan = plan_for(call, x, share=0.0)
    with plan.applied():
        call = compiled(model, way) if when == "after" else call
        torch.testing.assert_close(result(), wanted, rtol=0, atol=0)
        assert when == "after" or peak_of(stepping(call, x)) <= plan.budget_bytes
    torch.testing.assert_close(result(), wanted, rtol=0, atol=0)


@pytest.mark.slow
def test_a_plan_over_blocks_that_inductor_compiles(monkeypatch):
    give_steady_times(monkeypatch)
    model, x = fresh(num_blocks=3)
    step = stepping(model, x)
    with followed(model.blocks, CompiledCode(1.0)):
        wanted = result_of(model, step)
    for budget in ("1 GiB", "210 KiB"):
        plan = recoup.plan(model, x, budget=budget, loss=loss_of, compile=True)
        assert all("compiled" in row.way for row in plan.blocks)
        with plan.applied():
            found = result_of(model, step)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert plan.rehearsed_peak_bytes <= plan.budget_bytes


WRITTEN = {
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "jit.trace": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "deepcopy": lambda model, x: copy.deepcopy(model),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(model)),
}


def planned() -> tuple[Any, Tensor]:
    model, x = fresh(num_blocks=2)
    plan_for(model, x, share=0.0).apply()
    return model, x


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of torch's batch norm, plain too
@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("way", WRITTEN)
def test_a_planned_model_is_written_down_as_the_plain_one(way: str, is_training: bool):
    model, x = planned()
    model.train(is_training)
    plain, results = copy.deepcopy(model), []
    for each in (WRITTEN[way](model, x), plain):
        torch.manual_seed(1)
        output = each(given := x.clone().requires_grad_())
        loss_of(output).backward()
        results.append({"output": output.detach(), "gradient": given.grad})
    assert_same(*results)
    assert model.blocks[0].forward.follower is not None


def test_scripting_names_the_way_out():
    model, _ = planned()
    with pytest.raises(AttributeError, match=r"Remove the plan before"):
        torch.jit.script(model)


def test_a_planned_forward_looks_like_the_function_it_stands_for():
    """transformers, accelerate and DataParallel look at these."""
    model, _ = planned()
    forward, plain = model.forward, Net.forward
    assert str(inspect.signature(forward)) == "(x: 'Tensor') -> 'Tensor'"
    assert inspect.getfullargspec(forward).args == ["self", "x"]
    assert typing.get_type_hints(forward) == typing.get_type_hints(plain)
    for name in ("__name__", "__qualname__", "__doc__", "__code__", "__module__", "__defaults__"):
        assert getattr(forward, name) == getattr(plain, name), name
    # accelerate would call the function past the plan.
    assert not hasattr(forward, "__func__")
    assert not hasattr(forward, "__self__")
