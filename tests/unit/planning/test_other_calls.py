"""Calls that take more memory, or other blocks, than those that were planned."""

from __future__ import annotations

import re
import types
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from recoup.planning import replanning
from tests import plan_oracle
from tests.alive import allocated_bytes
from tests.plan_oracle import Made, assert_as_plain, dense, peak_of, square, stack, step_of

DIM = 16


def attention():
    """A block whose memory grows with the square of the length."""

    def forward(block, x):
        q, k, v = block.mix(x).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return x + block.down(block.dropout(nn.functional.gelu(block.up(x))))

    mix, up, down = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
    return Made(forward, mix=mix, up=up, down=down, dropout=nn.Dropout(0.2))


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
    return recoup.Sequential(*stack(4, attention), memory=memory)


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


def test_batches_of_many_sizes_get_few_plans_that_lose_little():
    model, runs, loss = dense(12, 32), [], lambda y: y.abs().sum()
    budget = int(1.2 * recoup.plan(model, torch.ones(128, 32)).least_bytes)
    sizes = [96, 64, *range(98, 129, 2)]  # one that another serves at a loss, and some that grow
    own = {size: recoup.plan(model, torch.ones(size, 32), budget=budget) for size in sizes[1::8]}
    for block in model:
        block[0].register_forward_hook(lambda *_: runs.append(1))
    first = recoup.plan(model, torch.ones(sizes[0], 32), budget=budget, replan=True)
    made = mock.patch.object(replanning, "frontier_of", wraps=replanning.frontier_of)
    with first.applied(), made as planning:
        for size in sizes:
            step = step_of(model, torch.ones(size, 32), loss=loss)
            step()
            runs.clear()
            assert peak_of(model, step) <= budget
            if size in own:  # backward takes twice the time of forward
                least = sum(row.num_forwards for row in own[size].blocks)
                assert 24 + len(runs) <= 1.05 * (24 + least)
    assert 1 < planning.call_count <= 8, planning.call_count


# -- models ----------------------------------------------------------------------------------------


def net():
    return Made(
        lambda model, x, bias=0.0: model.out(model.blocks(model.embed(x + bias))),
        embed=nn.Linear(DIM, DIM), blocks=stack(4, attention), out=nn.Linear(DIM, 1),
    )  # fmt: skip


class Batch:
    """A batch that holds itself and its tensors in a store, as those of torch_geometric do."""

    def __init__(self, x):
        self.store = types.SimpleNamespace(mapping={"x": x}, parent=self, rest=[*range(10**4)])

    def __getattr__(self, name):
        raise RuntimeError("this is the user's code")


def wider(model):
    model.blocks[0].up, model.blocks[0].down = nn.Linear(DIM, 640), nn.Linear(640, DIM)


# A plan for a batch of 8 x 16, what is no news for it, what takes more, and what is said.
SAID = {
    "longer rows": (
        {"smaller": [(8, 9), (3, 16), (1, 1)], "shape": (2, 64)},
        "argument of 2 x 64 x 16 where the plan is for 8 x 16 x 16",
    ),
    "a larger batch": (
        {"smaller": [(1, 16), (128,)], "shape": (128, 16), "build": lambda: dense(4, DIM)},
        "an argument of 128 x 16 x 16 where the plan is for 8 x 16 x 16",
    ),
    "a batch that is an object": (
        {"build": lambda: Made(lambda m, x: m.blocks(x[0].store.mapping["x"]), blocks=dense(4, 16)),
         "batch": lambda *shape: [Batch(rows(*shape))], "shape": (8, 64)},
        "an argument of 8 x 64 x 16 where the plan is for 8 x 16 x 16",
    ),
    "frozen blocks": (
        {"before": lambda model: model.blocks.requires_grad_(False),
         "no_news": lambda model: model.embed.requires_grad_(False),
         "more": lambda model: model.requires_grad_(True)},
        "`blocks.0.mix.weight` requiring a gradient",
    ),
    "a dropout": (
        {"before": lambda model: model.blocks[2].dropout.eval(),
         "no_news": nn.Module.eval, "more": nn.Module.train},
        "`blocks.2.dropout` in training mode",
    ),
    "another argument": ({"bias": rows(8, 16)}, "an argument of 8 x 16 x 16 that it was not"),
    "wider layers": ({"more": wider}, "`blocks.0.up.weight` of more bytes"),
    "more layers": ({"more": lambda m: m.blocks.append(attention())}, "with more parameters"),
}  # fmt: skip


def warned_once(words, build=net, batch=rows, before=as_it_is, no_news=as_it_is, smaller=(),
                more=as_it_is, shape=(8, 16), **others):  # fmt: skip
    model = build()
    before(model)
    frontier = recoup.plan(model, batch(8, 16), loss=square)
    with frontier.plan(frontier.least_bytes).applied(), warnings.catch_warnings():
        warnings.simplefilter("error")
        no_news(model)
        for each in ((8, 16), *smaller):
            square(model(batch(*each))).backward()
        more(model)
        with pytest.warns(UserWarning, match=re.escape(words)):
            model(batch(*shape), **others)
        model(batch(*shape), **others)


@pytest.mark.parametrize("name", SAID)
def test_what_takes_more_than_was_planned_is_said_once_by_name(name):
    options, words = SAID[name]
    warned_once(words, **options)


def test_a_plan_with_room_for_longer_rows_says_nothing(recwarn):
    with recoup.plan(model := net(), rows(8, 16), budget="1 GiB", loss=square).applied():
        square(model(rows(2, 64))).backward()
    assert not recwarn.list


# -- blocks that some forwards leave out, and blocks that come later than planned ------------------


def layer_drop(num_layers, rate):
    def forward(model, x):
        x = x + 0 * model.layers[0].up.weight.sum()
        for index in model.only:
            if model.rate == 0 or torch.rand(()) > model.rate:
                x = model.layers[index](x)
        return x

    layers = stack(num_layers, partial(plan_oracle.Residual, 64))
    return Made(forward, layers=layers, rate=rate, only=range(num_layers)), torch.randn(256, 64)


def test_layers_that_are_left_out_keep_to_the_budget():
    model, x = layer_drop(5, 0.3)
    plans = recoup.plan(model, x, loss=square)
    plan, step = plans.plan(plans.least_bytes), step_of(model, x)
    assert (plan.num_seen, plan.num_blocks) == (5, 5)
    assert plan_oracle.names_of(plan) == [f"layers.{i}" for i in range(5)]
    for seed in range(6):
        model.rate = 0.3 if seed % 3 else 0.0
        seeded = lambda seed=seed: (torch.manual_seed(seed), step())[1]  # noqa: E731
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_as_plain(plan, seeded)


def test_blocks_that_no_forward_called_are_recomputed_and_said():
    model, x = layer_drop(6, 0.0)
    model.only = range(3)
    plan = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert "seen 3 of 6 blocks" in str(plan)
    model.only, step = range(6), step_of(model, x)
    with plan.applied(), pytest.warns(UserWarning, match="not at all then"):
        found = peak_of(model, step)
    assert peak_of(model, step) - found > 64 * 4 * 256 * 4, "what was not seen kept its residuals"


def test_blocks_in_another_order_keep_what_was_planned_once():
    model, x = layer_drop(4, 0.0)
    step = step_of(model, x)
    with recoup.plan(model, x, budget="1 GiB", loss=square).applied(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan_bytes = peak_of(model, step)
        for model.only, num_more in (((3, 1, 0, 2), 0), ((0, 1, 2, 3, 3, 3, 3), 3)):
            assert peak_of(model, step) - plan_bytes <= x.nbytes * (num_more + 5)
