"""Planned models that others look into, copy and write down (N12)."""

from __future__ import annotations

import copy
import inspect
import pickle
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.neighbours.planned import Net, plan_for

Make = Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]
WAYS: dict[str, Make] = {
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "jit.trace": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "fx": lambda model, x: torch.fx.symbolic_trace(model),
    "deepcopy": lambda model, x: copy.deepcopy(model),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(model)),
}


def planned() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    model, x = Net(num_blocks=2), torch.randn(64, 32)
    plan_for(model, x, share=0.0).apply()
    return model, x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_planned_model_is_written_down_as_the_plain_one(way: str, is_training: bool):
    """N12"""
    model, x = planned()
    model.train(is_training)
    plain = copy.deepcopy(model)
    made = WAYS[way](model, x)
    results = []
    for each in (made, plain):
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        output = each(given)
        output.square().mean().backward()
        results.append((output.detach(), given.grad))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
    assert model.blocks[0].forward.follower is not None


@pytest.mark.slow
def test_what_is_exported_has_no_trace_of_a_plan():
    """N12"""
    model, x = planned()
    model.eval()
    plain = Net(num_blocks=2).eval()
    graphs = []
    for each in (model, plain):
        exported = torch.export.export(each, (x,), strict=True)
        graphs.append([node.target for node in exported.graph.nodes if node.op == "call_function"])
    assert graphs[0] == graphs[1]


@pytest.mark.filterwarnings("ignore")
def test_scripting_names_the_way_out():
    """N12"""
    model, _ = planned()
    with pytest.raises(AttributeError, match=r"Remove the plan before"):
        torch.jit.script(model)


def test_a_planned_forward_looks_like_the_function_it_stands_for():
    """N12: transformers, accelerate and DataParallel look at these."""
    model, _ = planned()
    forward: Any = model.forward
    plain: Any = Net.forward
    assert str(inspect.signature(forward)) == "(x: 'Tensor') -> 'Tensor'"
    assert inspect.getfullargspec(forward).args == ["self", "x"]
    assert typing.get_type_hints(forward) == typing.get_type_hints(plain)
    for name in ("__name__", "__qualname__", "__doc__", "__code__", "__module__", "__defaults__"):
        assert getattr(forward, name) == getattr(plain, name), name
    # accelerate would call the function past the plan.
    assert not hasattr(forward, "__func__")
    assert not hasattr(forward, "__self__")
