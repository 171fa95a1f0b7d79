"""Calls that take more memory than the first, with as many bytes of arguments: never silently."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from tests.alive import allocated_bytes

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


def planned(least_for, memory=None):
    """A chain of attention, with the bytes that a first call needs at least, or `memory`."""
    torch.manual_seed(0)
    chain = recoup.Sequential(*(Attention() for _ in range(4)), memory=memory or "1 KiB")
    least_for(chain)
    if memory is None:
        with pytest.raises(BudgetError) as caught:
            chain(rows(8, 16))
        chain.memory = f"{caught.value.least_bytes} B"
        chain(rows(8, 16)).sum().backward()
    return chain


def trained(*places):
    def choose(chain):
        chain.requires_grad_(False)
        for place in places:
            chain[place].requires_grad_(True)

    return choose


def dropped(is_training):
    def switch(chain):
        for block in chain:
            block.dropout.train(is_training)

    return switch


MORE = {
    "longer rows": (lambda chain: None, lambda chain: None, (2, 64)),
    "the first block": (trained(3), trained(0), (8, 16)),
    "dropout": (dropped(is_training=False), dropped(is_training=True), (8, 16)),
}


@pytest.mark.parametrize("kind", MORE)
def test_a_chain_keeps_to_its_bytes_or_raises(kind):
    """R10: whatever the first forward was planned with."""
    before, after, shape = MORE[kind]
    chain = planned(before)
    after(chain)
    with pytest.raises(BudgetError) as caught:
        chain(rows(*shape))
    chain.memory = f"{caught.value.least_bytes} B"
    before(chain)
    chain(rows(8, 16)).sum().backward()  # plans with more room than it needs
    after(chain)
    x = rows(*shape)
    chain(x).sum().backward()
    chain.zero_grad()
    peak, _ = allocated_bytes(lambda: chain(x).sum().backward())
    assert peak <= caught.value.least_bytes


def test_a_chain_plans_once_for_shapes_that_take_turns():
    """R10: none of which is larger in all dimensions; what is smaller is served."""
    chain, made = planned(lambda chain: None, "1 GiB"), []
    for shape in [(8, 16), (2, 64), (8, 16), (2, 64), (1, 32), (4, 8), (8, 16)]:
        chain(rows(*shape)).sum().backward()
        (plan,) = recoup.applied_plans(chain)
        made.append(plan)
    assert len(set(made)) == 2
    assert [plan is made[0] for plan in made] == [True, False, True, False, False, True, True]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, DIM)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.out = nn.Linear(DIM, 1)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x).square().mean()


def tokens(*shape):
    return torch.randint(9, shape)


def least(model, *args):
    with pytest.raises(BudgetError) as caught:
        recoup.plan(model, *args, budget=1)
    return recoup.plan(model, *args, budget=caught.value.least_bytes)


def test_longer_rows_of_as_many_bytes_are_said_once():
    """N15: shorter rows, and a smaller last batch, are no news."""
    model = Net()
    with least(model, tokens(8, 16)).applied(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in [(8, 16), (8, 9), (3, 16), (1, 1)]:
            model(tokens(*shape)).backward()
        with pytest.warns(UserWarning, match="argument of 2 x 64 where the plan is for 8 x 16"):
            model(tokens(2, 64)).backward()
        model(tokens(1, 128)).backward()


def test_a_plan_with_room_for_longer_rows_says_nothing():
    """N15"""
    model = Net()
    plan = recoup.plan(model, tokens(8, 16), budget="1 GiB")
    with plan.applied(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens(2, 64)).backward()


def frozen_blocks(model):
    model.blocks.requires_grad_(False)


def one_dropout_off(model):
    model.blocks[2].dropout.eval()


@pytest.mark.parametrize(
    ("before", "now", "then", "words"),
    [
        (frozen_blocks, lambda model: model.embed.requires_grad_(False),
         lambda model: model.requires_grad_(True),
         r"`blocks\.0\.mix\.weight` requiring a gradient"),
        (one_dropout_off, lambda model: model.eval(), lambda model: model.train(),
         r"`blocks\.2\.dropout` in training mode"),
    ],
)  # fmt: skip
def test_what_begins_to_take_memory_is_said_once_by_name(before, now, then, words):
    """N15: what takes less is no news."""
    model = Net()
    before(model)
    with least(model, tokens(8, 16)).applied(), warnings.catch_warnings():
        warnings.simplefilter("error")
        now(model)
        model(tokens(8, 16)).backward()
        then(model)
        with pytest.warns(UserWarning, match=words):
            model(tokens(8, 16)).backward()
        model(tokens(8, 16)).backward()


class Biased(nn.Module):
    """Blocks that take a bias for all of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Attention() for _ in range(4)))

    def forward(self, x, bias=0.0):
        return self.blocks(x + bias)


def wider(model):
    model.blocks[0].up, model.blocks[0].down = nn.Linear(DIM, 640), nn.Linear(640, DIM)


# What is changed before a call, its arguments beside the batch, and what the warning names.
OTHERWISE = {
    "another argument": (lambda model: None, {"bias": rows(8, 16)}, "an argument of 8 x 16 x 16"),
    "wider layers": (wider, {}, "`blocks.0.up.weight` of more bytes"),
    "more layers": (lambda model: model.blocks.append(Attention()), {}, "with more parameters"),
    "another type": (lambda model: model.double(), {}, "`blocks.0.mix.weight` of more bytes"),
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_planned_model_says_what_it_was_not_planned_with(kind):
    change, others, words = OTHERWISE[kind]
    model, x = Biased(), rows(8, 16)
    frontier = recoup.plan(model, x)
    with frontier.plan(frontier.least_bytes).applied():
        model(x).sum().backward()
        change(model)
        x = x.to(next(model.parameters()).dtype)
        with pytest.warns(UserWarning, match=re.escape(words)):
            model(x, **others)
