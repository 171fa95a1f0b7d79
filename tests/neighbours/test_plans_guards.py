"""What changes between forward and backward of a planned model: right, or an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.errors import RecoupError, ReplayError
from tests.neighbours.planned import Net, loss_of, plan_for

SHARES = [0.0, 0.5]
IDS = ["least", "middle"]


class Scaled(nn.Module):
    """Takes tensors in every form, and holds a buffer and a norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor, *, shift: Tensor, items: list[Tensor], options: Any) -> Tensor:
        y = self.down(torch.tanh(self.up(x * self.scale)))
        y = y + torch.sin(x * shift) + torch.sin(x * items[0])
        return self.norm(x + y * torch.sin(x * options["inner"][0]))


class Given:
    """A model of such blocks and its arguments."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.model = Stack(self.blocks)
        self.x, self.shift = torch.randn(64, 32), torch.randn(32)
        self.items, self.options = [torch.randn(32)], {"inner": [torch.randn(32)]}

    @property
    def args(self) -> tuple[Any, ...]:
        return self.x, self.shift, self.items, self.options

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def stepped(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(0.1)


class Stack(nn.Module):
    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor, shift: Tensor, items: list[Tensor], options: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, shift=shift, items=items, options=options)
        return x


def other_weight(given: Given) -> None:
    given.blocks[0].up.weight = nn.Parameter(2 * given.blocks[0].up.weight)


def other_buffer(given: Given) -> None:
    given.blocks[0].scale = 2 * given.blocks[0].scale


def other_layer(given: Given) -> None:
    given.blocks[0].up = nn.Linear(32, 128)


def other_memory(given: Given) -> None:
    given.blocks[0].up.weight.data = 2 * given.blocks[0].up.weight.data


def other_forward(given: Given) -> None:
    given.blocks[0].up.forward = lambda x: x.repeat(1, 4)


def other_item(given: Given) -> None:
    given.items[0] = 2 * given.items[0]


def loaded(given: Given) -> None:
    given.model.load_state_dict({k: 2 * v for k, v in given.model.state_dict().items()})


CHANGES: list[Any] = [
    (Given.stepped, "modified by an inplace operation|changed in place"),
    (loaded, "modified by an inplace operation|changed in place"),
    (lambda given: given.shift.add_(1), "modified by an inplace operation|changed in place"),
    (lambda given: given.items[0].add_(1), "modified by an inplace operation|changed in place"),
    (lambda given: given.options["inner"][0].add_(1), "inplace operation|changed in place"),
    (lambda given: given.model.eval(), "block `blocks.* mode"),
    (lambda given: given.blocks[0].norm.eval(), "block `blocks.0` .*BatchNorm1d"),
    (lambda given: given.blocks[0].scale.mul_(2), "block `blocks.0` again"),
    (other_buffer, "block `blocks.0` again"),
    (other_weight, "block `blocks.0` .* a parameter in it was replaced"),
    (other_forward, "block `blocks.0` again"),
    (other_item, ""),
    (other_layer, "block `blocks.0` .* a module in it was replaced"),
    (other_memory, "block `blocks.0` again"),
]
NAMES = [
    "step", "load", "keyword", "list", "dict", "mode", "mode of a part", "buffer", "other buffer",
    "other weight", "other forward", "other item", "other layer", "other memory",
]  # fmt: skip


def is_right_or_an_error(given: Given, loss: Tensor, wanted: dict[str, Tensor], text: str) -> None:
    if text:
        with pytest.raises(RuntimeError, match=text):
            loss.backward()
        return
    loss.backward()
    found = given.gradients()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.filterwarnings("ignore:The first step of a Stack")  # a change takes memory, too
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("change", "text"), CHANGES, ids=NAMES)
def test_what_changes_in_a_planned_model(change: Callable[[Given], Any], text: str):
    given = Given()
    loss_of(given.model(*given.args)).backward()
    wanted = given.gradients()
    given.model.zero_grad()
    with plan_for(given.model, *given.args, share=0.0).applied() as plan:
        assert plan.blocks[0].way != "keep"
        loss = loss_of(given.model(*given.args))
        change(given)
        is_right_or_an_error(given, loss, wanted, text)


class Drawing(nn.Module):
    """Multiplies by numbers of some source."""

    def __init__(self, width: int, numbers: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.numbers = numbers
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.numbers(x)
        self.seen.append(drawn)
        return x + self.down(torch.sin(self.up(x * drawn)))


def filled(x: Tensor, number: float) -> Tensor:
    return torch.full_like(x, number, requires_grad=False)


def of_torch() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda x: torch.rand(x.shape, generator=generator)


def of_numpy() -> Callable[[Tensor], Tensor]:
    return lambda x: filled(x, float(np.random.rand()))


def of_python() -> Callable[[Tensor], Tensor]:
    return lambda x: filled(x, random.random())


def of_a_numpy_generator() -> Callable[[Tensor], Tensor]:
    generator = np.random.default_rng(0)
    return lambda x: filled(x, float(generator.random()))


def of_a_python_generator() -> Callable[[Tensor], Tensor]:
    generator = random.Random(0)
    return lambda x: filled(x, generator.random())


SOURCES = [of_torch, of_numpy, of_python, of_a_numpy_generator, of_a_python_generator]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", SOURCES)
def test_numbers_from_elsewhere_in_a_planned_block(make: Callable[[], Any]):
    torch.manual_seed(0)
    numbers = make()
    model, x = Net(block=lambda width: Drawing(width, numbers)), torch.randn(64, 32)
    try:
        plan = plan_for(model, x, share=0.0).apply()
    except (ReplayError, UserWarning):  # right, or this: it keeps everything
        return
    for block in model.blocks:
        block.seen.clear()
    loss = loss_of(model(x))
    try:
        loss.backward()
    except RecoupError:
        return
    finally:
        plan.remove()
    for block in model.blocks:
        assert all(torch.equal(block.seen[0], each) for each in block.seen)


class Storing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.up(x))
        return x + self.down(torch.sin(self.last))


def test_blocks_that_store_what_they_made():
    torch.manual_seed(0)
    model, x = Net(block=Storing), torch.randn(64, 32)
    loss_of(model(x)).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    whole = recoup.plan(model, x, budget="1 GiB", loss=loss_of)
    for share in (0.4, 0.8):
        budget = whole.least_bytes + int((whole.most_bytes - whole.least_bytes) * share)
        model.zero_grad()
        with recoup.plan(model, x, budget=budget, loss=loss_of).applied():
            loss = loss_of(model(x))
            loss.backward()
        assert all(torch.equal(p.grad, wanted[name]) for name, p in model.named_parameters())


class Counting(nn.Module):
    """Counts what it was given in a buffer, and computes with the count."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_((x > 0).sum() / x.numel())
        return x + self.down(torch.tanh(self.up(x))) / (1 + self.seen)


@pytest.mark.parametrize("share", SHARES, ids=IDS)
def test_a_planned_block_counts_once(share: float):
    torch.manual_seed(0)
    model, x = Net(block=Counting).train(), torch.randn(64, 32)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def two_steps() -> list[Tensor]:
        model.load_state_dict(state)
        model.zero_grad()
        for _ in range(2):
            loss_of(model(x)).backward()
        return [
            *(p.grad.clone() for p in model.parameters()),
            *(b.clone() for b in model.buffers()),
        ]

    wanted = two_steps()
    model.load_state_dict(state)
    plan = plan_for(model, x, share=share)
    with plan.applied():
        found = two_steps()
    assert all(map(torch.equal, found, wanted))
