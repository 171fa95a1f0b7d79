"""The bytes that a plan promises: by the allocator, feasible, and for which batch."""

from __future__ import annotations

import random
import types
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from recoup.flows import NICE
from recoup.planning.report import what_can_be_inverted
from recoup.planning.verified_plan import choose
from recoup.schedules import Advance, Drop, Keep, Load, Reverse, Schedule, Tape, simulate
from tests.alive import allocated_bytes


def square(y):
    return y.square().mean()


def step_bytes(model, x) -> int:
    """The peak of a step with empty gradients, by the allocator."""
    model.zero_grad()

    def step() -> None:
        y = model(x)
        square(y).backward()

    peak, _ = allocated_bytes(step)
    model.zero_grad()
    return peak


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.out = nn.Linear(32, 32)

    def forward(self, x):
        return x + self.out(self.lstm(x)[0])


class Depthwise(nn.Module):
    """The block of a ConvNeXt."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = self.conv(x).permute(0, 2, 3, 1)
        return x + self.down(nn.functional.gelu(self.up(y))).permute(0, 3, 1, 2)


def dropouts():
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(20)]
    return nn.Sequential(*layers), torch.randn(8, 16)


def lstms():
    return nn.Sequential(*[Recurrent() for _ in range(4)]), torch.randn(8, 16, 32)


def depthwise():
    return nn.Sequential(*[Depthwise() for _ in range(4)]), torch.randn(4, 16, 16, 16)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("build", [lstms, depthwise, dropouts])
def test_a_planned_peak_is_within_the_budget_by_the_allocator(build):
    """F6: temporaries within kernels and random states are in the bytes of a plan."""
    torch.manual_seed(0)
    model, x = build()
    whole = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert whole.most_bytes == pytest.approx(step_bytes(model, x), rel=0.2)
    for part in (0.0, 0.5):
        budget = int(whole.least_bytes + part * (whole.most_bytes - whole.least_bytes))
        plan = recoup.plan(model, x, budget=budget, loss=square)
        with plan.applied():
            peak = step_bytes(model, x)
        assert peak <= budget
        assert plan.rehearsed_peak_bytes == peak


# -- the least bytes ---------------------------------------------------------------------------


class WithFrozenStem(nn.Module):
    """Convolutions and layers that are frozen, with large images, before layers that train."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.backbone = nn.Sequential(*[Depthwise() for _ in range(3)])
        self.stem.requires_grad_(False)
        self.backbone.requires_grad_(False)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(4)
        )

    def forward(self, x):
        x = self.backbone(self.stem(x)).flatten(2).transpose(1, 2)
        for layer in self.encoder:
            x = layer(x)
        return x


def frozen_stem():
    return WithFrozenStem(), torch.randn(2, 3, 64, 64)


class LargeBetween(nn.Module):
    """Code between blocks that takes much more memory than they do, for a moment."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(6)
        )

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number == 3:
                with torch.no_grad():
                    scale = x.repeat(1, 200).cos().mean()
                x = x * scale
            x = layer(x)
        return x


def large_between():
    return LargeBetween(), torch.randn(64, 16)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("build", [frozen_stem, large_between, dropouts])
def test_the_least_bytes_suffice(build):
    """F5: what is named as the least was rehearsed, by plans and by errors."""
    torch.manual_seed(0)
    model, x = build()
    whole = recoup.plan(model, x, budget="1 GiB", loss=square)
    at_least = recoup.plan(model, x, budget=whole.least_bytes, loss=square)
    assert at_least.rehearsed_peak_bytes <= whole.least_bytes == at_least.least_bytes
    with pytest.raises(BudgetError) as caught:
        recoup.plan(model, x, budget="1 KiB", loss=square)
    named = caught.value.least_bytes
    assert f"({named} bytes" in str(caught.value)
    assert recoup.plan(model, x, budget=named, loss=square).rehearsed_peak_bytes <= named


@pytest.mark.sampled(1)
@pytest.mark.parametrize("build", [frozen_stem, large_between])
def test_moments_before_and_between_blocks_are_predicted(build):
    """F5: frozen blocks and code between blocks set the peak, and the costs say so."""
    torch.manual_seed(0)
    model, x = build()
    plan = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert plan.frontier[0].peak_bytes == pytest.approx(plan.least_bytes, rel=0.02)


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


def test_two_rehearsals_do_where_predictions_hold():
    """F5"""
    peaks = list(range(100, 200))
    met, rehearse = rehearsing(peaks)
    assert choose(peaks, 150, rehearse) == (50, 150, 100)
    assert met == [50, 0]
    met.clear()
    assert choose(peaks, 60, rehearse) == (None, 100, 100)
    assert met == [0]


def test_others_are_rehearsed_where_the_least_took_more_than_was_predicted():
    met, rehearse = rehearsing([110, 90, 160, 200])
    for budget in (95, 90):
        assert choose([100, 120, 130, 300], budget, rehearse) == (1, 90, 90)
    assert choose([100, 120, 130, 300], 80, rehearse) == (None, 90, 90)
    assert 3 not in met


# -- what a plan does not choose -------------------------------------------------------------------


def test_a_plan_says_that_it_could_invert():
    """R10: where a plan must be exact, its least is not the least of a flow."""
    torch.manual_seed(0)
    flow, x = NICE((1, 4, 4), levels=None, width=16), torch.randn(32, 1, 4, 4)
    flow(x)  # where each ActNorm starts
    options = {"loss": lambda found: found[1].sum() + square(found[0][0])}
    way_out = "blocks have an inverse .* a plan with exact=False may take less"
    with pytest.raises(BudgetError, match=way_out) as caught:
        recoup.plan(flow, x, budget="1 KiB", **options)
    assert "exact=False" in str(recoup.plan(flow, x, budget=caught.value.least_bytes, **options))
    least = recoup.plan(flow, x, exact=False, **options).least_bytes
    assert least <= caught.value.least_bytes
    assert what_can_be_inverted(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), []) == []
    flow.memory = "constant"
    assert what_can_be_inverted(flow, []) == []


# -- other batches ---------------------------------------------------------------------------------


def test_a_batch_larger_than_planned_is_said_once():
    """N15: with how much; smaller batches and other shapes of one size are no news."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    x = torch.randn(4, 8, 16)
    with recoup.plan(model, x, budget="1 GiB", loss=square).applied():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for other in (x, x[:1], x.reshape(8, 4, 16), x.reshape(32, 16)):
                model(other)
        with pytest.warns(UserWarning, match=r"given 64 KiB of arguments, 32 times as much"):
            model(torch.randn(128, 8, 16))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.randn(128, 8, 16))


