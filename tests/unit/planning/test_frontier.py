"""The frontier of a model, the points that are rehearsed, stages of pipelines, and the largest."""

from __future__ import annotations

import pickle
import random
from bisect import bisect_right
from collections import deque
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from recoup.planning import frontier as frontier_module
from recoup.planning import options
from recoup.planning.plan import choose
from tests import plan_oracle
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
    title, _, head, *_ = str(frontier).splitlines()
    assert title.startswith("Plans for Net: 5 blocks, from ")
    assert head.split() == ["peak", "time", "forwards", "blocks"]


def expanding():
    """A block in whose backward a node takes memory for a moment, as a sum over rows of a GPU."""

    def forward(block, x):
        hidden = block.up(x).tanh()
        num = 2 * hidden.numel()
        hidden.grad_fn.register_hook(lambda *_: (torch.empty(num), None)[1])
        return x + block.down(hidden.sin())

    return Made(forward, up=nn.Linear(32, 256), down=nn.Linear(256, 32))


def encoders(num=4):
    return [nn.TransformerEncoderLayer(32, 4, 128, 0.0, batch_first=True) for _ in range(num)]


def recurrent(kind, *, is_residual):
    def forward(model, x):
        for layer in model.layers:
            x = is_residual * x + layer(x)[0]
        return x

    return Made(forward, layers=[kind(32, 32, batch_first=True) for _ in range(4)])


def mlp():
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def filling():
    """Blocks that fill a cache."""

    def caching(block, x, cache):
        cache.filled.append(2 * x)
        return x + block.mlp(x)

    def forward(model, x):
        cache = SimpleNamespace(filled=[])
        return plan_oracle.in_a_row([partial(part, cache=cache) for part in model.parts], x)

    return Made(forward, parts=[Made(caching, mlp=mlp()) for _ in range(6)])


def masked():
    """Blocks that do not save the mask that all are given."""

    def block():
        return Made(lambda block, x, mask: block.mlp(x) + mask, mlp=mlp())

    def forward(model, x):
        mask = model.mask(x)
        for block in model.blocks:
            x = block(x, mask)
        return x

    return Made(forward, blocks=[block() for _ in range(6)], mask=nn.Linear(32, 32))


def half_frozen():
    model = stack(8, mlp)
    model[:4].requires_grad_(False)
    return model


PREDICTED = {
    # What a node has saved is alive until its gradients are summed up, but not if made again.
    "kept until a node has ended": lambda: stack(6, expanding),
    # Their attention saves a copy of its input in another layout.
    "inputs that are not held": lambda: nn.Sequential(*encoders()),
    "inputs of recurrent layers": lambda: recurrent(nn.RNN, is_residual=True),
    # What calls were given, and may fill, lives as long as their chain.
    "a cache that blocks fill": filling,
    "a mask that is no state": masked,
    # Joining its steps is not done again where a run ends with the last residual.
    "joints of recurrent layers": lambda: recurrent(nn.GRU, is_residual=False),
    # Autocast casts a weight once, however often it is used.
    "one block many times": lambda: nn.Sequential(*encoders(1) * 4),
    "frozen blocks": half_frozen,
}
CAST = [(name, True) for name in ("kept until a node has ended", "one block many times")]


@pytest.mark.parametrize(("name", "is_autocast"), [*((name, False) for name in PREDICTED), *CAST])
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
    torch._foreach_mul_([parameter.data for parameter in model.parameters()], 1.5)
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
    assert "compiled" in str(frontier)
    peaks = {}
    for compiled, others in ((1.0, 2.0), (2.0, 1.0), (1.0, 1.01)):
        give_steps_times(monkeypatch, compiled=compiled, others=others)
        plan = frontier.plan("1 GiB")
        is_compiled = any("compiled" in way for way in ways_of(plan))
        peaks[is_compiled] = plan.rehearsed_peak_bytes
        assert is_compiled == (others > compiled) or others == 1.01
    assert plan.rehearsed_peak_bytes == min(peaks.values())  # of those about as fast


# -- points that are rehearsed ---------------------------------------------------------------------


def test_few_points_are_rehearsed_and_what_is_named_is_found_again():
    """F5: the frontier is bisected, also where rehearsals are no order at all."""
    draw, met = random.Random(0), []
    rehearse = lambda place: (met.append(place), peaks[place])[1]  # noqa: E731
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


# -- the part of a budget that is left for what an allocator that caches reserves ------------------


def test_a_plan_leaves_its_headroom_free_which_an_accelerator_has():
    model, x = plan_oracle.dense(), torch.ones(256, 64)
    for is_fixed, headroom in ((False, 0.05), (True, 0.25)):
        found = {"is_accelerator": lambda _: True, "has_fixed_segments": lambda _, f=is_fixed: f}
        with mock.patch.multiple(options, **found):
            assert recoup.plan(model, x, budget="1 GiB").headroom == headroom
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


largest = partial(recoup.largest, least=2, loss=loss_of)


def batch(size):
    return torch.ones(size, 16)


def test_the_largest_batch_keeps_to_the_budget_and_few_rows_more_do_not():
    model, budget = Net(16, 4), 150 * 2**10
    found = largest(batch, model, budget=budget)
    too_many = batch(int((found.size + 1) / 0.98) + 1)
    with pytest.raises(BudgetError):
        recoup.plan(model, too_many, budget=budget, loss=loss_of)
    assert found.plan.rehearsed_peak_bytes <= budget
    step = step_of(model, *found.args, loss=loss_of, **found.kwargs)
    assert peak_of(model, step) > 1.3 * budget  # of the model alone
    with found.plan.applied():
        assert peak_of(model, step) <= budget


def test_few_probes_find_a_bound_and_an_error_of_the_model_names_it():
    class Positions(Net):
        def forward(self, x):
            sizes.add(len(x))
            if len(x) > 100:
                raise IndexError("100 positions")
            return super().forward(x)

    sizes, model = set(), Positions(16, 3)
    assert largest(batch, model, budget="1 GiB", most=100).size == 100
    assert len(sizes) <= 8
    assert largest(batch, model, budget="1 MiB", least=20, most=20).size == 20
    with pytest.raises(IndexError, match="100 positions") as caught:
        largest(batch, model, budget="1 GiB")
    assert "`most`" in "".join(caught.value.__notes__)
