"""Families of plans: how many are made for lengths that grow, or that jump."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recoup.planning.options import Room
from recoup.planning.pending import StepBound
from recoup.planning.replanning import PlansByShape

BUDGET = 10_000_000
NUM_BLOCKS = 24
LEAST, MOST = 32, 256


def peak(shape, kept, quadratic):
    """The bytes of a step that keeps some of its blocks: gradients, states, and what is kept."""
    num, length = shape
    return 200_000 + num * length * (6000 + (6000 + quadratic * length) * kept)


def seconds(kept):
    return 3 + (NUM_BLOCKS - kept) / NUM_BLOCKS


@functools.cache
def most_kept(shape, quadratic, budget=BUDGET):
    """The most blocks that can be kept."""
    fits = (k for k in range(NUM_BLOCKS, 0, -1) if peak(shape, k, quadratic) <= budget)
    return next(fits, 0)


class FakePlan:
    planned = SimpleNamespace(root=None, followed_modules=(), num_forwards=1)
    sizes = SimpleNamespace(include=lambda shapes: None)
    budget_bytes, baseline_bytes, schedule = BUDGET, 0, None
    usable_bytes = BUDGET

    def __init__(self, shape, quadratic, room=0.0):
        self.shape, self.quadratic = shape, quadratic
        most = self.kept = most_kept(shape, quadratic)
        while self.kept and seconds(self.kept - 1) <= (1 + room) * seconds(most):
            self.kept -= 1
        self.rehearsed_peak_bytes = peak(shape, self.kept, quadratic)
        assert self.rehearsed_peak_bytes <= BUDGET

    def bound(self, pending):
        return StepBound(BUDGET, Room(0, 0.0), self.rehearsed_peak_bytes, [0], 0, [], pending)

    def follower(self, bound):
        return None

    def most_lost(self, share):
        best = seconds(max(most_kept(self.shape, self.quadratic, BUDGET / share), self.kept))
        return seconds(self.kept) / best - 1


class Maker:
    def __init__(self, quadratic):
        self.quadratic = quadratic
        self.num_plans = self.num_trials = 0

    def plan(self, args, kwargs, num_forwards, *, has_room):
        self.num_plans += 1
        return FakePlan(args[0].shape, self.quadratic, 0.02 if has_room else 0.0)

    def peak_under(self, plan, args, kwargs):
        self.num_trials += 1
        return peak(args[0].shape, plan.kept, self.quadratic)


def served(shapes, quadratic):
    """The maker, the plans, and the most time of a step relative to a plan of its own."""
    maker = Maker(quadratic)
    first = FakePlan(shapes[0], quadratic)
    family = PlansByShape(nn.Linear(1, 1), first, (torch.empty(shapes[0]),), {}, maker)
    family.begin(SimpleNamespace(follower=True, begin=lambda modules: None))
    worst = 0.0
    for shape in shapes:
        family.serve((torch.empty(shape),), {})
        kept = family.chosen.kept
        assert peak(shape, kept, quadratic) <= BUDGET
        worst = max(worst, seconds(kept) / seconds(most_kept(shape, quadratic)))
    return maker, family.plans, worst


KINDS = {
    "random": random.Random(0).sample(range(LEAST, MOST), MOST - LEAST),
    "there and back": [*range(LEAST, MOST), *range(MOST, LEAST, -1)],
}


@pytest.mark.parametrize("quadratic", [0, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_few_plans_that_lose_little(kind, quadratic):
    maker, plans, worst = served([(1, length) for length in KINDS[kind]], quadratic)
    assert worst <= 1.05
    assert maker.num_plans <= 16
    assert kind != "random" or len(plans) <= maker.num_plans  # some are dropped


@pytest.mark.parametrize("quadratic", [0, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_as_many_tokens(kind, quadratic):
    """Short sequences come in larger batches, so that no shape covers another."""
    maker, _, worst = served([(256 // length, length) for length in KINDS[kind]], quadratic)
    assert worst <= 1.05
    assert maker.num_plans <= 4


def test_a_shape_that_takes_far_more_is_not_tried():
    maker, _, _ = served([(1, LEAST), (1, MOST)], 60)
    assert (maker.num_plans, maker.num_trials) == (1, 0)
