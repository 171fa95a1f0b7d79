"""What an allocator that caches has to reserve for planned steps, and the headroom for it."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import BudgetError
from recoup.planning.options import Room
from tests.caching_allocator import CachingAllocator
from tests.plan_oracle import Made, dense, in_a_row, ways_of

LONGEST, BATCH = 1024, 8


def gpt(num_blocks, width=768, num_tokens=50257):
    """GPT-2 with fewer blocks."""

    def forward(model, tokens):
        x = model.tokens(tokens) + model.places.weight[: tokens.shape[1]]
        logits = F.linear(model.norm(in_a_row(model.blocks, x)), model.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    block = functools.partial(nn.TransformerEncoderLayer, width, 12, 4 * width, **options)
    return Made(
        forward, tokens=nn.Embedding(num_tokens, width), places=nn.Embedding(LONGEST, width),
        blocks=[block() for _ in range(num_blocks)], norm=nn.LayerNorm(width),
    )  # fmt: skip


class Events(StorageTracker):
    """Each storage that is made or freed, in order: its key, and its bytes or 0."""

    def __init__(self):
        super().__init__()
        self.found = []

    def _count(self, followed, num_bytes):
        if followed.num_bytes != num_bytes:
            self.found.append((followed.key, num_bytes))
        super()._count(followed, num_bytes)


@functools.cache
def events_of_lengths(num_lengths=20, num_blocks=2):
    """The events before training, and those of a planned step of each length.

    The steps of GPT-2's sizes are run without values. Those in which a plan is made are not among
    them: what these take depends on the room that there is.
    """
    draw = random.Random(0)
    lengths = [draw.randint(64, LONGEST) for _ in range(num_lengths)]
    with FakeTensorMode(allow_non_fake_inputs=True), Events() as events:
        model = gpt(num_blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(length):
            model(torch.zeros(BATCH, length, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step(LONGEST)
        tokens = torch.zeros(BATCH, LONGEST, dtype=torch.long)
        points = recoup.plan(model, tokens).points
        budget = (2 * points[0].peak_bytes + points[-1].peak_bytes) // 3
        made = recoup.plan(model, tokens, budget=budget, replan=True).apply()
        for length in sorted(set(lengths), reverse=True):
            model(torch.zeros(BATCH, length, dtype=torch.long))  # makes a plan, if it needs one
        before, events.found = events.found, []
        for length in lengths:
            step(length)
        assert len(made.family) > 1
    return before, events.found


class Run:
    """The events, in an allocator that has so many bytes for steps after what is there before."""

    def __init__(self, step_bytes=None, *, expandable):
        before, events = events_of_lengths()
        self.allocator = CachingAllocator(expandable=expandable)
        self._alive = {}
        self._feed(before)
        self.allocator.empty_cache()
        self.allocator.reset_peaks()
        self.standing = self.allocator.now["allocated"]
        if step_bytes is not None:
            self.allocator.limit = self.standing + step_bytes
        self.fits = self._feed(events)

    def _feed(self, events):
        for key, num_bytes in events:
            if key in self._alive:
                self.allocator.free(self._alive.pop(key))
            if num_bytes:
                block = self.allocator.allocate(num_bytes)
                if block is None:
                    return False
                self._alive[key] = block
        return True


@functools.cache
def peak_of_steps(*, expandable):
    run = Run(expandable=expandable)
    return run.allocator.peak["allocated"] - run.standing


@pytest.mark.parametrize(
    ("headroom", "expandable", "fits"),
    [(0.05, True, True), (0.0, True, False), (0.35, False, True), (0.05, False, False)],
)
def test_what_lengths_reserve_keeps_to_the_budget(headroom, expandable, fits):
    """Steps whose peak leaves so much of a budget free can be run in that budget, or cannot."""
    budget = Room(0, headroom).budget_for(peak_of_steps(expandable=expandable))
    run = Run(budget, expandable=expandable)
    assert run.allocator.peak["reserved"] <= run.standing + budget
    assert run.fits == fits


@pytest.mark.parametrize("headroom", [0.0, 0.05, 0.3])
def test_the_least_budget_for_a_step_suffices(headroom):
    for step_bytes in (1, 20, 999, 12_345_678_901):
        room = Room(100, headroom)
        budget = room.budget_for(step_bytes)
        assert room.of(budget) >= step_bytes > room.of(budget - 1)


def test_a_plan_leaves_its_headroom_free():
    model, x = dense(), torch.ones(256, 64)
    frontier = recoup.plan(model, x, headroom=0.25)
    assert "; 0.25 of a budget is left for fragmentation" in str(frontier)
    least = frontier.least_bytes
    with pytest.raises(BudgetError, match=r"with a headroom of 0\.25 of it") as caught:
        frontier.plan(least - 8)
    assert caught.value.least_bytes == least
    most = frontier.points[-1].peak_bytes
    assert ways_of(frontier.plan(most)) == {"keep"}
    assert ways_of(frontier.plan(most - 4)) != {"keep"}
    for budget in (least, (least + most) // 8 * 4):
        plan = frontier.plan(budget)
        assert plan.rehearsed_peak_bytes <= 0.75 * budget == plan.usable_bytes
        assert "left for fragmentation: 0.25 of the budget" in str(plan)
        assert plan.rehearsed_peaks == (plan.rehearsed_peak_bytes,) * 2 + (None,)
    assert recoup.plan(model, x, budget=budget).headroom == 0
