"""The frontier of a model, the points that are rehearsed, stages of pipelines, and the largest."""

from __future__ import annotations

import functools
import pickle
import random
from bisect import bisect_right
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from recoup.planning import frontier as frontier_module
from recoup.planning.plan import choose
from recoup.planning.verification import DifferentStepError
from tests.neighbours.planned import Net, give_steady_times, give_steps_times, loss_of
from tests.plan_oracle import Made, assert_as_plain, between, peak_of, stack, step_of, ways_of


def of_net(num_blocks=5, num_rows=64, **options):
    """A model, a step of it, its input, and its frontier."""
    torch.manual_seed(0)
    model, x = Net(32, num_blocks), torch.randn(num_rows, 32)
    model.stem.eval()  # so that all steps are the same
    frontier = recoup.plan(model, x, loss=loss_of, **options)
    return model, step_of(model, x, loss=loss_of), x, frontier


def test_points_are_what_plans_take_and_what_the_table_shows():
    _, _, _, frontier = of_net()
    points = frontier.points
    assert [point.peak_bytes for point in points] == sorted({p.peak_bytes for p in points})
    times = [point.relative_time for point in points]
    assert times == sorted(times, reverse=True)
    assert (points[-1].relative_time, points[-1].num_forwards) == (1.0, 5)
    assert points[0].peak_bytes <= frontier.least_bytes < 1.02 * points[0].peak_bytes
    plan = frontier.plan(points[-2].peak_bytes + 4096)  # a rehearsal may take a little more
    assert plan.predicted_peak_bytes == points[-2].peak_bytes
    assert sum(row.num_forwards for row in plan.blocks) == points[-2].num_forwards
    title, _, head, *rows = str(frontier).splitlines()
    assert title.startswith("Plans for Net: 5 blocks, from ")
    assert head.split() == ["peak", "time", "forwards", "blocks"]
    assert 2 < len(rows) <= 12


