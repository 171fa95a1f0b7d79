"""Code that decides at ties, and rounding errors that break them otherwise in a second run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

NUM_EXPERTS = 8


def is_second_run() -> bool:
    return torch._C._current_graph_task_id() != -1


@torch.no_grad()
def an_ulp_off(values: Tensor) -> Tensor:
    """The values, of which the later half along the last dimension is one rounding step larger."""
    size = values.shape[-1]
    later = torch.arange(size, device=values.device) % 4 >= 2
    return torch.where(later, torch.nextafter(values, values.new_full((), torch.inf)), values)


def perturbed(values: Tensor) -> Tensor:
    """The values, one rounding step off where this is a second run."""
    if not is_second_run():
        return values
    return values + (an_ulp_off(values.detach()) - values.detach())


class Router(nn.Module):
    """Experts of which each token takes two; rows of the gate are equal, so that there are ties."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate = nn.Linear(width, NUM_EXPERTS, bias=False)
        with torch.no_grad():
            self.gate.weight.copy_(self.gate.weight[:2].repeat_interleave(4, 0))
        self.first = nn.Parameter(torch.randn(NUM_EXPERTS, width, width) / width**0.5)
        self.second = nn.Parameter(torch.randn(NUM_EXPERTS, width, width) / width**0.5)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logits.topk(2, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        scores, indices = self.choose(perturbed(self.gate(x)))
        # Each token with the weights of its experts: shapes do not show which.
        hidden = torch.einsum("nd,nkde->nke", x, self.first[indices]).relu()
        made = torch.einsum("nke,nkef->nkf", hidden, self.second[indices])
        return x + (made * scores.softmax(-1)[..., None]).sum(1)


class Grouped(Router):
    """The same, expert by expert: shapes show how many tokens each has."""

    def forward(self, x: Tensor) -> Tensor:
        scores, indices = self.choose(perturbed(self.gate(x)))
        made = torch.zeros_like(x)
        for expert in range(NUM_EXPERTS):
            token, place = (indices == expert).nonzero(as_tuple=True)
            hidden = (x[token] @ self.first[expert]).relu() @ self.second[expert]
            weight = scores.softmax(-1)[token, place, None]
            made = made.index_add(0, token, hidden * weight)
        return x + made


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


@contextmanager
def perturbed_linear(of: Any) -> Iterator[None]:
    """A context in which the linear layers of weight `of` are a rounding step off in backward."""
    real = nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        made = real(x, weight, bias)
        return perturbed(made) if any(weight is each for each in of) else made

    with mock.patch.object(nn.functional, "linear", linear):
        yield
