"""The bytes that a plan promises: which points are rehearsed, and for which batch they hold."""

from __future__ import annotations

import random
import types
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import recoup
from recoup.flows import NICE
from recoup.planning.report import what_can_be_inverted
from recoup.planning.verified_plan import choose
from recoup.schedules import Advance, Drop, Keep, Load, Reverse, Schedule, Tape, simulate
from tests.alive import allocated_bytes
from tests.neighbours.planned import assert_same, result_of
from tests.plan_oracle import Made, assert_as_plain, between, dense, peak_of, square, stack, step_of


def rehearsing(peaks):
    met = []

    def rehearse(place):
        met.append(place)
        return peaks[place]

    return met, rehearse


def test_few_points_are_rehearsed_and_what_is_named_is_found_again():
    """F5: the frontier is bisected, also where rehearsals are no order at all."""
    draw = random.Random(0)
    for _ in range(300):
        num_points = draw.choice([1, 2, 3, 10, 100])
        predicted = sorted(draw.randrange(100, 1000) for _ in range(num_points))
        peaks = [int(p * draw.uniform(0.7, 1.6)) for p in predicted]
        budget = draw.randrange(50, 1600)
        met, rehearse = rehearsing(peaks)
        within = draw.choice([1.0, 1.25])
        choice = choose(predicted, budget, rehearse, fastest_within=within)
        assert len(met) == len(set(met)) <= num_points.bit_length() + 6 + (within > 1)
        if predicted[-1] <= within * budget and peaks[-1] <= budget:
            assert choice.point_index == num_points - 1
        assert (choice.point_index is None) == (choice.peak_bytes > budget)
        if choice.point_index is not None:
            assert peaks[choice.point_index] == choice.peak_bytes
        again = choose(predicted, choice.least_bytes, rehearse)
        assert again.point_index is not None
        assert peaks[again.point_index] <= choice.least_bytes


HELD = list(range(100, 200))  # predictions that hold
ROSE = [peak if peak < 140 else peak + 20 for peak in HELD]


@pytest.mark.parametrize(
    ("peaks", "predicted", "budget", "choice", "rehearsed"),
    [
        (HELD, HELD, 150, (50, 150, 100), [50, 0]),
        (HELD, HELD, 60, (None, 100, 100), [0]),
        (ROSE, HELD, 150, (39, 139, 100), [50, 25, 38, 44, 41, 40, 39, 0]),
        ([150, 120, 140], [100, 110, 130], 145, (2, 140, 140), [2, 0]),
        ([150, 120, 140], [100, 110, 130], 115, (None, 140, 140), [1, 0, 2]),
        ([105, 160, 130], [100, 120, 140], 129, (0, 105, 105), [1, 0]),
    ],
)
def test_points_that_are_rehearsed(peaks, predicted, budget, choice, rehearsed):
    met, rehearse = rehearsing(peaks)
    assert choose(predicted, budget, rehearse) == choice
    assert met == rehearsed


def test_what_runs_inverted_already_is_not_proposed_for_it():
    assert what_can_be_inverted(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []) == []
    flow = NICE((1, 4, 4), levels=None, width=16)
    assert what_can_be_inverted(flow, []) != []
    flow.memory = "constant"
    assert what_can_be_inverted(flow, []) == []


class Batch:
    """A batch that holds itself and its tensors in a store, as those of torch_geometric do."""

    def __init__(self, x):
        self.store = types.SimpleNamespace(mapping={"x": x}, parent=self, rest=[*range(10**4)])

    def __getattr__(self, name):
        raise RuntimeError("this is the user's code")


def of_batches():
    return Made(lambda model, batch: model.blocks(batch[0].store.mapping["x"]), blocks=dense(4, 16))


OF_ROWS = (lambda: dense(4, 16), lambda num: torch.randn(num, 8, 16))
OF_BATCHES = (of_batches, lambda num: [Batch(torch.randn(num, 16))])


@pytest.mark.parametrize(
    ("build", "batch", "larger", "words"),
    [
        (*OF_ROWS, 128, "an argument of 128 x 8 x 16 where the plan is for 4 x 8 x 16"),
        (*OF_BATCHES, 8, "an argument of 8 x 16 where the plan is for 4 x 16"),
    ],
)
def test_a_batch_larger_than_planned_is_said_once(build, batch, larger, words):
    """N15: smaller batches, and as many rows without a batch, are no news."""
    model, x = build(), batch(4)
    others = [x[:1], x.reshape(32, 16)] if torch.is_tensor(x) else []
    plan = recoup.plan(model, x, loss=square)
    with plan.plan(plan.least_bytes).applied():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for other in (x, *others):
                model(other)
        with pytest.warns(UserWarning, match=words):
            model(batch(larger))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(batch(larger))


def test_blocks_that_keep_products_share_one_kept_input():
    model = stack(8, lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)))
    x = torch.randn(512, 64)
    step = step_of(model, x)
    expected = result_of(model, step)
    frontier = recoup.plan(model, x, loss=square)
    plan = frontier.plan(between(frontier, 0.5))
    kept = [getattr(action, "results", 0) for action in plan.schedule.actions]  # of `Advance` alone
    assert any(one and two for one, two in pairwise(kept))
    assert_as_plain(plan, step, expected)

    runs = [Advance(at, at + 1, len(plan.costs[at].results)) for at in range(8)]
    tapes, reverses = map(Tape, range(8)), map(Reverse, reversed(range(8)))
    actions = (Keep(0), *runs, Tape(8), Reverse(8), Load(0), Drop(0), *tapes, *reverses)
    schedule = Schedule(9, actions)
    with plan.planned.followed(schedule):
        assert_same(result_of(model, step), expected)
        in_forward, _ = allocated_bytes(lambda: model(x))
        peak = peak_of(model, step)
    assert in_forward > sum(cost.results[-1].num_bytes for cost in plan.costs[:8])
    assert 0.97 < peak / simulate(schedule, costs=plan.costs).peak_bytes <= 1