class Expanding(nn.Module):
    """A block in whose backward a node takes memory for a moment, as a sum over rows of a GPU."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x):
        hidden = self.up(x).tanh()
        num = 2 * hidden.numel()
        hidden.grad_fn.register_hook(lambda *_: (torch.empty(num), None)[1])
        return x + self.down(hidden.sin())


def encoders(num=4):
    return [nn.TransformerEncoderLayer(32, 4, 128, 0.0, batch_first=True) for _ in range(num)]


def recurrent(kind, *, is_residual):
    def forward(layers, x):
        for layer in layers.parts:
            y = layer(x)[0]
            x = x + y if is_residual else y
        return x

    return Made(forward, parts=[kind(32, 32, batch_first=True) for _ in range(4)])


class Caching(Expanding):
    def forward(self, x, cache):
        if cache is not None:
            cache.filled.append(2 * x)
        return x + self.down(self.up(x).tanh())


def filling(layers, x, num_without=0):
    cache = SimpleNamespace(filled=[])
    for layer in layers.parts[:num_without]:
        x = layer(x, None)
    x = x[:, :4] + 1 if num_without else x
    for layer in layers.parts[num_without:]:
        x = layer(x, cache)
    return x


def half_frozen():
    layers = lambda: (nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))  # noqa: E731
    model = stack(8, lambda: nn.Sequential(*layers()))
    model[:4].requires_grad_(False)
    return model


PREDICTED = {
    # What a node has saved is alive until its gradients are summed up, but not if made again.
    "kept until a node has ended": lambda: nn.Sequential(*(Expanding(32) for _ in range(6))),
    # Their attention saves a copy of its input in another layout.
    "inputs that are not held": lambda: nn.Sequential(*encoders()),
    "inputs of recurrent layers": lambda: recurrent(nn.RNN, is_residual=True),
    # What calls were given, and may fill, lives as long as their chain.
    "a cache that blocks fill": lambda: Made(filling, parts=[Caching(32) for _ in range(6)]),
    "a cache of the last chain": lambda: Made(
        partial(filling, num_without=3), parts=[Caching(32) for _ in range(8)]
    ),
    # Joining its steps is not done again where a run ends with the last residual.
    "joints of recurrent layers": lambda: recurrent(nn.GRU, is_residual=False),
    # Autocast casts a weight once, however often it is used.
    "one block many times": lambda: nn.Sequential(*encoders(1) * 4),
    "frozen blocks": half_frozen,
}


@pytest.mark.parametrize(
    ("name", "is_autocast"),
    [
        *((name, False) for name in PREDICTED),
        *((name, True) for name in ("kept until a node has ended", "one block many times")),
    ],
)
def test_every_plan_takes_what_was_predicted(name, is_autocast):
    torch.manual_seed(0)
    model, x = PREDICTED[name](), torch.randn(16, 16, 32)
    near = 0.06 if "many times" in name else 0.02  # products that it keeps are counted less well
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        frontier = recoup.plan(model, x, loss=lambda y: y.float().square().mean())
        assert len(frontier.points) > 2
        for point in frontier.points[:12:3]:
            plan = frontier.plan(int((1 + near) * point.peak_bytes))
            assert plan.predicted_peak_bytes >= (1 - near) * point.peak_bytes
            assert plan.rehearsed_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=near)


@pytest.mark.parametrize("change", [nn.Module.eval, lambda model: model.requires_grad_(False)])
def test_another_state_of_the_model_and_other_autocast_are_refused(change):
    model, _, x, frontier = of_net()
    with torch.autocast("cpu", torch.bfloat16):
        of_autocast = recoup.plan(model, x, loss=loss_of)
        of_autocast.plan("1 GiB")
    with pytest.raises(ValueError, match=r"or autocast have changed.* within the autocast"):
        of_autocast.plan("1 GiB")
    change(model)
    with pytest.raises(ValueError, match="measured for another state of the Net"):
        frontier.plan("1 GiB")


def test_a_further_plan_runs_few_steps_and_compares_with_the_parameters_of_now():
    model, step, _, frontier = of_net()
    budget, calls = between(frontier, 0.5), []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.stem.register_forward_hook(lambda *_: calls.append(1))
    plan = frontier.plan(budget)
    assert len(calls) <= 4  # the plain step, the least, the planned one, and its time
    assert_as_plain(plan, step)


def test_an_error_of_too_few_bytes_has_the_frontier_with_it():
    _, _, _, frontier = of_net()
    with pytest.raises(BudgetError) as info:
        frontier.plan(10)
    assert info.value.frontier is frontier
    sent = pickle.loads(pickle.dumps(info.value))
    assert (sent.least_bytes, sent.frontier) == (info.value.least_bytes, None)
    assert frontier.plan(info.value.least_bytes).rehearsed_peak_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_steps_of_compiled_blocks_and_of_others_are_timed_where_predictions_are_close(monkeypatch):
    give_steady_times(monkeypatch)
    monkeypatch.setattr(frontier_module, "_CLOSE", 10.0)
    frontier = of_net(num_blocks=3, compile="aot_eager")[-1]
    assert True in {point.is_compiled for point in frontier.points}
    assert "compiled" in str(frontier)
    peaks = {}
    for compiled, others in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.01)):
        give_steps_times(monkeypatch, compiled=compiled, others=others)
        plan = frontier.plan("1 GiB")
        is_compiled = any("compiled" in way for way in ways_of(plan))
        peaks[is_compiled] = plan.rehearsed_peak_bytes
        assert is_compiled == (others > compiled) or others == 1.01
    assert set(peaks) == {True, False}
    assert plan.rehearsed_peak_bytes == min(peaks.values())  # of those about as fast

    verified = frontier_module.verified

    def other_fails(kind, *args):
        if kind.is_compiled:
            return verified(kind, *args)
        raise DifferentStepError("another")

    monkeypatch.setattr(frontier_module, "verified", other_fails)
    assert any("compiled" in way for way in ways_of(frontier.plan("1 GiB")))


# -- points that are rehearsed ---------------------------------------------------------------------


def test_few_points_are_rehearsed_and_what_is_named_is_found_again():
    """F5: the frontier is bisected, also where rehearsals are no order at all."""
    draw, met = random.Random(0), []

    def rehearse(place):
        met.append(place)
        return peaks[place]

    for _ in range(300):
        num_points = draw.choice([1, 2, 3, 10, 100])
        predicted = sorted(draw.randrange(100, 1000) for _ in range(num_points))
        holds = draw.random() < 0.2
        peaks = [int(p * (1 if holds else draw.uniform(0.7, 1.6))) for p in predicted]
        budget = draw.randrange(50, 1600)
        within = draw.choice([1.0, 1.25])
        met.clear()
        choice = choose(predicted, budget, rehearse, fastest_within=within)
        assert len(met) == len(set(met)) <= num_points.bit_length() + 6 + (within > 1)
        if predicted[-1] <= within * budget and peaks[-1] <= budget:
            assert choice.point_index == num_points - 1
        if holds:
            assert (choice.point_index or 0) == max(bisect_right(peaks, budget) - 1, 0)
            assert len(met) <= 2 + (within > 1)
        assert (choice.point_index is None) == (choice.peak_bytes > budget)
        if choice.point_index is not None:
            assert peaks[choice.point_index] == choice.peak_bytes
        again = choose(predicted, choice.least_bytes, rehearse)
        assert again.point_index is not None
        assert peaks[again.point_index] <= choice.least_bytes


# -- stages of a pipeline: each microbatch has a backward, the first one first ---------------------


def test_a_step_of_a_stage_keeps_to_its_budget():
    pending, (model, _, x, frontier) = 2, of_net(4, 256)

    def one_forward_one_backward():
        waiting = deque()
        for _ in range(4):
            waiting.append(model(x))
            if len(waiting) > pending:
                loss_of(waiting.popleft()).backward()
        while waiting:
            loss_of(waiting.popleft()).backward()

    with pytest.raises(BudgetError) as error:
        frontier.plan("1 KiB", pending=pending)
    least, most = error.value.least_bytes, frontier.plan("1 GiB", pending=pending).most_bytes
    for budget in (least, (least + most) // 2):
        plan = frontier.plan(budget, pending=pending)
        assert_as_plain(plan, one_forward_one_backward)
        assert ways_of(plan) != {"keep"}


def test_what_waits_holds_little_and_one_forward_more_is_refused():
    """A plan for a step alone keeps what costs nothing there, and several times here."""
    model, _, x, frontier = of_net(4, 256)
    plans = [
        frontier.plan(frontier.plan("1 GiB", pending=pending).least_bytes, pending=pending)
        for pending in (None, 3, 1)
    ]
    alone, beside, _ = (sum(row.keeps_bytes for row in plan.blocks) for plan in plans)
    assert beside < alone
    with plans[-1].applied():
        waiting = [model(x), model(x)]
        with pytest.raises(BudgetError, match="for the third time before a backward"):
            model(x)
        loss_of(waiting.pop()).backward()
        waiting.append(model(x))


# -- the largest batch or sequence in a budget -----------------------------------------------------


def net():
    torch.manual_seed(0)
    return Net(16, 4)


def batch(size):
    return torch.ones(size, 16)


largest = functools.partial(recoup.largest, least=2, loss=loss_of)


def test_the_largest_batch_keeps_to_the_budget_and_few_rows_more_do_not():
    model, budget = net(), 150 * 2**10
    found = largest(batch, model, budget=budget)
    too_many = batch(int((found.size + 1) / 0.98) + 1)
    with pytest.raises(BudgetError):
        recoup.plan(model, too_many, budget=budget, loss=loss_of)
    assert found.plan.rehearsed_peak_bytes <= budget
    step = step_of(model, *found.args, loss=loss_of, **found.kwargs)
    assert peak_of(model, step) > 1.3 * budget  # of the model alone
    with found.plan.applied():
        assert peak_of(model, step) <= budget


def test_a_bound_that_fits_is_found_with_few_probes_and_one_size_with_one():
    sizes = []

    def build(size):
        sizes.append(size)
        return (batch(20)[:size] if size == 20 else batch(size),)

    assert largest(build, net(), budget="1 GiB", most=100).size == 100
    assert len(set(sizes)) <= 8
    assert largest(build, net(), budget="1 MiB", least=20, most=20).size == 20


def test_a_model_that_takes_no_more_says_the_way_out():
    class Positions(Net):
        def forward(self, x):
            if len(x) > 20:
                raise IndexError("20 positions")
            return super().forward(x)

    with pytest.raises(IndexError, match="20 positions") as caught:
        largest(batch, Positions(16, 3), budget="1 MiB", least=8)
    (way_out,) = caught.value.__notes__
    assert "`most`" in way_out
