"""A small model for plans, and what a step of it makes, for the tests of plans in company."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import recoup
from recoup.planning import compiling, plan, priced_ways


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Five blocks with draws, a norm that counts before them, and a head after them."""

    def __init__(self, width: int = 32, num_blocks: int = 5, block: Any = Block) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.blocks = nn.ModuleList(block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fresh(**options: Any) -> tuple[Net, Tensor]:
    """The model, always the same, and its input."""
    torch.manual_seed(0)
    return Net(**options), torch.randn(64, 32)


class Language(nn.Module):
    """A language model of 64 units that returns its loss; most of a step are its logits."""

    def __init__(self, vocabulary: int = 2048) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(64, vocabulary)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).flatten(0, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens), tokens.flatten())


class Logits(Language):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(tokens)


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def plan_for(model: Any, *args: Any, share=0.5, more_bytes=0, **options: Any) -> recoup.Plan:
    """The plan for a budget between the least (0) and what a plain step takes (1), and more."""
    options.setdefault("loss", loss_of)
    whole = recoup.plan(model, *args, budget="1 GiB", **options)
    budget = whole.least_bytes + int((whole.most_bytes - whole.least_bytes) * share) + more_bytes
    made = recoup.plan(model, *args, budget=budget, **options)
    assert {row.way for row in made.blocks} != {"keep"}, "the plan has nothing to do"
    return made


def peak_of(step: Callable[[], Any]) -> int:
    """The most bytes that a step takes on the CPU, beyond what was there before it."""
    return recoup.measure(step, device="cpu", repeats=0).peak_bytes


def give_steady_times(monkeypatch: Any) -> None:
    """Let compiling pay, and keeping more be faster, whatever the clock says."""
    count = itertools.count()

    def times(own: Any, steps: Any) -> list[tuple[float, float]]:
        is_own = next(count) % (1 + len(compiling.SHARES)) == 0
        most = 3.0 if is_own else 2.0
        return [(1.0, most - c.own_bytes / (c.own_bytes + 2**18)) for c in steps[0].calls]

    monkeypatch.setattr(priced_ways, "_times", times)
    give_steps_times(monkeypatch, compiled=1.0, others=2.0)


def give_steps_times(monkeypatch: Any, *, compiled: float, others: float) -> None:
    """Let whole steps take so many seconds, whatever the clock says."""

    def seconds(made: Any, kind: Any) -> float:
        return compiled if kind.is_compiled else others

    monkeypatch.setattr(plan, "_seconds_under", seconds)


def result_of(model: nn.Module, step: Callable[[], Any]) -> dict[str, Any]:
    """Gradients, buffers, the random stream, and what `step` returns; the model is as before."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    torch.manual_seed(1)
    returned = step()
    found = {f"grad of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    found |= {"stream": torch.get_rng_state()}
    found |= {f"returned {i}": value for i, value in enumerate(returned or ())}
    model.zero_grad()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return found


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal if isinstance(value, Tensor) else operator.eq
        assert same(found[name], value), name
