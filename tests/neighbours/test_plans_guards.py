"""What changes between forward and backward of a planned model: right, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from tests.neighbours.planned import Net, assert_same, loss_of, plan_for, result_of


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


class Stack(nn.Module):
    """Such blocks, and the arguments that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.x, self.shift = torch.randn(64, 32), torch.randn(32)
        self.items, self.options = [torch.randn(32)], {"inner": [torch.randn(32)]}

    @property
    def args(self) -> tuple[Any, ...]:
        return self.x, self.shift, self.items, self.options

    def forward(self, x: Tensor, shift: Tensor, items: list[Tensor], options: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, shift=shift, items=items, options=options)
        return x


def stepped(model: Stack) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1)


def other_weight(model: Stack) -> None:
    model.blocks[0].up.weight = nn.Parameter(2 * model.blocks[0].up.weight.detach())


def other_memory(model: Stack) -> None:
    model.blocks[0].up.weight.data = 2 * model.blocks[0].up.weight.data


IN_PLACE = "modified by an inplace operation|changed in place"
CHANGES: dict[str, tuple[Callable[[Stack], Any], str]] = {  # the change, and the error if it is one
    "step": (stepped, IN_PLACE),
    "keyword": (lambda m: m.shift.add_(1), IN_PLACE),
    "mode": (lambda m: m.eval(), "block `blocks.* mode"),
    "buffer": (lambda m: m.blocks[0].scale.mul_(2), "block `blocks.0` again"),
    "other weight": (other_weight, "block `blocks.0` .* a parameter in it was replaced"),
    "other forward": (
        lambda m: setattr(m.blocks[0].up, "forward", lambda x: x.repeat(1, 4)),
        "block `blocks.0` again",
    ),
    "other item": (lambda m: m.items.__setitem__(0, 2 * m.items[0]), ""),
    "other layer": (
        lambda m: setattr(m.blocks[0], "up", nn.Linear(32, 128)),
        "block `blocks.0` .* a module in it was replaced",
    ),
    "other memory": (other_memory, "block `blocks.0` again"),
}


@pytest.mark.filterwarnings("ignore:The first step of a Stack")  # a change takes memory, too
@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_in_a_planned_model(what: str):
    torch.manual_seed(0)
    model, (change, text) = Stack(), CHANGES[what]
    loss_of(model(*model.args)).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with plan_for(model, *model.args, share=0.0).applied() as plan:
        assert plan.blocks[0].way != "keep"
        loss = loss_of(model(*model.args))
        change(model)
        if text:
            with pytest.raises(RuntimeError, match=text):
                loss.backward()
            return
        loss.backward()
    assert all(torch.equal(p.grad, wanted[name]) for name, p in model.named_parameters())


# -- blocks with states of their own ---------------------------------------------------------------


class Storing(nn.Module):
    """Stores what it made."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(self.up(x))
        return x + self.down(torch.sin(self.last))


class Counting(Storing):
    """Counts what it was given in a buffer, and computes with the count."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_((x > 0).sum() / x.numel())
        return x + self.down(torch.tanh(self.up(x))) / (1 + self.seen)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("kind", [Storing, Counting])
def test_a_planned_block_counts_once(kind: Any, share: float):
    torch.manual_seed(0)
    model, x = Net(block=kind), torch.randn(64, 32)

    def two_steps() -> None:
        for _ in range(2):
            loss_of(model(x)).backward()

    wanted, frontier = result_of(model, two_steps), recoup.plan(model, x, loss=loss_of)
    least, most = frontier.least_bytes, frontier.points[-1].peak_bytes
    with frontier.plan(least + int(share * (most - least))).applied():
        assert_same(result_of(model, two_steps), wanted)
