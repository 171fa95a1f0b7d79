"""torch.compile around ours, and ours around compiled modules: the gradients of the plain run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.invertible import AdditiveCoupling, Chain

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.slow,
    # What the compiler itself warns of when a graph breaks.
    pytest.mark.filterwarnings("ignore"),
]


def dense(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))


def gradients(call, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    y = call(x)
    y = y[0] if isinstance(y, tuple) else y
    y.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("memory", ["sqrt", "constant"])
def test_a_compiled_chain_breaks_the_graph_and_is_right(memory):
    torch.manual_seed(0)
    if memory == "sqrt":
        model = recoup.Sequential(*(dense(6) for _ in range(4)), memory=memory)
    else:
        model = Chain(*(AdditiveCoupling(dense(3), dense(3)) for _ in range(3)), memory=memory)
    x = torch.randn(5, 6)
    want = gradients(model, model, x)
    got = gradients(torch.compile(model, backend="aot_eager"), model, x)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=name)


def test_a_linear_chain_compiles_into_one_graph():
    torch.manual_seed(0)
    model = Chain(*(AdditiveCoupling(dense(3), dense(3)) for _ in range(2)))
    x = torch.randn(5, 6)
    want = gradients(model, model, x)
    got = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), model, x)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=name)


def test_compiled_modules_in_a_chain():
    torch.manual_seed(0)
    blocks = [dense(6) for _ in range(4)]
    plain, x = nn.Sequential(*blocks), torch.randn(5, 6)
    want = gradients(plain, plain, x)
    compiled = [torch.compile(block, backend="aot_eager") for block in blocks]
    model = recoup.Sequential(*compiled, memory="sqrt")
    got = gradients(model, model, x)
    assert len(got) == len(want)
    for value, expected in zip(got.values(), want.values(), strict=True):
        torch.testing.assert_close(value, expected)