class Batch:
    """A batch that holds itself and its tensors in a store, as those of torch_geometric do."""

    def __init__(self, x):
        self.store = types.SimpleNamespace(mapping={"x": x}, parent=self, rest=[*range(10**4)])

    def __getattr__(self, name):
        raise RuntimeError("this is the user's code")


class OfBatches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in "four"))

    def forward(self, batch):
        return self.blocks(batch[0].store.mapping["x"]).square().mean()


def test_a_larger_batch_in_an_object_is_said():
    model = OfBatches()
    with recoup.plan(model, [Batch(torch.randn(4, 16))], budget="1 GiB").applied():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model([Batch(torch.randn(4, 16))])
        with pytest.warns(UserWarning, match="given 512 B of arguments, 2 times as much"):
            model([Batch(torch.randn(8, 16))])


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_a_chain_without_a_backward_needs_no_plan(kind):
    """N10: frozen modules and integers; an input that requires a gradient is planned for."""
    chain = recoup.Sequential(*[nn.Linear(4, 4) for _ in range(4)], memory="1 MiB")
    chain.requires_grad_(False)
    if kind is torch.int64:
        chain.insert(0, nn.Embedding(10, 4).requires_grad_(False))
        assert chain(torch.ones(3, 2, dtype=kind)).shape == (3, 2, 4)
        return
    x = torch.randn(2, 4)
    assert not chain(x).requires_grad
    assert recoup.applied_plans(chain) == []
    x.requires_grad_()
    want = torch.autograd.grad(nn.Sequential(*chain)(x).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(chain(x).sum(), x)[0], want)
    assert len(recoup.applied_plans(chain)) == 1


def test_blocks_that_keep_products_share_one_kept_input():
    torch.manual_seed(0)
    blocks = [(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    model, x = nn.Sequential(*(nn.Sequential(*block) for block in blocks)), torch.randn(512, 64)

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        square(model(x)).backward()
        return [*(p.grad for p in model.parameters()), torch.get_rng_state()]

    expected = gradients()
    frontier = recoup.plan(model, x, loss=square)
    plan = frontier.plan((frontier.least_bytes + frontier.points[-1].peak_bytes) // 2)
    kept = [getattr(action, "results", 0) for action in plan.schedule.actions]  # of `Advance` alone
    assert any(one and two for one, two in pairwise(kept))
    with plan.applied():
        assert all(map(torch.equal, gradients(), expected))
        assert step_bytes(model, x) <= plan.budget_bytes

    runs = [Advance(at, at + 1, len(plan.costs[at].results)) for at in range(8)]
    tapes, reverses = map(Tape, range(8)), map(Reverse, reversed(range(8)))
    actions = (Keep(0), *runs, Tape(8), Reverse(8), Load(0), Drop(0), *tapes, *reverses)
    schedule = Schedule(9, actions)
    with plan.planned.followed(schedule):
        assert all(map(torch.equal, gradients(), expected))
        in_forward, _ = allocated_bytes(lambda: model(x))
        peak = step_bytes(model, x)
    assert in_forward > sum(cost.results[-1].num_bytes for cost in plan.costs[:8])
    assert 0.97 < peak / simulate(schedule, costs=plan.costs).peak_bytes <= 1
