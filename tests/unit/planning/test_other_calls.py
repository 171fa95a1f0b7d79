"""Calls that take more memory than those before: chains plan anew, and planned models say it."""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from tests.alive import allocated_bytes
from tests.plan_oracle import Made, dense, square, stack

DIM = 16


class Attention(nn.Module):
    """A block whose memory grows with the square of the length."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(DIM, 3 * DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        q, k, v = self.mix(x).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return x + self.down(self.dropout(nn.functional.gelu(self.up(x))))


def rows(*shape):
    return torch.randn(*shape, DIM)


def as_it_is(model):
    return model


# -- chains ----------------------------------------------------------------------------------------


def trained(place):
    return lambda chain: (chain.requires_grad_(False), chain[place].requires_grad_(True))


MORE = {
    "longer rows": (as_it_is, as_it_is, (2, 64)),
    "the first block": (trained(3), trained(0), (8, 16)),
    "dropout": (nn.Module.eval, nn.Module.train, (8, 16)),
}


def chain_for(memory):
    return recoup.Sequential(*stack(4, Attention), memory=memory)


def least_of(chain, x):
    with pytest.raises(BudgetError) as caught:
        chain(x)
    return caught.value.least_bytes


@pytest.mark.parametrize("kind", MORE)
def test_a_chain_keeps_to_its_bytes_or_raises(kind):
    before, after, shape = MORE[kind]
    chain, first, x = chain_for("1 KiB"), rows(8, 16), rows(*shape)
    before(chain)
    chain.memory = f"{least_of(chain, first)} B"
    chain(first).sum().backward()
    after(chain)
    least = least_of(chain, x)
    chain.memory = f"{least} B"
    before(chain)
    chain(first).sum().backward()  # plans with more room than it needs
    after(chain)
    chain(x).sum().backward()
    chain.zero_grad()
    peak, _ = allocated_bytes(lambda: chain(x).sum().backward())
    assert peak <= least


def test_a_chain_plans_anew_only_for_what_takes_more():
    """Shapes of which none covers another take turns; larger ones, and what is trained."""
    chain, plans = chain_for("1 GiB"), []

    def plan_of(*shape):
        chain(rows(*shape)).sum().backward()
        (plan,) = recoup.applied_plans(chain)
        plans.extend([] if plan in plans else [plan])
        return plans.index(plan)

    shapes = [(8, 16), (2, 64), (8, 16), (1, 32), (4, 8)]
    assert [plan_of(*shape) for shape in shapes] == [0, 1, 0, 1, 0]
    trained(1)(chain)
    assert plan_of(8, 16) == 0
    chain.memory = "1 GiB"
    assert plan_of(8, 16) == 2
    chain.requires_grad_(True)
    assert plan_of(8, 16) == 3
    chain.eval()
    assert plan_of(16, 16) == 4
    chain.train()
    assert plan_of(8, 16) == 3  # that of before serves again


# -- models ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """Blocks that take a bias for all of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)
        self.blocks = nn.Sequential(*(Attention() for _ in range(4)))

    def forward(self, x, bias=0.0):
        return self.out(self.blocks(self.embed((x + bias).to(self.embed.weight.dtype))))


class Batch:
    """A batch that holds itself and its tensors in a store, as those of torch_geometric do."""

    def __init__(self, x):
        self.store = types.SimpleNamespace(mapping={"x": x}, parent=self, rest=[*range(10**4)])

    def __getattr__(self, name):
        raise RuntimeError("this is the user's code")


def wider(model):
    model.blocks[0].up, model.blocks[0].down = nn.Linear(DIM, 640), nn.Linear(640, DIM)


class Said(NamedTuple):
    """A plan for a batch of 8 x 16, what is no news for it, and then what takes more."""

    words: str
    before: Callable[[Any], Any] = as_it_is
    no_news: Callable[[Any], Any] = as_it_is
    smaller: tuple[tuple[int, ...], ...] = ()
    more: Callable[[Any], Any] = as_it_is
    shape: tuple[int, ...] = (8, 16)
    others: Any = None
    build: Callable[[], nn.Module] = Net
    batch: Callable[..., Any] = rows


SAID = {
    "longer rows": Said(
        "argument of 2 x 64 x 16 where the plan is for 8 x 16 x 16",
        smaller=((8, 9), (3, 16), (1, 1)), shape=(2, 64),
    ),
    "a larger batch": Said(
        "an argument of 128 x 16 x 16 where the plan is for 8 x 16 x 16",
        smaller=((1, 16), (128,)), shape=(128, 16), build=lambda: dense(4, DIM),
    ),
    "a batch that is an object": Said(
        "an argument of 8 x 64 x 16 where the plan is for 8 x 16 x 16", shape=(8, 64),
        build=lambda: Made(lambda m, x: m.blocks(x[0].store.mapping["x"]), blocks=dense(4, 16)),
        batch=lambda *shape: [Batch(rows(*shape))],
    ),
    "frozen blocks": Said(
        "`blocks.0.mix.weight` requiring a gradient",
        before=lambda model: model.blocks.requires_grad_(False),
        no_news=lambda model: model.embed.requires_grad_(False),
        more=lambda model: model.requires_grad_(True),
    ),
    "a dropout": Said(
        "`blocks.2.dropout` in training mode",
        before=lambda model: model.blocks[2].dropout.eval(), no_news=nn.Module.eval,
        more=nn.Module.train,
    ),
    "another argument": Said("an argument of 8 x 16 x 16 that it was not", others=rows(8, 16)),
    "wider layers": Said("`blocks.0.up.weight` of more bytes", more=wider),
    "more layers": Said(
        "with more parameters", more=lambda model: model.blocks.append(Attention())
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_takes_more_than_was_planned_is_said_once_by_name(name):
    said = SAID[name]
    model, batch = said.build(), said.batch
    said.before(model)
    frontier = recoup.plan(model, batch(8, 16), loss=square)
    with frontier.plan(frontier.least_bytes).applied(), warnings.catch_warnings():
        warnings.simplefilter("error")
        said.no_news(model)
        for shape in ((8, 16), *said.smaller):
            square(model(batch(*shape))).backward()
        said.more(model)
        others = {} if said.others is None else {"bias": said.others}
        with pytest.warns(UserWarning, match=re.escape(said.words)):
            model(batch(*said.shape), **others)
        model(batch(*said.shape), **others)


def test_a_plan_with_room_for_longer_rows_says_nothing(recwarn):
    model = Net()
    with recoup.plan(model, rows(8, 16), budget="1 GiB", loss=square).applied():
        square(model(rows(2, 64))).backward()
    assert not recwarn.list
