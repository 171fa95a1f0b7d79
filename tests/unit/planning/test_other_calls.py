"""Calls that take more memory, or other blocks, than those that were planned."""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from tests.alive import allocated_bytes
from tests.plan_oracle import (
    Made,
    Residual,
    assert_as_plain,
    dense,
    names_of,
    peak_of,
    square,
    stack,
    step_of,
)

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


def net():
    """Blocks that take a bias for all of them."""
    return Made(
        lambda model, x, bias=0.0: model.out(model.blocks(model.embed(x + bias))),
        embed=nn.Linear(DIM, DIM), blocks=stack(4, Attention), out=nn.Linear(DIM, 1),
    )  # fmt: skip


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
    build: Callable[[], nn.Module] = net
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
    model = net()
    with recoup.plan(model, rows(8, 16), budget="1 GiB", loss=square).applied():
        square(model(rows(2, 64))).backward()
    assert not recwarn.list


# -- blocks that some forwards leave out, and blocks that come later than planned ------------------


class LayerDrop(nn.Module):
    """Calls `among` its layers those that a draw, or `only`, says."""

    def __init__(self, num_layers: int, rate: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual(64) for _ in range(num_layers))
        self.rate = rate
        self.only: Iterable[int] = range(num_layers)

    def forward(self, x):
        x = x + 0 * self.layers[0].up.weight.sum()
        for index in self.only:
            if self.rate == 0 or torch.rand(()) > self.rate:
                x = self.layers[index](x)
        return x


def test_layers_that_are_left_out_keep_to_the_budget():
    """Also where the steps call all of the layers, though few forwards do."""
    model, x = LayerDrop(5, 0.3), torch.randn(256, 64)
    plans = recoup.plan(model, x, loss=square)
    plan, step = plans.plan(plans.least_bytes), step_of(model, x)
    assert (plan.num_seen, plan.num_blocks) == (5, 5)
    assert names_of(plan) == [f"layers.{i}" for i in range(5)]
    for seed in range(6):
        model.rate = 0.3 if seed % 3 else 0.0

        def seeded(seed=seed):
            torch.manual_seed(seed)
            step()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_as_plain(plan, seeded)


def seed_that_calls(num_called, num_layers, rate):
    """Seed torch so that a forward calls so many layers."""
    for seed in range(1000):
        torch.manual_seed(seed)
        if sum(float(torch.rand(())) > rate for _ in range(num_layers)) == num_called:
            torch.manual_seed(seed)
            return
    raise AssertionError("no such seed")


def test_a_frontier_that_is_planned_where_layers_would_be_left_out():
    """Its steps draw what the measured one drew, so its least is that of all layers."""
    model, x = LayerDrop(5, 0.4), torch.randn(256, 64)
    seed_that_calls(0, 5, 0.4)
    assert recoup.plan(model, x, budget="1 GiB", loss=square).num_seen == 5
    seed_that_calls(5, 5, 0.4)
    frontier = recoup.plan(model, x, loss=square)
    seed_that_calls(1, 5, 0.4)
    plan = frontier.plan(frontier.least_bytes)
    model.rate = 0.0
    with plan.applied():
        assert peak_of(model, step_of(model, x)) <= plan.budget_bytes


def test_blocks_that_no_forward_called_are_recomputed_and_said():
    model, x = LayerDrop(6, 0.0), torch.randn(256, 64)
    model.only = range(3)
    plan = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert "seen 3 of 6 blocks" in str(plan)
    model.only, step = range(6), step_of(model, x)
    with plan.applied(), pytest.warns(UserWarning, match="not at all then"):
        found = peak_of(model, step)
    assert peak_of(model, step) - found > 64 * 4 * 256 * 4, "what was not seen kept its residuals"


def test_blocks_in_another_order_keep_what_was_planned_once():
    """A block that is called again is recomputed, though the plan keeps it."""
    model, x = LayerDrop(4, 0.0), torch.randn(256, 64)
    step = step_of(model, x)
    with recoup.plan(model, x, budget="1 GiB", loss=square).applied():
        plan_bytes = peak_of(model, step)
        for only, num_more in (((3, 1, 0, 2), 0), ((0, 1, 2, 3, 3, 3, 3), 3)):
            model.only = only
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = peak_of(model, step)
            assert found - plan_bytes <= x.nbytes * (num_more + 5)
