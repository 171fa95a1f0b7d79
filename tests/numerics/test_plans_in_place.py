"""Plans of blocks that change in place what their products made: bit-equal at every budget (F1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recoup
from tests.alive import allocated_bytes


class Attention(nn.Module):
    """Explicit attention of batched products, whose weights `change` changes in place."""

    def __init__(self, change: Callable[[Tensor], Tensor], width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(width, width) for _ in range(3))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        weights = self.change(torch.matmul(self.q(x), self.k(x).transpose(1, 2)))
        return x + self.out(weights.softmax(-1) @ x)


def with_tanh(weights: Tensor) -> Tensor:
    return weights.tanh_().mul(5)


def with_scale(weights: Tensor) -> Tensor:
    weights *= 0.3
    return weights


def with_mask(weights: Tensor) -> Tensor:
    weights *= 0.3
    weights += torch.full(weights.shape[-2:], -1e4).triu(1)
    return weights


def with_numpy(weights: Tensor) -> Tensor:
    """Scale behind torch's back, in a way that no dispatch mode and no version counter sees."""
    values = weights.detach().numpy()
    np.multiply(values, 0.3, out=values)
    return weights


class GRU(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.given, self.gru = nn.Linear(width, 8), nn.GRU(8, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(self.given(x))[0]


class GRUCell(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for step in x.unbind(1)[:3]:
            state = self.cell(step, state)
        return x + state[:, None]


class NumpyMask(nn.Module):
    """A product without a gradient that numpy cuts off in place, as a mask."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            likeness = x @ x.transpose(1, 2)
            values = likeness.numpy()
            values[values < 0] = 0
            values /= 1 + values.max()
        return x + self.down((likeness @ self.up(x)).exp().clamp(max=3.0))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "tanh_": lambda: Attention(with_tanh),
    "*=": lambda: Attention(with_scale),
    "+=": lambda: Attention(with_mask),
    "numpy": lambda: Attention(with_numpy),
    "numpy mask": NumpyMask,
    "GRU": GRU,
    "GRUCell": GRUCell,
}


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def gradients_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()]))


def peak_of(model: nn.Module, x: Tensor) -> int:
    """The most that a step with empty gradients has allocated, by the allocator's reports."""
    leaves = [x, *model.parameters()]
    given = x.detach().requires_grad_()

    def step() -> None:
        output = model(given)
        loss_of(output).backward()

    peak_bytes, _ = allocated_bytes(step)
    for leaf in leaves:
        leaf.grad = None
    return peak_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_budgets", [3, pytest.param(15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", BLOCKS)
def test_f1_gradients_are_those_of_the_plain_step(kind: str, num_budgets: int):
    torch.manual_seed(0)
    model = nn.Sequential(*(BLOCKS[kind]() for _ in range(3)))
    x = torch.randn(*(16, 6, 32) if kind == "GRU" else (4, 32, 32), requires_grad=True)
    plain = gradients_of(model, x)
    whole = recoup.plan(model, x, budget="1 GiB", loss=loss_of)
    ways: set[str] = set()
    for i in range(num_budgets):
        span = whole.most_bytes - whole.least_bytes
        budget = whole.least_bytes + span * (i + 1) // (num_budgets + 1)
        plan = recoup.plan(model, x, budget=budget, loss=loss_of)
        ways |= {row.way for row in plan.blocks}
        with plan.applied():
            found = gradients_of(model, x)
            peak_bytes = peak_of(model, x)
        for got, want in zip(found, plain, strict=True):
            assert torch.equal(got, want), (kind, budget)
        assert peak_bytes <= budget
    assert ways != {"keep"}
