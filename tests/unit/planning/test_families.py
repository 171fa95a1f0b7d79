"""Families of plans: how many are made for lengths that grow, or that jump."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recoup.planning.options import PlanOptions, Room
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


class Family(PlansByShape):
    num_plans = num_trials = 0

    def _made(self, step, *, has_room):
        self.num_plans += 1
        room = 0.02 if has_room else 0.0
        return FakePlan(step.args[0].shape, self.plans[0].quadratic, room)

    def _peak_under(self, plan, step):
        self.num_trials += 1
        return peak(step.args[0].shape, plan.kept, plan.quadratic)


def served(shapes, quadratic):
    """The plans, and the most time of a step relative to a plan of its own."""
    options, model, first = PlanOptions(), nn.Linear(1, 1), FakePlan(shapes[0], quadratic)
    step = options.step(model, model, (torch.empty(shapes[0]),), {})
    family, worst = Family(first, step, BUDGET, options), 0.0
    family.begin(SimpleNamespace(follower=True, begin=lambda modules: None))
    for shape in shapes:
        family.serve((torch.empty(shape),), {})
        kept = family._entry.plan.kept
        assert peak(shape, kept, quadratic) <= BUDGET
        worst = max(worst, seconds(kept) / seconds(most_kept(shape, quadratic)))
    return family, worst


KINDS = {
    "random": random.Random(0).sample(range(LEAST, MOST), MOST - LEAST),
    "there and back": [*range(LEAST, MOST), *range(MOST, LEAST, -1)],
}


# Of one sequence, or of as many tokens, so that no shape covers another.
SHAPES = {
    "a sequence": (lambda length: (1, length), [0, 60], 16),
    "tokens": (lambda length: (256 // length, length), [0, 400], 6),
}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_few_plans_that_lose_little(kind, shapes):
    shape_of, quadratics, most = SHAPES[shapes]
    for quadratic in quadratics:
        family, worst = served([shape_of(length) for length in KINDS[kind]], quadratic)
        assert worst <= 1.05
        assert family.num_plans <= most


def test_a_shape_that_takes_far_more_is_not_tried():
    family, _ = served([(1, LEAST), (1, MOST)], 60)
    assert (family.num_plans, family.num_trials) == (1, 0)
